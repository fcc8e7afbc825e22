"""Dataset layouts: one per module, each with a function that returns a `Data`."""
