"""From a file to pixels: what it tells before it is decoded, and the decoders of each format."""
