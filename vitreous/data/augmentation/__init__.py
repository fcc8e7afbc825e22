"""Random augmentation of images, clips, volumes and signals: crops, colours, erasing, multi-crop views, patch masks."""
