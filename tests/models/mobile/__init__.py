"""A family of its own, as one is added: a config, a module, and a row that a test registers."""
