"""A toy model family added as a user would: a config, a module, and a table entry that a test registers."""
