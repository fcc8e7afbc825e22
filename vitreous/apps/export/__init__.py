"""Models as files for other programs, each run beside the original before it is there."""
