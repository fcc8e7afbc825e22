"""Config of each model family: a frozen dataclass with all values that are stored to rebuild a model. Does not import
PyTorch."""
