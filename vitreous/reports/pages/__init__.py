"""The pages that people open, their drawings and pictures."""
