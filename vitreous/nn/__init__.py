"""Parts: tensors in, tensors out. Nothing here knows of data, training or files."""
