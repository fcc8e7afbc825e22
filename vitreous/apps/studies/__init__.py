"""The verb `study`: studies that reproduce figures and tables of papers, each with a page of its results."""
