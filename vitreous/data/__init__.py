"""Where images come from and how they become tensors. Knows nothing of models."""
