"""Figures of `vitreous inspect`: a function `make_NAME(scene)` for each NAME of the table in `inspect.py`."""
