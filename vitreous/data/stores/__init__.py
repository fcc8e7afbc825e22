"""Files with many samples and random access: tar archives and Arrow tables."""
