"""Read and write weights: this project's bundle, and one rename table per foreign format."""
