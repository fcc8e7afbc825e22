"""The pages that people open, what is drawn on them, and the pictures that they show."""
