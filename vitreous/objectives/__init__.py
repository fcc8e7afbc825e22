"""What a run minimises: modules with forward(batch) -> {"loss": ...}; mathematics and state only."""
