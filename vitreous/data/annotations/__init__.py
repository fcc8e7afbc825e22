"""Boxes, masks and class maps of images, from every format that has them."""
