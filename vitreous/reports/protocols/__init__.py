"""The protocols of the verb `evaluate`: simple classifiers on a model's features, and alternative labels for its
predictions."""
