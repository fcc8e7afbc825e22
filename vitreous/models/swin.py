"""Swin Transformers: windows that shift from block to block, on grids that halve from stage to stage
(arXiv:2103.14030), and version 2 (arXiv:2111.09883).

    images (B, C, H, W) -> project (B, h, w, D) -> stages (B, h / 8, w / 8, 8 D) -> features (B, N, 8 D)
        -> pool (B, 8 D) -> logits (B, K)

Shapes: B batch, C channels, D width of the first stage, N tokens of the last stage, K classes; image and grid are
(height, width).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from typing import Any

from torch import Tensor, nn

from vitreous.models.base import VisionModel, linear_head
from vitreous.models.configs.swin import SwinConfig
from vitreous.nn.block import Block, Mlp
from vitreous.nn.encoder import Encoder, build_blocks
from vitreous.nn.grid import pad_to_multiple, patchify
from vitreous.nn.layout import WindowedAttention
from vitreous.nn.windows import CosineWindowAttention, PatchMerging, WindowAttention


class Swin(VisionModel[SwinConfig]):
    """Swin Transformer: stages of blocks on (B, h, w, D) tokens; the windows of every second block are shifted by half
    of their size.

    Any image size works: images are padded with zeros at their ends to whole patches, merged tokens and windows.
    `config.pad` selects how attention treats the padding. Initialised as in Microsoft's code:

    | parameter | drawn from |
    |---|---|
    | patch projection | uniform within 1 / sqrt(C p q), PyTorch's convolution; its norm: scale 1, bias 0 |
    | linear layers, tables of relative positions | N(0, 0.02^2); biases 0 |
    | norms | scale 1, bias 0; scale 0 for a norm at the end of a branch (version 2) |
    | logit scales of cosine attention (version 2) | 10 |
    | head | 0 |
    """

    def __init__(self, config: SwinConfig) -> None:
        super().__init__()
        self.config = c = config
        self.any_size = True  # windows take any image size; a ViT warns about sizes other than its native one
        self.projection = nn.Linear(c.channels * math.prod(c.patch_size), c.width)
        self.first_norm = nn.LayerNorm(c.width, eps=c.norm.eps)
        self.stages = nn.ModuleList(build_swin_stages(c))
        self.norm = nn.LayerNorm(c.width_out, eps=c.norm.eps)
        self.head = self.build_head()

    def build_head(self) -> nn.Module:
        """Build a linear head (B, D) -> (B, K) whose weights are 0."""
        return linear_head(self.config.width_out, self.config.classes)

    def first_layer(self) -> nn.Module:
        """Return the patch projection, whose input is the image."""
        return self.projection

    def blocks(self) -> list[nn.Module]:
        """Return the residual blocks of all stages, in order."""
        return [block for stage in self.stages for block in stage.get_submodule("blocks").children()]

    def project(self, images: Tensor) -> Tensor:
        """Apply a linear layer and a norm to the pixels of each patch: (B, C, H, W) -> (B, h, w, D). Images are
        zero-padded to whole patches."""
        c = self.config
        self.check_images(images)
        if any(length % p for length, p in zip(images.shape[2:], c.patch_size, strict=True)):
            images = pad_to_multiple(images.movedim(1, -1), c.patch_size).movedim(-1, 1)
        return self.first_norm(self.projection(patchify(images, c.patch_size)))

    def features(self, images: Tensor) -> Tensor:
        """Compute the tokens of the last stage after the last norm, in raster order: (B, C, H, W) -> (B, N, D)."""
        x = self.project(images)
        for stage in self.stages:
            x = stage(x)
        return self.norm(x).flatten(1, 2)

    def features_at(self, images: Tensor, strides: Sequence[int]) -> list[Tensor]:
        """Compute the tokens of the stages with these strides, in pixels, before the last norm: (B, C, H, W) ->
        (B, h, w, D) per stride.

        `config.levels` lists the strides. Later stages are not computed. Raises ValueError if no stage has a stride.
        """
        self.config.check_strides(strides)
        x, outputs = self.project(images), {}
        for stride, stage in zip(self.config.strides, self.stages, strict=True):
            if stride > max(strides):
                break
            outputs[stride] = x = stage(x)
        return [outputs[stride] for stride in strides]

    def last_norm(self, x: Tensor) -> Tensor:
        """Apply the norm after the last stage: (B, h, w, D) -> (B, h, w, D)."""
        return self.norm(x)


class SwinStage(Encoder):
    """Blocks on one grid; in all stages but the first, patch merging precedes them."""

    def __init__(self, width: int, blocks: Sequence[nn.Module], merge: nn.Module | None) -> None:
        super().__init__(width, blocks, norm=False)
        self.merge = merge or nn.Identity()

    def forward(self, x: Tensor, *context: Any, all_tokens: bool = True) -> Tensor:
        """Apply patch merging and the blocks: (B, h, w, D) -> (B, h, w, D), or (B, h / 2, w / 2, 2 D) if tokens are
        merged."""
        return super().forward(self.merge(x), *context, all_tokens=all_tokens)


def build_swin_stages(config: SwinConfig) -> list[SwinStage]:
    """Build the stages of a model; the stochastic depth rate rises over the blocks of all stages."""
    block_indices = [(stage, index) for stage, count in enumerate(config.blocks) for index in range(count)]
    regularization = config.regularization
    all_blocks = build_blocks(
        config.depth,
        lambda block_index, drop_path: build_swin_block(config, *block_indices[block_index], drop_path),
        regularization.drop_path,
        regularization.drop_path_rises,
    )
    blocks = iter(all_blocks)
    stages: list[SwinStage] = []
    for stage, (width, count) in enumerate(zip(config.widths, config.blocks, strict=True)):
        merge = PatchMerging(config.widths[stage - 1], config.norm.eps, config.version == 2) if stage else None
        stages.append(SwinStage(width, list(islice(blocks, count)), merge))
    return stages


def build_swin_block(config: SwinConfig, stage: int, index: int, drop_path: float) -> Block:
    """Build the block at `index` of a stage; windows are shifted by half of their size if `index` is odd."""
    c, width, heads, size = config, config.widths[stage], config.heads[stage], config.windows[stage]
    shift = (size[0] // 2 * (index % 2), size[1] // 2 * (index % 2))
    if c.attention.pad == "zeros-after-shift":  # in timm only the native grid decides which axes are shifted
        native_grid = c.stage_grids(c.image)[stage]
        shift = tuple(s if length > w else 0 for s, length, w in zip(shift, native_grid, size, strict=True))
    if c.version == 2:
        pretrained_window = c.attention.pretrained_window[stage] if c.attention.pretrained_window else 0
        attention = CosineWindowAttention(width, heads, size, c.attention.qkv_bias, pretrained_window=pretrained_window)
    else:
        attention = WindowAttention(width, heads, size, c.attention.qkv_bias)
    mlp = Mlp(width, int(width * c.mlp.ratio), c.regularization.dropout, c.mlp.gelu)
    for linear in (mlp.fc1, mlp.fc2):
        nn.init.trunc_normal_(linear.weight, std=0.02)
        nn.init.zeros_(linear.bias)
    attention = WindowedAttention(attention, size, shift, c.attention.pad)
    return Block(
        width, attention, mlp, c.regularization.dropout, drop_path=drop_path, eps=c.norm.eps, post_norm=c.version == 2
    )
