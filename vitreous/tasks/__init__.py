"""Tasks: one file per task, with all code that differs between tasks."""
