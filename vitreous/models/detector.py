"""Object detection models: a backbone with the heads of Faster or Mask R-CNN on a feature pyramid (arXiv:1506.01497,
arXiv:1703.06870), as in ViTDet (arXiv:2203.16527).

    images (B, C, H, W) -> maps (B, *grid, D) -> pyramid (B, W, h, w) of each stride -> proposals (B, P, 4)
        -> boxes (B, N, 4), scores (B, N), labels (B, N)[, masks (B, N, 28, 28)]

Shapes: B images of H x W pixels, W also the channels of the pyramid, A anchors, P proposals, K classes, N detections
per image. Boxes are left, top, right, bottom in pixels of the images.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from vitreous.models.configs.detector import DetectorConfig
from vitreous.models.dense import BackboneWithHead
from vitreous.models.proposals import RegionProposals
from vitreous.models.regions import RegionHeads
from vitreous.nn.pyramid import FeaturePyramid, SimplePyramid

LAST_NORM_NAMES = ("norm", "encoder.norm", "body.norm")  # norms of backbones that the pyramid does not use


class Detector(BackboneWithHead):
    """Backbone, feature pyramid, region proposals and region heads.

    `backbone` is an existing backbone; by default a new backbone is built.
    """

    def __init__(self, config: DetectorConfig, backbone: nn.Module | None = None) -> None:
        super().__init__(
            config, backbone, (*LAST_NORM_NAMES, *config.backbone.list_unused_modules(config.input_strides))
        )
        self.pyramid = build_pyramid(config)
        self.proposals, self.regions = RegionProposals(config), RegionHeads(config)

    @classmethod
    def count_macs(cls, config: DetectorConfig, image: tuple[int, ...]) -> int:
        """Count the multiply-adds of one forward pass for one image of this (height, width), in pixels."""
        return config.backbone.macs(image) + detector_head_macs(config, image)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Detect objects: (B, C, H, W) -> boxes (B, N, 4) float32, scores (B, N) float32, labels (B, N) int64, and for
        models with masks (B, N, 28, 28) float32, the probability of the object at each position of its box.

        N is `config.detections`. Detections are sorted by score, the highest first; entries after the last detection
        have score 0 and a box of zeros. An image's detections do not depend on its batch.
        """
        levels, size = self.levels(images), (images.shape[2], images.shape[3])
        return self.regions(levels, self.proposals(levels, size), size)

    def losses(self, images: Tensor, targets: Mapping[str, Any]) -> dict[str, Tensor]:
        """Compute the losses of images (B, C, H, W) with annotations, float32 scalars that are means over the images:
        `objectness` and `proposals` of anchors, `classes` and `boxes` of regions, and `masks`.

        `targets` contains, as lists with one entry per image, `boxes` (n, 4) float32, `labels` (n,) int64, `crowd` (n,)
        bool, and for models with masks `masks` (n, H, W) bool. `keys` (B,) int64 are seeds for sampling the training
        anchors and regions of each image. Optionally, `federated` (B, K) bool selects the classes that each image's
        loss includes.
        """
        levels, size = self.levels(images), (images.shape[2], images.shape[3])
        losses, proposals = self.proposals.losses(levels, size, targets)
        return losses | self.regions.losses(levels, proposals, targets)

    def levels(self, images: Tensor) -> list[Tensor]:
        """Compute the levels of the feature pyramid, the finest first: (B, C, H, W) -> list of (B, W, h, w)."""
        maps = self.backbone.features_at(images, self.config.input_strides)
        return self.pyramid([x.to(images.dtype) for x in maps])  # blocks frozen for inference may return bfloat16


def build_pyramid(config: DetectorConfig) -> nn.Module:
    """Build the feature pyramid of a detector, from the backbone's single map or from its maps of several strides."""
    widths = [config.backbone.level_at(stride).width for stride in config.input_strides]
    if len(config.backbone.strides) == 1:
        return SimplePyramid(widths[0], config.width, len(config.strides))
    return FeaturePyramid(widths, config.width, len(config.strides))


@lru_cache
def detector_head_macs(config: DetectorConfig, image: tuple[int, ...]) -> int:
    """Count the multiply-adds of pyramid and heads for one image of this (height, width), in pixels.

    They are counted by PyTorch's FlopCounterMode on the meta device. Norms, RoIAlign and non-maximum suppression are
    not counted.
    """
    from torch.utils.flop_counter import FlopCounterMode

    levels = [config.backbone.level_at(stride) for stride in config.input_strides]
    with torch.device("meta"):
        pyramid, proposals, regions = build_pyramid(config), RegionProposals(config), RegionHeads(config)
        maps = [torch.empty(1, *level.grid_of(image), level.width) for level in levels]
        with FlopCounterMode(display=False) as counter:
            proposals.head(pyramid(maps))
            regions.box(torch.empty(config.proposals, config.width, 7, 7))
            if regions.mask is not None:
                regions.mask(torch.empty(config.detections, config.width, 14, 14))
    return counter.get_total_flops() // 2
