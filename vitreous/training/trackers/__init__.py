"""Copy a run's metrics to TensorBoard, Weights & Biases and MLflow. metrics.jsonl remains the complete record."""
