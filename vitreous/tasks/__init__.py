"""The tasks of models, such as classification and detection: one file per task, with all code that differs between
tasks."""
