"""The one loop, optimisers, schedules, checkpoints. Knows no objective and no model by name."""
