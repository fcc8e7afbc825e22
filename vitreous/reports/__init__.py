"""The verbs `evaluate` and `inspect`: JSON documents, figures, and self-contained HTML pages."""
