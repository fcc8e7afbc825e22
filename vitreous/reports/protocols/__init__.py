"""The protocols of the verb `evaluate`: simple classifiers on a model's features, alternative labels for its
predictions, and retrieval of captions."""
