"""Export of models to files for other programs, each verified against the original before it is saved."""
