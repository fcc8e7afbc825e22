"""Read boxes, masks and class maps of images from all supported annotation formats."""
