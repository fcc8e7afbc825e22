"""Studies: commands that reproduce figures and tables of papers, with a page of the result."""
