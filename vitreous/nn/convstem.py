"""Convolutional stem: a few convolutions before the encoder, which learn edges and colours faster than attention.

The stem follows "Early convolutions help transformers see better" (arXiv:2106.14881) with three changes: residual
units, max-pooling instead of strides, and LayerNorm over the channels of each position instead of batch norm, so
outputs do not depend on the batch.

Shapes: B batch, C channels, H and W image, h and w map, I input channels of a layer, r pixels per position of the last
map along each axis.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from vitreous.system.torch_types import ModuleList


class ChannelNormReLU(nn.Module):
    """LayerNorm over the channels of each position of a map, then ReLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise a map and apply ReLU: (B, C, h, w) -> (B, C, h, w)."""
        return F.relu(self.norm(x.movedim(1, -1))).movedim(-1, 1)


def build_he_conv3x3(inputs: int, outputs: int, gain: float = 1.0) -> nn.Conv2d:
    """Build a 3x3 convolution without bias with weights from N(0, 2 gain^2 / (9 inputs)) (He initialisation,
    arXiv:1502.01852, Eq. 10)."""
    conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    nn.init.normal_(conv.weight, std=gain * (2 / (9 * inputs)) ** 0.5)
    return conv


class ResidualConvUnit(nn.Module):
    """Residual unit of a single convolution, x + conv(relu(norm(x))), initialised at half the usual scale."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.conv = ChannelNormReLU(width), build_he_conv3x3(width, width, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the unit to a map: (B, C, h, w) -> (B, C, h, w)."""
        return x + self.conv(self.norm(x))


class ConvStemStage(nn.Module):
    """Stage of the stem: a convolution, `units` residual units, max-pooling by two if `pooled`, norm and ReLU.

    Pooling before the norm reduces the norm's cost to a quarter.
    """

    def __init__(self, inputs: int, width: int, units: int, pooled: bool) -> None:
        super().__init__()
        self.pooled = pooled
        self.conv = build_he_conv3x3(inputs, width)
        self.units = nn.ModuleList(ResidualConvUnit(width) for _ in range(units))
        self.norm = ChannelNormReLU(width)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the stage: (B, I, h, w) -> (B, width, h, w), or (B, width, ceil(h / 2), ceil(w / 2)) if `pooled`."""
        x = self.conv(x)
        for unit in self.units:
            x = unit(x)
        return self.norm(F.max_pool2d(x, 2, ceil_mode=True) if self.pooled else x)


class ConvStem(nn.Module):
    """Convolutional stem that turns an image into a grid of tokens, `reduction` pixels per token along each axis.

    All stages but the last halve the map. `widths` are the channels of each stage, `blocks` the number of residual
    units of each stage. Raises ValueError if their lengths differ.
    """

    def __init__(self, widths: tuple[int, ...], blocks: tuple[int, ...], channels: int = 3) -> None:
        super().__init__()
        if len(widths) != len(blocks):
            raise ValueError(f"widths and blocks must have one entry per stage, got {len(widths)} and {len(blocks)}")
        self.reduction, self.width_out = 2 ** (len(widths) - 1), widths[-1]
        inputs = (channels, *widths)
        self.stages = ModuleList(
            ConvStemStage(inputs[i], width, units, i + 1 < len(widths))
            for i, (width, units) in enumerate(zip(widths, blocks, strict=True))
        )

    def first_layer(self) -> nn.Module:
        """Return the first convolution, whose input is the image."""
        return self.stages[0].conv

    def forward(self, images: Tensor) -> Tensor:
        """Compute a grid of tokens, channels last: (B, C, H, W) -> (B, ceil(H / r), ceil(W / r), widths[-1])."""
        return self.maps(images)[-1]

    def maps(self, images: Tensor) -> list[Tensor]:
        """Compute the map after each stage, channels last: (B, C, H, W) -> list of (B, h, w, width), the finest
        first."""
        # channels last, the fastest memory layout for convolutions on CPUs
        x = images.movedim(1, -1).contiguous().movedim(-1, 1)
        maps: list[Tensor] = []
        for stage in self.stages:
            x = stage(x)
            maps.append(x.movedim(1, -1))
        return maps
