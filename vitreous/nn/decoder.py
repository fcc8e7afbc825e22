"""Decoder heads that predict logits for every pixel, for any number of axes.

Shapes: B images of C channels, D width of a map, K classes; `image` and `grid` are one length per axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
CONVOLUTIONS: dict[int, Callable[..., Convolution]] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED: dict[int, Callable[..., nn.Module]] = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
INTERPOLATION = {1: "linear", 2: "bilinear", 3: "trilinear"}
GROUP_NORM_GROUPS = 8  # the largest number of groups of a GroupNorm


class LinearDecoder(nn.Module):
    """Linear classifier on the concatenated tokens of several maps, with logits interpolated to the image's size.

    This is DINOv2's linear evaluation head (arXiv:2304.07193, section 7.4) without its batch norm, because the maps are
    already normalised.
    """

    def __init__(self, widths: Sequence[int], classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(sum(widths), classes)
        nn.init.normal_(self.head.weight, std=0.01)
        nn.init.zeros_(self.head.bias)

    def forward(self, images: Tensor, maps: Sequence[Tensor]) -> Tensor:
        """Compute logits per pixel: images (B, C, *image), maps (B, *grid, D) -> (B, K, *image). Smaller maps are
        interpolated to the grid of the largest map."""
        grid = max((x.shape[1:-1] for x in maps), key=math.prod)
        resized = [x if x.shape[1:-1] == grid else interpolate_map(x.movedim(-1, 1), grid).movedim(1, -1) for x in maps]
        logits = self.head(torch.cat(resized, -1)).movedim(-1, 1)
        return interpolate_map(logits, tuple(images.shape[2:]))


class UNETDecoder(nn.Module):
    """UNETR's decoder (arXiv:2103.10504, Figure 1), with GroupNorm instead of instance norm.

    Each step doubles the resolution of the coarsest map and concatenates the earlier map of the same resolution; the
    last step concatenates convolutional features of the image. `widths` and `patches` are the channels and the pixels
    per position and axis of each map, the coarsest first. `width` is the number of channels at the image's resolution.
    It doubles with every halving of the resolution, up to the channels of the coarsest map.
    """

    def __init__(
        self, channels: int, widths: Sequence[int], patches: Sequence[tuple[int, ...]], classes: int, *, width: int = 16
    ) -> None:
        super().__init__()
        axes, patch = len(patches[0]), patches[0]
        steps: list[tuple[int, ...]] = []  # pixels per position after each step
        while max(patch) > 1:
            patch = tuple(max(1, length // 2) for length in patch)
            steps.append(patch)
        sizes = [min(widths[0], width * 2 ** (len(steps) - 1 - index)) for index in range(len(steps))]
        self.image = ConvBlock(channels, sizes[-1], axes)
        self.skips, self.ups, self.blocks = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        inputs, current_patch = widths[0], patches[0]
        for index, (next_patch, size) in enumerate(zip(steps, sizes, strict=True)):
            factor = upsampling_factors(current_patch, next_patch)
            self.ups.append(TRANSPOSED[axes](inputs, size, factor, factor))
            is_last = index == len(steps) - 1
            skip = (
                None
                if is_last or index + 1 >= len(widths)
                else UpsampleBlock(widths[index + 1], size, patches[index + 1], next_patch)
            )
            self.skips.append(nn.Identity() if skip is None else skip)
            self.blocks.append(ConvBlock(size * (1 if skip is None and not is_last else 2), size, axes))
            inputs, current_patch = size, next_patch
        self.head = pixel_head(inputs, classes, axes)

    def forward(self, images: Tensor, maps: Sequence[Tensor]) -> Tensor:
        """Compute logits per pixel: images (B, C, *image), maps (B, *grid, D), the coarsest first -> (B, K, *image)."""
        x = maps[0].movedim(-1, 1)
        for index, (up, skip, block) in enumerate(zip(self.ups, self.skips, self.blocks, strict=True)):
            x = up(x)
            if index == len(self.ups) - 1:
                extra_maps = [self.image(images.to(x.dtype))]
            else:
                extra_maps = [skip(maps[index + 1].movedim(-1, 1))] if isinstance(skip, UpsampleBlock) else []
            x = block(torch.cat([crop_map(x, extra_maps[0].shape[2:]), *extra_maps], 1) if extra_maps else x)
        return self.head(crop_map(x, images.shape[2:]))


def pixel_head(inputs: int, classes: int, axes: int) -> Convolution:
    """Build a 1-wide convolution that classifies every pixel, (B, D, *image) -> (B, K, *image), with weights from
    N(0, 1 / D) and zero biases."""
    head = CONVOLUTIONS[axes](inputs, classes, 1)
    nn.init.normal_(head.weight, std=inputs**-0.5)
    if head.bias is not None:
        nn.init.zeros_(head.bias)
    return head


class ConvBlock(nn.Module):
    """Two convolutions of kernel size 3, each followed by GroupNorm and ReLU: (B, C, *grid) -> (B, D, *grid)."""

    def __init__(self, inputs: int, width: int, axes: int) -> None:
        super().__init__()
        conv, groups = CONVOLUTIONS[axes], math.gcd(width, GROUP_NORM_GROUPS)
        layers: list[nn.Module] = []
        for channels in (inputs, width):
            layer = conv(channels, width, 3, padding=1, bias=False)
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            layers += [layer, nn.GroupNorm(groups, width), nn.ReLU()]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """Apply both convolutions: (B, C, *grid) -> (B, D, *grid)."""
        return self.layers(x)


class UpsampleBlock(nn.Module):
    """Upsample a map from `current_patch` to `target_patch` pixels per position and axis.

    Each step is a transposed convolution that doubles the resolution, and a `ConvBlock`. If both sizes are equal, the
    block is a single `ConvBlock`.
    """

    def __init__(self, inputs: int, width: int, current_patch: tuple[int, ...], target_patch: tuple[int, ...]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        while current_patch != target_patch:
            smaller = tuple(
                max(length // 2, target_length)
                for length, target_length in zip(current_patch, target_patch, strict=True)
            )
            factor = upsampling_factors(current_patch, smaller)
            layers += [
                TRANSPOSED[len(target_patch)](inputs, width, factor, factor),
                ConvBlock(width, width, len(target_patch)),
            ]
            inputs, current_patch = width, smaller
        self.layers = nn.Sequential(*layers) if layers else ConvBlock(inputs, width, len(target_patch))

    def forward(self, x: Tensor) -> Tensor:
        """Upsample a map: (B, C, *grid) -> (B, D, *larger grid)."""
        return self.layers(x)


def upsampling_factors(larger: tuple[int, ...], smaller: tuple[int, ...]) -> tuple[int, ...]:
    """Return the ratio of the lengths `larger` / `smaller` for each axis."""
    return tuple(a // b for a, b in zip(larger, smaller, strict=True))


def interpolate_map(x: Tensor, size: tuple[int, ...]) -> Tensor:
    """Resize a map by linear interpolation along each axis: (B, D, *grid) -> (B, D, *size)."""
    return F.interpolate(x, size=size, mode=INTERPOLATION[len(size)], align_corners=False)


def crop_map(x: Tensor, size: Sequence[int]) -> Tensor:
    """Remove the padding to whole patches at the end of each axis: (B, D, *grid) -> (B, D, *size)."""
    return x[(..., *(slice(length) for length in size))]
