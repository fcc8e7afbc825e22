"""A trained model behind HTTP: admission, decoding in processes that may die, batches, and a page."""
