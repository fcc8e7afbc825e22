"""Modalities: what a model's input is. One file each; `base.py` is the contract, `table.py` the table."""
