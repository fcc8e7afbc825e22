"""The straight line from noise to an image (rectified flow, arXiv:2209.03003), as `gaussian` is for diffusion.

B batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vitreous.generation.noised import Noised
from vitreous.generation.process import Flow
from vitreous.system.machine import copy_to_device


class Line:
    """A flow: x_t = t x + (1 - t) e, for times t of 0 to 1."""

    def __init__(self, process: Flow) -> None:
        self.process = process

    def moment(self, done: float, count: int) -> Tensor:
        """(B,) float32 times of `count` images, so much of the way from noise (0) to the image (1)."""
        return torch.full((count,), done)

    def noised(self, images: Tensor, noise: Tensor, time: Tensor) -> Noised:
        """(B, C, *image), the same of noise, (B,) float -> the images with noise, and what a model is to say of them:
        the velocity x - e."""
        time = copy_to_device(time.float(), images.device)
        share = time.view(-1, *[1] * (images.dim() - 1))
        return Noised(share * images + (1 - share) * noise, time * self.process.scale, images - noise)
