"""What a model is for: one file per task, which holds everything that differs between tasks."""
