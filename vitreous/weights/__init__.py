"""Weights, read and written: this project's bundle, and one rename table per foreign format."""
