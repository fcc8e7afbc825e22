"""ViT-Adapter (arXiv:2205.08534): a convolutional branch that exchanges features with a plain ViT by attention.

The branch, called spatial prior, computes maps at four strides. The maps of strides 8, 16 and 32 pixels (the levels)
are flattened and concatenated to M positions and interact with the ViT; the map of stride 4 does not. The module also
contains hooks that let batch norms accept a single value per channel.

Shapes: B images, D width of the ViT, N its tokens, M positions of all levels, L levels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitreous.nn.deformable import DeformableAttention, patch_centres

INTERACTION_STRIDES = (8, 16, 32)  # strides in pixels of the levels that exchange features with the ViT
COARSEST_STRIDE = INTERACTION_STRIDES[-1]
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

AdapterNorm = Literal["group", "batch"]
Grids = Sequence[tuple[int, int]]


class Float32BatchNorm(nn.Module):
    """Batch norm (arXiv:1502.03167) with float32 statistics.

    On accelerators the statistics are computed over the batches of all processes (PyTorch's SyncBatchNorm), on CPUs
    over the batch of each process.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.statistics = nn.SyncBatchNorm(width, affine=False)
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise a map: (B, C, h, w) -> (B, C, h, w) of the same dtype. On a CPU in training, a map with a single
        value per channel is normalised by the running statistics."""
        norm, x_float = self.statistics, x.to(torch.promote_types(x.dtype, torch.float32))
        mean, variance = norm.running_mean, norm.running_var
        assert mean is not None and variance is not None
        training = self.training and not (x.device.type == "cpu" and has_single_value_per_channel(x))
        if not training:
            # the buffers may have been cast together with the weights
            mean, variance = (mean.to(x_float), variance.to(x_float))
        if x.device.type == "cpu" or not training:
            y = F.batch_norm(x_float, mean, variance, None, None, training, norm.momentum or 0.0, norm.eps)
        else:
            y = norm(x_float)
        return (y * self.weight[:, None, None] + self.bias[:, None, None]).to(x.dtype)


def build_norm_layer(width: int, norm: AdapterNorm) -> nn.Module:
    """Build the norm of a map of `width` channels: `Float32BatchNorm` for "batch", else GroupNorm of up to 32 groups
    with at least 8 channels each."""
    return Float32BatchNorm(width) if norm == "batch" else nn.GroupNorm(math.gcd(32, max(1, width // 8)), width)


def conv3x3_norm_relu(inputs: int, outputs: int, stride: int, norm: AdapterNorm) -> list[nn.Module]:
    """Build the layers of a 3 x 3 convolution without bias, a norm and a ReLU."""
    conv = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
    return [conv, build_norm_layer(outputs, norm), nn.ReLU()]


class SpatialPrior(nn.Module):
    """Convolutional image features at strides of 4, 8, 16 and 32 pixels (section 3.2 of the paper).

    A 1 x 1 convolution projects the map of each stride to D channels. `inner` is the number of channels at stride 4
    before this projection.
    """

    def __init__(self, channels: int, width: int, inner: int, norm: AdapterNorm) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            *conv3x3_norm_relu(channels, inner, 2, norm),
            *conv3x3_norm_relu(inner, inner, 1, norm),
            *conv3x3_norm_relu(inner, inner, 1, norm),
            nn.MaxPool2d(3, 2, 1),
        )
        stage_widths = (inner, 2 * inner, 4 * inner, 4 * inner)
        self.stages = nn.ModuleList(
            nn.Sequential(*conv3x3_norm_relu(*pair, 2, norm)) for pair in pairwise(stage_widths)
        )
        self.reduce = nn.ModuleList(nn.Conv2d(stage_width, width, 1) for stage_width in stage_widths)

    def forward(self, images: Tensor) -> list[Tensor]:
        """Compute the four maps of images: (B, C, H, W), H and W divisible by 32 -> four (B, D, h, w), the finest
        first."""
        x, maps = self.stem(images), list[Tensor]()
        for stage, reduce in zip([nn.Identity(), *self.stages], self.reduce, strict=True):
            x = stage(x)
            maps.append(reduce(x))
        return maps


class ConvFFN(nn.Module):
    """Feed-forward network fc2(gelu(conv(fc1(x)))), with a depth-wise 3 x 3 convolution on the grid of each level
    (section 3.4)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.conv = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden)
        for linear in (self.fc1, self.fc2):
            nn.init.trunc_normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor, grids: Grids) -> Tensor:
        """Transform the features of all levels, whose (rows, columns) are `grids`: (B, M, D) -> (B, M, D)."""
        hidden = self.fc1(x).to(self.conv.weight.dtype)
        level_tokens = hidden.split([rows * columns for rows, columns in grids], 1)
        mixed = [
            self.conv(sequence.transpose(1, 2).unflatten(2, grid)).flatten(2).transpose(1, 2)
            for sequence, grid in zip(level_tokens, grids, strict=True)
        ]
        return self.fc2(F.gelu(torch.cat(mixed, 1)))


