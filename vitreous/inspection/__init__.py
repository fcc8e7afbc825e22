"""Read-only analysis of models: computes the data of inspection figures from the papers, which `reports` draws."""
