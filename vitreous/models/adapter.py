"""ViT-Adapter (arXiv:2205.08534): maps of four strides from an unchanged plain ViT.

B images, D width of the ViT, N its patch tokens, M positions of the concatenated levels of strides 8, 16 and 32.

    images (B, C, H, W) -> prior (B, D, h, w) of strides 4, 8, 16, 32
                        -> tokens (B, N, D) <-> levels (B, M, D), for each group of blocks
                        -> maps (B, h, w, D) of strides 4, 8, 16, 32
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitreous.models.base import VisionModel
from vitreous.models.configs.adapter import AdapterConfig
from vitreous.models.vit import ViT
from vitreous.nn.adapter import (
    COARSEST_STRIDE,
    INTERACTION_STRIDES,
    InteractionBlock,
    ReferencePoints,
    SpatialPrior,
    build_norm_layer,
)
from vitreous.nn.grid import pad_to_multiple
from vitreous.system.torch_types import ModuleList, get_bias, named_modules


class ViTAdapter(VisionModel[AdapterConfig]):
    """A ViT, its `SpatialPrior` and its `InteractionBlock`s. `backbone` is an existing ViT; the default is a fresh one.

    With fresh gates, the ViT's tokens are bit-identical to those of the ViT alone. Prefix tokens pass through the
    blocks and do not take part in the exchange; the ViT's last norm is not used. Convolutions are drawn from N(0, 2 /
    fan_out), linear layers from N(0, 0.02^2), the embedding of a level from N(0, 1).
    """

    def __init__(self, config: AdapterConfig, backbone: ViT | None = None) -> None:
        super().__init__()
        self.config = c = config
        self.any_size = True
        self.backbone: ViT = backbone or c.backbone.model_class()(c.backbone)
        self.backbone.any_size = True
        width, last_index = c.backbone.width, c.interactions - 1
        self.prior = SpatialPrior(c.channels, width, c.prior, c.norm)
        self.level = nn.Parameter(torch.empty(len(INTERACTION_STRIDES), width))
        sizes, drop_path = (width, c.heads, c.points, c.ratio), c.backbone.regularization.drop_path
        self.interactions = ModuleList(
            InteractionBlock(*sizes, drop_path=drop_path, extractors=3 if i == last_index else 1)
            for i in range(c.interactions)
        )
        self.up = nn.ConvTranspose2d(width, width, 2, 2)
        self.norms = ModuleList(build_norm_layer(width, c.norm) for _ in c.levels)
        for module in (self.prior, self.interactions, self.up):
            init_convolutions(module)
        nn.init.normal_(self.level)
        for name, module in named_modules(self.backbone):
            if name in ("encoder.norm", "neck", "pooling", "pooled_norm", "representation"):
                module.requires_grad_(False)

    @classmethod
    def count_macs(cls, config: AdapterConfig, image: tuple[int, ...]) -> int:
        """Multiply-adds of the ViT and of the adapter, for one image of this size."""
        return config.backbone.macs(image) + adapter_macs(config, image)

    def inspected_backbone(self) -> VisionModel[Any]:
        """The ViT, whose tokens do not depend on the adapter."""
        return self.backbone

    def features(self, images: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, h w, D): the coarsest map in raster order."""
        return self.features_at(images, self.config.strides[-1:])[0].flatten(1, 2)

    def features_at(self, images: Tensor, strides: Sequence[int]) -> list[Tensor]:
        """(B, C, H, W) -> for each stride, in pixels, (B, h, w, D): the map of that stride, height and width rounded
        up. Raises ValueError if no map has the stride."""
        self.config.check_strides(strides)
        self.backbone.check_images(images)
        size = height_and_width(images)
        finest, *levels = self.prior(pad_to_coarsest_stride(images.to(self.level.dtype)))
        token_maps, prior_tokens = self.run_interactions(images, levels)
        grids = [tuple(level.shape[2:]) for level in levels]
        level_tokens = torch.split(prior_tokens, [rows * columns for rows, columns in grids], 1)
        maps = [
            torch.unflatten(sequence.transpose(1, 2), 2, grid)
            for sequence, grid in zip(level_tokens, grids, strict=True)
        ]
        maps = [finest + self.up(maps[0]), *maps]
        outputs: dict[int, Tensor] = {}
        for stride, x, norm, tokens in zip(self.config.strides, maps, self.norms, token_maps, strict=True):
            grid = tuple(-(-length // stride) for length in size)
            x = x[..., : grid[0], : grid[1]]
            shared = F.interpolate(tokens, size=grid, mode="bilinear", align_corners=False)
            outputs[stride] = norm(x + shared.to(x.dtype)).movedim(1, -1)
        return [outputs[stride] for stride in strides]

    def run_interactions(self, images: Tensor, levels: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
        """Run the ViT's blocks and the interactions around them.

        Args:
            images: (B, C, H, W).
            levels: the prior's maps of strides 8, 16 and 32, (B, D, h, w) each.

        Returns:
            For each output map, the finest first, the ViT's tokens (B, D, *grid) to add to it
            (`AdapterConfig.token_source`), and the levels after the last interaction (B, M, D).
        """
        vit, config = self.backbone, self.config.backbone
        tokens = vit.project(images)
        reference_points = ReferencePoints(height_and_width(images), (config.patch[0], config.patch[1]), images.device)
        prior_tokens = torch.cat(
            [x.flatten(2).transpose(1, 2) + embedding for x, embedding in zip(levels, self.level, strict=True)], 1
        )
        x, *context = vit.prepare(vit.add_positions(tokens), vit.make_token_positions(tokens))
        blocks, interaction_tokens = iter(vit.encoder.blocks), list[Tensor]()
        for interaction, count in zip(self.interactions, self.config.groups, strict=True):
            prefix, patches = self.split(x)
            x = self.join(prefix, interaction.inject(patches, prior_tokens, reference_points), reference_points.grid)
            for _ in range(count):
                x = vit.encoder.step(next(blocks), x, *context)
            patches = self.split(x)[1]
            prior_tokens = interaction.extract_features(prior_tokens, patches, reference_points)
            interaction_tokens.append(torch.unflatten(patches.transpose(1, 2), 2, reference_points.grid))
        return [interaction_tokens[i] for i in self.config.token_interactions], prior_tokens

    def split(self, x: Tensor) -> tuple[Tensor | None, Tensor]:
        """(B, P + N, D), or (B, *grid, D) for blocks on a grid -> the prefix tokens, and the patches (B, N, D)."""
        if self.config.backbone.on_grid:
            return None, x.flatten(1, 2)
        prefix = self.config.backbone.prefix
        return x[:, :prefix], x[:, prefix:]

    def join(self, prefix: Tensor | None, patches: Tensor, grid: tuple[int, int]) -> Tensor:
        """The inverse of `split`, (B, P, D) or none and (B, N, D) -> (B, P + N, D) or (B, *grid, D)."""
        return torch.unflatten(patches, 1, grid) if prefix is None else torch.cat([prefix, patches], 1)

    def last_norm(self, x: Tensor) -> Tensor:
        """(B, h, w, D) -> (B, h, w, D): the identity, because every map has a separate norm."""
        return x

    def classify(self, pooled: Tensor) -> Tensor:
        """(B, D) -> (B, D): the identity, because there is no head."""
        return pooled

    def blocks(self) -> list[nn.Module]:
        """The residual blocks of the ViT, in order."""
        return self.backbone.blocks()

    def first_layer(self) -> nn.Module:
        """The layer of the ViT that is applied to the image."""
        return self.backbone.first_layer()


def height_and_width(images: Tensor) -> tuple[int, int]:
    """(B, C, H, W) -> H and W."""
    return images.shape[2], images.shape[3]


def pad_to_coarsest_stride(images: Tensor) -> Tensor:
    """Pad (B, C, H, W) with zeros at the end of each axis, to a multiple of the coarsest stride."""
    return pad_to_multiple(images.movedim(1, -1), (COARSEST_STRIDE, COARSEST_STRIDE)).movedim(-1, 1)


def init_convolutions(module: nn.Module) -> None:
    """Draw convolutions from N(0, 2 / fan_out), in place, with zero biases."""
    for submodule in module.modules():
        if isinstance(submodule, (nn.Conv2d, nn.ConvTranspose2d)):
            fan_out = submodule.kernel_size[0] * submodule.kernel_size[1] * submodule.out_channels // submodule.groups
            nn.init.normal_(submodule.weight, std=(2 / fan_out) ** 0.5)
            if (bias := get_bias(submodule)) is not None:
                nn.init.zeros_(bias)


@lru_cache
def adapter_macs(config: AdapterConfig, image: tuple[int, ...]) -> int:
    """Multiply-adds of an adapter for one image of this size, without those of its ViT.

    Products and convolutions are counted by the adapter's layers on tensors without storage. Sampling and norms are not
    counted.
    """
    from torch.utils.flop_counter import FlopCounterMode

    height, width = (-(-length // COARSEST_STRIDE) * COARSEST_STRIDE for length in image)
    c, size = config.backbone, (height, width)
    with torch.device("meta"):
        prior = SpatialPrior(config.channels, c.width, config.prior, "group")
        sizes = (c.width, config.heads, config.points, config.ratio)
        count = config.interactions
        interactions = [InteractionBlock(*sizes, extractors=3 if i == count - 1 else 1) for i in range(count)]
        up = nn.ConvTranspose2d(c.width, c.width, 2, 2)
        reference_points = ReferencePoints((image[0], image[1]), (c.patch[0], c.patch[1]), torch.device("meta"))
        with FlopCounterMode(display=False) as counter:
            _, *levels = prior(torch.empty(1, config.channels, *size))
            prior_tokens = torch.cat([x.flatten(2).transpose(1, 2) for x in levels], 1)
            tokens = torch.empty(1, reference_points.grid[0] * reference_points.grid[1], c.width)
            for interaction in interactions:
                prior_tokens = interaction.extract_features(
                    prior_tokens, interaction.inject(tokens, prior_tokens, reference_points), reference_points
                )
            up(levels[0])
    return counter.get_total_flops() // 2
