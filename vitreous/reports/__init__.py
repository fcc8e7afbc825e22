"""What people read: documents of `evaluate` and `inspect`, figures, and pages that need nothing but themselves."""
