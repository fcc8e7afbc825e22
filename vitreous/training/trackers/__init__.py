"""Copies of a run's metrics for TensorBoard, Weights & Biases and MLflow. metrics.jsonl stays the original."""
