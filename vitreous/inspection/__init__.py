"""Read-only analysis of models: data for the inspection figures of the papers; `reports` draws them."""
