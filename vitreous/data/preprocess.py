"""From a decoded picture to the tensor that a model was trained on: stored with the model, the same everywhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))  # the paper's models: pixels in [-1, 1]

_FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


@dataclass(frozen=True)
class Preprocess:
    """How a picture becomes a model's input, without chance.

    `image` in pixels, (height, width). `fit` = `crop`: the short side is scaled to the target / `share` and the centre cut
    out; `squash`: the whole picture is scaled to the target, as the paper's code does at test time. `mean` and `std` are
    per channel, for pixels in [0, 1].
    """

    image: tuple[int, int]
    channels: int = 3
    mean: tuple[float, ...] = HALF[0]
    std: tuple[float, ...] = HALF[1]
    fit: Literal["crop", "squash"] = "crop"
    share: float = 1.0
    filter: Literal["bilinear", "bicubic"] = "bicubic"

    def pixels(self, picture: Image.Image) -> Tensor:
        """A decoded picture -> (C, *image) uint8."""
        return to_tensor(self.fitted(picture))

    def fitted(self, picture: Image.Image) -> Image.Image:
        """A decoded picture at the target size."""
        height, width = self.image
        if picture.size == (width, height):
            return picture
        if self.fit == "squash":
            return picture.resize((width, height), _FILTERS[self.filter])
        return self.centre(picture)

    def centre(self, picture: Image.Image) -> Image.Image:
        """The centre of the picture, scaled: one resampling of the box that the crop would cut from the scaled picture."""
        height, width = self.image
        scale = max(height / picture.height, width / picture.width) / self.share
        half = (min(width / scale, picture.width) / 2, min(height / scale, picture.height) / 2)
        middle = (picture.width / 2, picture.height / 2)
        box = (middle[0] - half[0], middle[1] - half[1], middle[0] + half[0], middle[1] + half[1])
        return picture.resize((width, height), _FILTERS[self.filter], box=box)

    def normalise(self, pixels: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """(B, C, *image) in 0..255, uint8 or float -> (B, C, *image) of the model's input."""
        shape = (1, -1) + (1,) * (pixels.dim() - 2)
        mean = torch.tensor(self.mean, device=pixels.device).view(shape)
        std = torch.tensor(self.std, device=pixels.device).view(shape)
        floats = pixels.to(torch.float32, copy=True)  # first: a difference of two types takes three times as long, to the same bits
        return floats.sub_(mean * 255).div_(std * 255).to(dtype)


def to_tensor(picture: Image.Image) -> Tensor:
    """An 8-bit picture -> (C, height, width) uint8."""
    array = np.array(picture)
    return torch.from_numpy(array[None] if array.ndim == 2 else array.transpose(2, 0, 1).copy())
