"""Datasets checked, freed of copies, packed and converted: the verbs of `vitreous data`."""
