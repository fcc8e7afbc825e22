"""Datasets: layouts, annotations, decoding, augmentation and batches. This package does not import models."""
