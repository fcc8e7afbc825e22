"""Training objectives: modules with forward(batch) -> {"loss": ...}, without devices, logging or process groups."""
