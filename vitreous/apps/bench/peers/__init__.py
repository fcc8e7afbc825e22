"""Other libraries at the same work. None is a dependency: each is imported inside, and only where it is installed."""
