"""Neural network building blocks. They take and return tensors, and do not depend on data, training or files."""
