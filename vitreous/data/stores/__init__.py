"""Files that hold many samples: tar archives and Arrow tables, any sample at any time."""
