"""Benchmark steps of other libraries. None is a dependency: each is imported lazily if it is installed."""
