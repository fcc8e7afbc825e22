"""Recipes: functions that build a complete `Run`, with defaults for all options that are not set."""