class Injector(nn.Module):
    """Add features of all levels to the ViT's tokens: tokens + gate * attention(tokens, levels) (Eq. 1).

    The gate is a vector of one value per channel. It starts at zero, so a pre-trained ViT keeps its outputs. `points`
    and `ratio` are those of `DeformableAttention`.
    """

    def __init__(self, width: int, heads: int, points: int, ratio: float) -> None:
        super().__init__()
        self.norm_tokens, self.norm_levels = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.attention = DeformableAttention(width, heads, len(INTERACTION_STRIDES), points, ratio=ratio)
        self.gate = nn.Parameter(torch.zeros(width))

    def forward(self, tokens: Tensor, centres: Tensor, levels: Tensor, grids: Grids) -> Tensor:
        """Update the tokens: tokens (B, N, D), their positions `centres` (N, 1, 2) in 0 .. 1 of the padded image,
        levels (B, M, D) with (rows, columns) of `grids` -> (B, N, D)."""
        attended = self.attention(self.norm_tokens(tokens), centres, self.norm_levels(levels), grids)
        return tokens + self.gate * attended


class Extractor(nn.Module):
    """Add features of the ViT's tokens to all levels by attention, then apply a residual `ConvFFN` with D / 4 hidden
    channels (Eqs. 2-3).

    `drop_path` is the probability that a sample skips the `ConvFFN` in training. `points` and `ratio` are those of
    `DeformableAttention`.
    """

    def __init__(self, width: int, heads: int, points: int, ratio: float, *, drop_path: float) -> None:
        super().__init__()
        self.norm_levels, self.norm_tokens = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.attention = DeformableAttention(width, heads, 1, points, ratio=ratio)
        self.norm, self.mlp = nn.LayerNorm(width, eps=1e-6), ConvFFN(width, max(1, width // 4))
        self.drop_path = drop_path

    def forward(self, levels: Tensor, centres: Tensor, tokens: Tensor, grid: tuple[int, int], grids: Grids) -> Tensor:
        """Update the levels: levels (B, M, D), their positions `centres` (M, 1, 2) in 0 .. 1 of the ViT's `grid`,
        tokens (B, N, D); `grids` are the (rows, columns) of each level -> (B, M, D)."""
        attended = self.attention(self.norm_levels(levels), centres, self.norm_tokens(tokens), [grid])
        levels = levels + attended
        y = self.mlp(self.norm(levels), grids)
        if self.training and self.drop_path > 0:
            keep = 1 - self.drop_path
            y = y * y.new_empty(len(y), 1, 1).bernoulli_(keep).div_(keep)
        return levels + y


class ReferencePoints:
    """Grids of the tokens and of the levels for one image size, and the reference points of their attention.

    `image` and `patch` are the (height, width) of the ViT's input and of a patch, in pixels. `token_points` (N, 1, 2)
    are the centres (x, y) of the tokens as fractions of the levels' extent, and `level_points` (M, 1, 2) are the
    centres of the level positions as fractions of the image. Levels cover the image padded at its end to a multiple of
    the coarsest stride, so positions in pixels do not depend on the patch size.
    """

    def __init__(self, image: tuple[int, int], patch: tuple[int, int], device: torch.device) -> None:
        height, width = (-(-length // COARSEST_STRIDE) * COARSEST_STRIDE for length in image)
        self.grid = (image[0] // patch[0], image[1] // patch[1])
        self.grids = [(height // stride, width // stride) for stride in INTERACTION_STRIDES]
        tokens = patch_centres(self.grid, patch, device)
        pairs = zip(self.grids, INTERACTION_STRIDES, strict=True)
        levels = torch.cat([patch_centres(grid, (stride, stride), device) for grid, stride in pairs])
        self.token_points = (tokens / tokens.new_tensor([width, height]))[:, None]  # (N, 1, 2)
        self.level_points = (levels / levels.new_tensor([image[1], image[0]]))[:, None]  # (M, 1, 2)


class InteractionBlock(nn.Module):
    """The adapter modules around a group of the ViT's blocks: an injector before the group and `extractors` after it.

    The other options are those of `Injector` and `Extractor`.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        points: int = 4,
        ratio: float = 1.0,
        *,
        drop_path: float = 0.0,
        extractors: int = 1,
    ) -> None:
        super().__init__()
        self.injector = Injector(width, heads, points, ratio)
        self.extractors = nn.ModuleList(
            Extractor(width, heads, points, ratio, drop_path=drop_path) for _ in range(extractors)
        )

    def inject(self, tokens: Tensor, levels: Tensor, reference_points: ReferencePoints) -> Tensor:
        """Add features of the levels to the tokens: tokens (B, N, D), levels (B, M, D) -> (B, N, D)."""
        return self.injector(tokens, reference_points.token_points, levels, reference_points.grids)

    def extract_features(self, levels: Tensor, tokens: Tensor, reference_points: ReferencePoints) -> Tensor:
        """Update the levels by deformable attention to the tokens: levels (B, M, D), all in one sequence, tokens (B, N,
        D) -> (B, M, D)."""
        for extractor in self.extractors:
            levels = extractor(
                levels, reference_points.level_points, tokens, reference_points.grid, reference_points.grids
            )
        return levels


def allow_single_value_batch_norm(module: nn.Module) -> None:
    """Let every batch norm of a module accept inputs with a single value per channel in training.

    Such an input has no variance, and PyTorch raises ValueError. The hooks registered here normalise it by the running
    statistics, which are not updated.
    """
    for submodule in module.modules():
        if isinstance(submodule, BATCH_NORMS) and submodule.track_running_stats:
            submodule.register_forward_pre_hook(use_running_statistics)
            submodule.register_forward_hook(use_batch_statistics, always_call=True)


def has_single_value_per_channel(x: Tensor) -> bool:
    """Return whether a (B, C, ...) tensor has only one value per channel."""
    return x.numel() == x.shape[1]


class SwitchedNorm(nn.Module):
    """Type of a batch norm with the hooks of `allow_single_value_batch_norm`; `is_single`: the last input had a single
    value per channel."""

    is_single: bool


def use_running_statistics(norm: SwitchedNorm, inputs: tuple[Any, ...]) -> None:
    """Forward pre-hook: set the norm to evaluation mode if the input has a single value per channel."""
    norm.is_single = norm.training and has_single_value_per_channel(inputs[0])
    if norm.is_single:
        norm.training = False


def use_batch_statistics(norm: SwitchedNorm, inputs: tuple[Any, ...], output: Any) -> None:
    """Forward hook: restore the training mode that `use_running_statistics` turned off."""
    if norm.is_single:
        norm.training = True
