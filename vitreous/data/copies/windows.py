"""Parts of a small view, and what is compared of them: the weights of frequencies, the high ones raised.

A box is (x, y, width, height) in fractions of the view. A picture that was cut out of another one looks like the part of it that
a box holds; it is sought among `BOXES`, and then placed exactly. Comparing greys themselves would find that all bright
skies are alike: photographs have most of their power in the lowest frequencies, so each frequency is multiplied by its
own length to some power, and mean and contrast are taken out.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vitreous.data.copies.hashes import dct

COARSE = 8  # cells a side of what is compared while candidates are sought
RAISED = {8: 0.5, 16: 0.75, 32: 0.75}  # cells a side -> power of the frequency
SIZES = ((1.0, 1), (0.95, 2), (0.84, 4), (0.707, 5))  # side of the box, places along an axis: down to half of the area
BOXES = torch.tensor(
    [(x, y, side, side) for side, places in SIZES for y in np.linspace(0, 1 - side, places) for x in np.linspace(0, 1 - side, places)],
    dtype=torch.float32,
)
WHOLE = torch.tensor((0.0, 0.0, 1.0, 1.0))


def cells(start: Tensor, length: Tensor, count: int, side: int) -> Tensor:
    """(n,) fractions each -> (n, count, side): the share of each of `side` pixels in each of `count` cells of a part of an axis."""
    edges = (start[:, None] + length[:, None] * torch.arange(count + 1, device=start.device) / count) * side
    pixel = torch.arange(side, device=start.device)
    shares = torch.minimum(edges[:, 1:, None], pixel + 1.0) - torch.maximum(edges[:, :-1, None], pixel * 1.0)
    shares = shares.clamp(min=0)
    return shares / shares.sum(2, keepdim=True).clamp(min=1e-6)


def waves(count: int, device: str | torch.device = "cpu") -> tuple[Tensor, Tensor]:
    """For `count` cells a side: the (count, count) cosine transform, and the (count, count) factors of the frequencies."""
    steps = torch.arange(count, dtype=torch.float32, device=device)
    factors = (steps[:, None] ** 2 + steps[None] ** 2) ** (RAISED[count] / 2)
    return torch.from_numpy(dct(count, count)).float().to(device), factors  # the factor of the mean is 0


def spectrum(views: Tensor, boxes: Tensor, count: int) -> Tensor:
    """(n, side, side) greys and (n, 4) boxes -> (n, count, count), of length 1: what is compared of that part of each."""
    cosines, factors = waves(count, views.device)
    side = views.shape[-1]
    down = cosines @ cells(boxes[:, 1], boxes[:, 3], count, side)
    across = cosines @ cells(boxes[:, 0], boxes[:, 2], count, side)
    return unit(down @ views @ across.transpose(1, 2) * factors)


def unit(spectra: Tensor) -> Tensor:
    """(n, h, w) scaled to length 1; zeros stay zeros."""
    return spectra / spectra.flatten(1).norm(dim=1).clamp(min=1e-6)[:, None, None]


class Windows:
    """Everything that is compared of all boxes of views, in one product: `spectrum` for each box, COARSE cells a side."""

    def __init__(self, side: int, device: str = "cpu") -> None:
        cosines, factors = waves(COARSE)
        down = cosines @ cells(BOXES[:, 1], BOXES[:, 3], COARSE, side)
        across = cosines @ cells(BOXES[:, 0], BOXES[:, 2], COARSE, side)
        maps = torch.einsum("byi,bxj->byxij", down, across) * factors[..., None, None]
        self.maps = maps.reshape(-1, side * side).T.contiguous().to(device)

    def __call__(self, views: Tensor) -> Tensor:
        """(n, side, side) float32 -> (n, boxes, COARSE * COARSE), each of length 1."""
        made = (views.flatten(1) @ self.maps).view(len(views), len(BOXES), COARSE * COARSE)
        return made / made.norm(dim=2, keepdim=True).clamp(min=1e-6)
