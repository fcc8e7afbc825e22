"""Modalities: the kinds of model input, one per module. `base.py` is the interface, `table.py` the registry."""
