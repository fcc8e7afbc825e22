"""What processes make of images."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Noised(NamedTuple):
    """Images with noise, (B, C, *image), the time of each as a model is told it, (B,) float32, and what the model is
    asked for, (B, C, *image)."""

    images: Tensor
    time: Tensor
    target: Tensor
