"""Documents of `evaluate` and `inspect`, figures, and self-contained HTML pages."""
