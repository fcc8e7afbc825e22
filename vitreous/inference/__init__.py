"""Inference with trained models: predictions, features, exported files, and sampling from generative models."""
