"""Training loop, optimisers, schedules and checkpoints, independent of any particular objective or model."""
