"""ViT-Adapter model (arXiv:2205.08534): maps of strides 4, 8, 16 and 32 pixels from an unchanged plain ViT.

The spatial prior (a convolutional branch) computes maps of the image. The maps of strides 8, 16 and 32 are flattened
and concatenated (the levels); before and after each group of ViT blocks, an interaction exchanges features between the
ViT's tokens and the levels.

    images (B, C, H, W) -> prior (B, D, h, w) of strides 4, 8, 16, 32
                        -> tokens (B, N, D) <-> levels (B, M, D), for each group of blocks
                        -> maps (B, h, w, D) of strides 4, 8, 16, 32

Shapes: B images, D width of the ViT, N its patch tokens, P its prefix tokens, M positions of the levels.
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
    """A ViT with the `SpatialPrior` and the `InteractionBlock`s of an adapter.

    `backbone` is an existing ViT; by default a new ViT is built. With newly initialised gates, the ViT's tokens are
    bit-identical to those of the ViT alone. Prefix tokens are encoded by the blocks but do not interact with the
    levels. The ViT's last norm is not used. Convolutions are drawn from N(0, 2 / fan_out), linear layers from
    N(0, 0.02^2), the embeddings of the levels from N(0, 1).
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
        attention_options, drop_path = (width, c.heads, c.points, c.ratio), c.backbone.regularization.drop_path
        self.interactions = ModuleList(
            InteractionBlock(*attention_options, drop_path=drop_path, extractors=3 if i == last_index else 1)
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
        """Count the multiply-adds of the ViT and of the adapter for one image of this (height, width), in pixels."""
        return config.backbone.macs(image) + adapter_macs(config, image)

    def inspected_backbone(self) -> VisionModel[Any]:
        """Return the ViT, whose attention and features are inspected; its tokens do not depend on the adapter."""
        return self.backbone

    def features(self, images: Tensor) -> Tensor:
        """Compute the positions of the coarsest map, in raster order: (B, C, H, W) -> (B, h w, D)."""
        return self.features_at(images, self.config.strides[-1:])[0].flatten(1, 2)

    def features_at(self, images: Tensor, strides: Sequence[int]) -> list[Tensor]:
        """Compute the maps of these strides, in pixels: (B, C, H, W) -> (B, h, w, D) per stride, height and width
        rounded up.

        Raises ValueError if there is no map of a stride.
        """
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
            token_map = F.interpolate(tokens, size=grid, mode="bilinear", align_corners=False)
            outputs[stride] = norm(x + token_map.to(x.dtype)).movedim(1, -1)
        return [outputs[stride] for stride in strides]

    def run_interactions(self, images: Tensor, levels: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
        """Run the ViT's blocks with the interactions around each group of blocks.

        `images` are (B, C, H, W), `levels` the prior's maps of strides 8, 16 and 32, (B, D, h, w) each. Returns, for
        each output map, the finest first, the ViT's tokens (B, D, *grid) that are added to it
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
        for interaction, count in zip(self.interactions, self.config.blocks_per_interaction, strict=True):
            prefix, patches = self.split(x)
            x = self.join(prefix, interaction.inject(patches, prior_tokens, reference_points), reference_points.grid)
            for _ in range(count):
                x = vit.encoder.step(next(blocks), x, *context)
            patches = self.split(x)[1]
            prior_tokens = interaction.extract_features(prior_tokens, patches, reference_points)
            interaction_tokens.append(torch.unflatten(patches.transpose(1, 2), 2, reference_points.grid))
        return [interaction_tokens[i] for i in self.config.token_interactions], prior_tokens

    def split(self, x: Tensor) -> tuple[Tensor | None, Tensor]:
        """Split the blocks' tokens into prefix tokens (B, P, D) and patch tokens (B, N, D), from (B, P + N, D).

        Blocks on a grid have tokens (B, *grid, D); their prefix is None.
        """
        if self.config.backbone.on_grid:
            return None, x.flatten(1, 2)
        prefix = self.config.backbone.prefix
        return x[:, :prefix], x[:, prefix:]

    def join(self, prefix: Tensor | None, patches: Tensor, grid: tuple[int, int]) -> Tensor:
        """Join prefix tokens (B, P, D) and patch tokens (B, N, D) to (B, P + N, D), or without a prefix to
        (B, *grid, D).

        This is the inverse of `split`.
        """
        return torch.unflatten(patches, 1, grid) if prefix is None else torch.cat([prefix, patches], 1)

    def last_norm(self, x: Tensor) -> Tensor:
        """Return the map (B, h, w, D) unchanged, because every map already has a separate norm."""
        return x

    def classify(self, pooled: Tensor) -> Tensor:
        """Return the pooled features (B, D) unchanged, because the model has no classification head."""
        return pooled

    def blocks(self) -> list[nn.Module]:
        """Return the residual blocks of the ViT, in order."""
        return self.backbone.blocks()

    def first_layer(self) -> nn.Module:
        """Return the layer of the ViT whose input is the image."""
        return self.backbone.first_layer()


def height_and_width(images: Tensor) -> tuple[int, int]:
    """Return H and W of images (B, C, H, W)."""
    return images.shape[2], images.shape[3]


def pad_to_coarsest_stride(images: Tensor) -> Tensor:
    """Pad images (B, C, H, W) with zeros at the end of height and width, to a multiple of the coarsest stride."""
    return pad_to_multiple(images.movedim(1, -1), (COARSEST_STRIDE, COARSEST_STRIDE)).movedim(-1, 1)


def init_convolutions(module: nn.Module) -> None:
    """Initialise the convolutions of a module in place: weights from N(0, 2 / fan_out), zero biases."""
    for submodule in module.modules():
        if isinstance(submodule, (nn.Conv2d, nn.ConvTranspose2d)):
            fan_out = submodule.kernel_size[0] * submodule.kernel_size[1] * submodule.out_channels // submodule.groups
            nn.init.normal_(submodule.weight, std=(2 / fan_out) ** 0.5)
            if (bias := get_bias(submodule)) is not None:
                nn.init.zeros_(bias)


@lru_cache
def adapter_macs(config: AdapterConfig, image: tuple[int, ...]) -> int:
    """Count the multiply-adds of an adapter, without those of its ViT, for one image of this (height, width), in
    pixels.

    Products and convolutions are counted by PyTorch's FlopCounterMode on the meta device. Sampling and norms are not
    counted.
    """
    from torch.utils.flop_counter import FlopCounterMode

    height, width = (-(-length // COARSEST_STRIDE) * COARSEST_STRIDE for length in image)
    c, size = config.backbone, (height, width)
    with torch.device("meta"):
        prior = SpatialPrior(config.channels, c.width, config.prior, "group")
        attention_options = (c.width, config.heads, config.points, config.ratio)
        count = config.interactions
        interactions = [
            InteractionBlock(*attention_options, extractors=3 if i == count - 1 else 1) for i in range(count)
        ]
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
