"""Checks of a dataset: statistics from one pass over every file, and findings that concern training."""
