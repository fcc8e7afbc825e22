"""Semantic segmentation models: a backbone with a head that predicts a class for every pixel.

    images (B, C, *image) -> maps (B, *grid, D) of several depths or stages -> logits (B, K, *image)

Shapes: B images, C channels, D width of a map, K classes; image and grid are one length per axis.
"""

from __future__ import annotations

import math
from functools import lru_cache

from torch import Tensor, nn

from vitreous.models.configs.segmenter import SegmenterConfig
from vitreous.models.dense import BackboneWithHead
from vitreous.nn.decoder import LinearDecoder, UNETDecoder
from vitreous.nn.sizes import patch_grid
from vitreous.nn.upernet import UPerNetDecoder

CONVOLUTIONAL_HEADS = ("unet", "upernet")  # heads whose multiply-adds PyTorch counts (`decoder_macs`)


class Segmenter(BackboneWithHead):
    """Backbone and dense head. `backbone` is an existing backbone; by default a new backbone is built."""

    def __init__(self, config: SegmenterConfig, backbone: nn.Module | None = None) -> None:
        widths, patches = map_widths_and_patches(config)
        super().__init__(config, backbone, config.backbone.list_unused_modules([patch[0] for patch in patches]))
        self.head = build_decoder(config, widths, patches)

    @classmethod
    def count_macs(cls, config: SegmenterConfig, image: tuple[int, ...]) -> int:
        """Count the multiply-adds of one forward pass for one image of this size, in pixels; norms and interpolation
        are not counted."""
        total = config.backbone.macs(image)
        if config.head in CONVOLUTIONAL_HEADS:
            return total + decoder_macs(config, image)
        widths, patches = map_widths_and_patches(config)
        positions = math.prod(math.ceil(length / p) for length, p in zip(image, patches[-1], strict=True))
        return total + positions * sum(widths) * config.classes

    def forward(self, images: Tensor) -> Tensor:
        """Compute logits per pixel: (B, C, *image) -> (B, K, *image)."""
        # blocks frozen for inference may return bfloat16
        return self.head(images, [x.to(images.dtype) for x in self.maps(images)])

    def maps(self, images: Tensor) -> list[Tensor]:
        """Compute the maps for the head: (B, C, *image) -> list of (B, *grid, D), the coarsest or deepest first.

        For a ViT, the last norm is applied to all of its maps, as for DINOv2's linear heads. For a backbone with
        stages, it is applied to the last map only.
        """
        c = self.config
        if c.backbone.has_stages:
            strides = c.backbone.strides[::-1][: len(map_widths_and_patches(c)[0])]
            last_map, *maps = self.backbone.features_at(images, strides)
            return [self.backbone.last_norm(last_map), *maps]
        grid = patch_grid(tuple(images.shape[2:]), c.patch)
        tokens = self.backbone.features_after(images, c.input_depths)
        return [self.backbone.last_norm(x)[:, c.prefix :].unflatten(1, grid) for x in tokens]


def map_widths_and_patches(config: SegmenterConfig) -> tuple[list[int], list[tuple[int, ...]]]:
    """Return the channels, and the pixels per position along each axis, of each map for the head."""
    backbone = config.backbone
    if backbone.has_stages:
        levels = backbone.levels[::-1][: 1 if config.head == "linear" else None]
        return [level.width for level in levels], [level.patch for level in levels]
    return [backbone.width] * len(config.input_depths), [backbone.patch] * len(config.input_depths)


def build_decoder(config: SegmenterConfig, widths: list[int], patches: list[tuple[int, ...]]) -> nn.Module:
    """Build the head for maps of these channels (`widths`) and pixels per position (`patches`)."""
    if config.head == "unet":
        return UNETDecoder(config.channels, widths, patches, config.classes, width=config.head_width)
    if config.head == "upernet":
        return UPerNetDecoder(widths, patches, config.classes, 16 * config.head_width, dropout=config.head_dropout)
    return LinearDecoder(widths, config.classes)


@lru_cache
def decoder_macs(config: SegmenterConfig, image: tuple[int, ...]) -> int:
    """Count the multiply-adds of a convolutional head for one image of this size, in pixels, by PyTorch's
    FlopCounterMode on the meta device."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    widths, patches = map_widths_and_patches(config)
    with torch.device("meta"):
        decoder = build_decoder(config, widths, patches)
        grids = [tuple(math.ceil(length / p) for length, p in zip(image, patch, strict=True)) for patch in patches]
        maps = [torch.empty(1, *grid, width) for grid, width in zip(grids, widths, strict=True)]
        with FlopCounterMode(display=False) as counter:
            decoder(torch.empty(1, config.channels, *image), maps)
    return counter.get_total_flops() // 2
