"""The protocols of the verb `evaluate`: a model's features judged by simple classifiers, its answers by other
labels."""
