"""Evaluation: metrics from logits and labels, and evaluators that run a model on a split."""
