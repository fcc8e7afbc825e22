"""Training objectives: modules with forward(batch) -> {"loss": ...}, which do not handle devices, logging or process
groups."""
