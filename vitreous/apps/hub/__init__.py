"""Publication of a model on the Hugging Face Hub: its files and its model card."""
