"""Functions that return a frozen `Run`: defaults for all options that are not set."""
