"""The layouts that data are read from: one a file, each a function that returns a `Data`."""
