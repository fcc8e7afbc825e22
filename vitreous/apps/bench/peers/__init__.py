"""Benchmark steps of other libraries. No library is a dependency: each one is imported when its step is built."""
