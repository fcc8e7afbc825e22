"""UPerNet's decoder head for dense prediction, for any number of axes.

Shapes: B images of C channels, D width of a map, K classes; `image` and `grid` are one length per axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitreous.nn.decoder import CONVOLUTIONS, GROUP_NORM_GROUPS, TRANSPOSED, crop_map, interpolate_map, pixel_head

POOLING_BINS = (1, 2, 3, 6)  # bins along each axis in the levels of pyramid pooling
DROPOUTS = {1: nn.Dropout1d, 2: nn.Dropout2d, 3: nn.Dropout3d}  # dropout of whole channels, by number of axes


class UPerNetDecoder(nn.Module):
    """UPerNet (arXiv:1807.10221, Figure 4) with GroupNorm instead of batch norm.

    Pyramid pooling is applied to the coarsest map. A feature pyramid then adds it to the finer maps step by step, and
    all levels are concatenated at the finest resolution. `widths` and `patches` are the channels and the pixels per
    position and axis of each map, the coarsest first. Four maps of the same patch size, as a ViT returns them, are
    first resized to 0.5, 1, 2 and 4 times their resolution (as in arXiv:2105.15203 and ViTDet's pyramid). Every level
    has `width` channels. `dropout` is the probability that a channel is dropped before the last layer in training
    (0.1 in mmsegmentation).
    """

    def __init__(
        self,
        widths: Sequence[int],
        patches: Sequence[tuple[int, ...]],
        classes: int,
        width: int,
        *,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        axes = len(patches[0])
        self.resize = nn.ModuleList(nn.Identity() for _ in widths)
        if len(set(patches)) == 1 and len(patches) > 1:
            self.resize = nn.ModuleList(
                ResampleBlock(map_width, index - 1, axes) for index, map_width in enumerate(widths)
            )
        self.pools = nn.ModuleList(conv_group_norm_relu(widths[0], width, 1, axes) for _ in POOLING_BINS)
        self.top = conv_group_norm_relu(widths[0] + len(POOLING_BINS) * width, width, 3, axes)
        self.laterals = nn.ModuleList(conv_group_norm_relu(map_width, width, 1, axes) for map_width in widths[1:])
        self.smooth = nn.ModuleList(conv_group_norm_relu(width, width, 3, axes) for _ in widths[1:])
        self.fuse = conv_group_norm_relu(len(widths) * width, width, 3, axes)
        self.dropout = DROPOUTS[axes](dropout)
        self.head = pixel_head(width, classes, axes)

    def forward(self, images: Tensor, maps: Sequence[Tensor]) -> Tensor:
        """Compute logits per pixel: images (B, C, *image), maps (B, *grid, D), the coarsest first -> (B, K, *image)."""
        levels = [resize(x.movedim(-1, 1)) for resize, x in zip(self.resize, maps, strict=True)]
        coarsest, size = levels[0], levels[0].shape[2:]
        pools = [
            interpolate_map(pool(adaptive_average_pool(coarsest, bins)), size)
            for pool, bins in zip(self.pools, POOLING_BINS, strict=True)
        ]
        x = self.top(torch.cat([coarsest, *pools], 1))
        pyramid = [x]
        for lateral, level in zip(self.laterals, levels[1:], strict=True):
            x = lateral(level) + interpolate_map(x, level.shape[2:])
            pyramid.append(x)
        finest = pyramid[-1].shape[2:]
        smoothed = [pyramid[0], *(smooth(x) for smooth, x in zip(self.smooth, pyramid[1:], strict=True))]
        fused = self.fuse(torch.cat([x if x.shape[2:] == finest else interpolate_map(x, finest) for x in smoothed], 1))
        return crop_map(interpolate_map(self.head(self.dropout(fused)), tuple(images.shape[2:])), images.shape[2:])


class ResampleBlock(nn.Module):
    """Resize a map to 2**`doublings` times its resolution, -1 for half of it.

    Each doubling is a transposed convolution; halving is max-pooling.
    """

    def __init__(self, width: int, doublings: int, axes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for index in range(doublings):
            norm = [nn.GroupNorm(math.gcd(width, GROUP_NORM_GROUPS), width), nn.GELU()] if index else []
            layers += [*norm, TRANSPOSED[axes](width, width, 2, 2)]
        self.layers, self.halve = nn.Sequential(*layers), doublings < 0

    def forward(self, x: Tensor) -> Tensor:
        """Resize a map: (B, D, *grid) -> (B, D, *resized grid)."""
        if self.halve:
            return {3: F.max_pool1d, 4: F.max_pool2d, 5: F.max_pool3d}[x.ndim](x, 2, ceil_mode=True)
        return self.layers(x)


def conv_group_norm_relu(inputs: int, width: int, kernel: int, axes: int) -> nn.Sequential:
    """Build a convolution that preserves the size of the map, followed by GroupNorm and ReLU."""
    conv = CONVOLUTIONS[axes](inputs, width, kernel, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
    return nn.Sequential(conv, nn.GroupNorm(math.gcd(width, GROUP_NORM_GROUPS), width), nn.ReLU())


def adaptive_average_pool(x: Tensor, bins: int) -> Tensor:
    """Average a map over `bins` bins per axis that cover the axis evenly: (B, D, *grid) -> (B, D, bins, bins, ...).

    As in PyTorch's adaptive average pooling, bins overlap if the length of an axis is not a multiple of `bins`.
    """
    for axis, length in enumerate(x.shape[2:], 2):
        edges = [(length * n // bins, -(-length * (n + 1) // bins)) for n in range(bins)]
        weights = [
            [1 / (end - start) if start <= position < end else 0.0 for position in range(length)]
            for start, end in edges
        ]
        x = (x.movedim(axis, -1) @ x.new_tensor(weights).T).movedim(-1, axis)
    return x
