"""Model families: each family is a frozen config dataclass and the module that it describes."""
