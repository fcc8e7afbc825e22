"""Model families: each consists of a frozen config and the module that it describes."""
