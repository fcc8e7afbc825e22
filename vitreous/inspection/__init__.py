"""Read-only looks inside a model: numbers for the paper's inspection figures; drawing them is left to `reports`."""
