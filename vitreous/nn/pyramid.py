"""Feature pyramids: maps of several strides for detection and segmentation.

Shapes: B images, D width of the backbone, W width of the pyramid. Input maps are channels last, (B, h, w, D), as
backbones return them. Outputs are channels first, (B, W, h, w), the finest first, as convolutions require.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from vitreous.system.torch_types import ModuleList


class LayerNorm2d(nn.Module):
    """LayerNorm over the channels of each position of a map."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise a map: (B, D, h, w) -> (B, D, h, w)."""
        return self.norm(x.movedim(1, -1)).movedim(-1, 1).to(x.dtype)


def conv_layer_norm(inputs: int, width: int, kernel: int) -> nn.Sequential:
    """Build a convolution without bias that preserves the size of the map, and a LayerNorm over its channels."""
    conv = nn.Conv2d(inputs, width, kernel, padding=kernel // 2, bias=False)
    return nn.Sequential(conv, LayerNorm2d(width))


class SimplePyramid(nn.Module):
    """ViTDet's pyramid from a single map (arXiv:2203.16527, section 3): a map of stride p yields levels of stride p /
    4, p / 2, p, 2 p and 4 p.

    | level | operation on the map |
    |---|---|
    | p / 4 | a 2 x 2 transposed convolution to D / 2, LayerNorm, GELU, a second one to D / 4 |
    | p / 2 | a 2 x 2 transposed convolution to D / 2 |
    | p | none |
    | 2 p | max-pooling by 2, sizes rounded up |
    | 4 p | every second position of the final 2 p level |

    To the first four, a 1 x 1 and a 3 x 3 convolution to W channels are applied, without bias, each with a LayerNorm.
    Convolutions have PyTorch's default initialisation. With fewer than five `levels`, the finest are omitted. Raises
    ValueError if `levels` is not 2 to 5.
    """

    def __init__(self, inputs: int, width: int = 256, levels: int = 5) -> None:
        super().__init__()
        if not 2 <= levels <= 5:
            raise ValueError(f"the number of levels of a simple pyramid must be 2 to 5, got {levels}")
        self.count = levels
        half, quarter = inputs // 2, inputs // 4
        if levels > 4:
            self.upsample4 = nn.Sequential(
                nn.ConvTranspose2d(inputs, half, 2, 2),
                LayerNorm2d(half),
                nn.GELU(),
                nn.ConvTranspose2d(half, quarter, 2, 2),
            )
        if levels > 3:
            self.upsample2 = nn.ConvTranspose2d(inputs, half, 2, 2)
        channels = (quarter, half, inputs, inputs)[5 - levels :]
        self.reduce = nn.ModuleList(conv_layer_norm(map_width, width, 1) for map_width in channels)
        self.smooth = nn.ModuleList(conv_layer_norm(width, width, 3) for _ in channels)

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        """Compute the levels from a list of one map: [(B, h, w, D)] -> up to five (B, W, rows, columns), the finest
        first.

        Five levels have 4 h, 2 h, h, h / 2 and h / 4 rows, rounded up; fewer levels are the last of these. Raises
        ValueError unless `maps` contains exactly one map.
        """
        if len(maps) != 1:
            raise ValueError(f"a simple pyramid requires exactly one input map, got {len(maps)}")
        x = maps[0].movedim(-1, 1)
        resized = [x, F.max_pool2d(x, 2, ceil_mode=True)]
        if self.count > 3:
            resized = [self.upsample2(x), *resized]
        if self.count > 4:
            resized = [self.upsample4(x), *resized]
        resized = resized[-(self.count - 1) :]
        layers = zip(self.reduce, self.smooth, resized, strict=True)
        return append_subsampled_levels([smooth(reduce(level)) for reduce, smooth, level in layers], self.count)


class FeaturePyramid(nn.Module):
    """Feature pyramid network over maps of several strides (FPN, arXiv:1612.03144, section 3).

    The coarsest map is enlarged step by step and added to the finer maps:

        level[i] = smooth[i](merged[i]),  merged[i] = lateral[i](norm[i](map[i])) + nearest(merged[i + 1])

    `widths` are the channels of the maps, the finest first. Each map has a separate LayerNorm, because backbones return
    maps before the final norm (as in Swin's detectors, arXiv:2103.14030). If there are more `levels` than maps, each
    further level is every second position of the previous level. Convolutions are initialised Xavier uniform with zero
    biases, as in torchvision and detectron2. Raises ValueError for fewer levels than maps.
    """

    def __init__(self, widths: Sequence[int], width: int = 256, levels: int = 5) -> None:
        super().__init__()
        if not widths or levels < len(widths):
            raise ValueError(f"the number of levels, {levels}, must be at least the number of maps, {len(widths)}")
        self.levels = levels
        self.norms = nn.ModuleList(LayerNorm2d(map_width) for map_width in widths)
        self.laterals = ModuleList(nn.Conv2d(map_width, width, 1) for map_width in widths)
        self.smooth = ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in widths)
        for conv in (*self.laterals, *self.smooth):
            nn.init.kaiming_uniform_(conv.weight, a=1)
            if conv.bias is not None:
                nn.init.zeros_(conv.bias)

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        """Compute the levels from backbone maps: (B, h, w, D), the finest first -> (B, W, h, w), the finest first."""
        layers = zip(self.laterals, self.norms, maps, strict=True)
        merged = [lateral(norm(x.movedim(-1, 1))) for lateral, norm, x in layers]
        for finer in reversed(range(len(merged) - 1)):
            upsampled = F.interpolate(merged[finer + 1], size=merged[finer].shape[2:], mode="nearest")
            merged[finer] = merged[finer] + upsampled
        return append_subsampled_levels([smooth(x) for smooth, x in zip(self.smooth, merged, strict=True)], self.levels)


def append_subsampled_levels(levels: list[Tensor], count: int) -> list[Tensor]:
    """Extend levels (B, W, h, w), the finest first, to `count` levels.

    Each further level is every second position of the previous level.
    """
    while len(levels) < count:
        levels = [*levels, levels[-1][..., ::2, ::2]]
    return levels
