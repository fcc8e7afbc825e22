"""Figures of `vitreous inspect`: a function `make_NAME(context)` for each NAME in `FIGURES` of `reports/inspect.py`."""
