"""Figures of `vitreous inspect`: for each NAME of the table in `inspect.py` a function `make_NAME(scene)`."""
