"""Read and write weights: bundles, this package's format, and foreign formats, each described by a table of tensor
names."""
