"""The frozen config of each family: everything that must be stored to build a model again. Needs no PyTorch."""
