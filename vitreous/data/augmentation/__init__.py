"""Random augmentation of training samples: crops, colours, erasing, multi-crop views. Also patch masks for
pre-training."""
