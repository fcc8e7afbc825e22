"""Decode files to pixels: header checks before decoding, and the decoders of each format."""
