"""A trained model put to use."""
