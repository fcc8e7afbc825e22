"""The verbs of `vitreous data`: check, dedup, pack and convert datasets."""
