"""Drawings of what `inspection` found, one figure of `vitreous inspect` to a file: `make(scene)` gives what was
made."""
