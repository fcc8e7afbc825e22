"""The command line: one module per verb. Heavy imports, such as PyTorch, are inside the functions."""
