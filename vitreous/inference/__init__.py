"""From images to the outputs of a model: engines (PyTorch, OpenVINO), their choice and cache, packing and tiles."""
