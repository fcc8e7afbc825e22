"""One idea per file: a frozen config and the module that it describes."""
