"""The frozen config of each family: all values that are stored to rebuild a model. Does not import PyTorch."""
