"""One file per foreign format: the names of its tensors, and how its models are recognised."""
