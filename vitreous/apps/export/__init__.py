"""Export of models to files for other programs. Each file is verified against the original model before it is saved."""
