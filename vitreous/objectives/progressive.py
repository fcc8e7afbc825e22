"""Patch dropout and progressive resolution, which reduce compute in the first part of a run.

Both are functions of a sample's position in the run's stream, so a resumed run drops the same patches and pixels.

Shapes: B images of C channels, N patches of which K are kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from vitreous.data.keys import derive_keys
from vitreous.models.config import ModelConfig
from vitreous.nn.sizes import patch_grid
from vitreous.system.machine import copy_to_device
from vitreous.system.torch_types import from_numpy


@dataclass(frozen=True)
class ProgressiveOptions:
    """Options of patch dropout (arXiv:2212.00794) and progressive resolution.

    `patch_dropout` is the share of patches that is dropped until the share `patch_dropout_until` of the run. Height and
    width start at the share `progressive` of the model's image size and grow until the share `progressive_until` of the
    run.
    """

    patch_dropout: float = 0.0
    patch_dropout_until: float = 0.7
    progressive: float = 1.0
    progressive_until: float = 0.7


def image_size_at(options: ProgressiveOptions, model: ModelConfig, samples: int, total: int) -> tuple[int, ...]:
    """Return the image size in pixels after `samples` of the run's `total` training samples, in whole patches; it grows
    linearly."""
    fraction = options.progressive + (1 - options.progressive) * samples / max(1, options.progressive_until * total)
    if fraction >= 1:
        return model.image
    return tuple(
        max(1, math.floor(cells * fraction)) * size for cells, size in zip(model.grid, model.patch, strict=True)
    )


def resize_images(images: Tensor, image_size: Sequence[int]) -> Tensor:
    """Resize images bilinearly with antialiasing: (B, C, *image) -> (B, C, *image_size)."""
    if list(images.shape[2:]) == list(image_size):
        return images
    return F.interpolate(images, size=list(image_size), mode="bilinear", antialias=True)


def draw_patches(images: Tensor, patch: Sequence[int], dropout: float, seed: int, position: int) -> Tensor:
    """Draw the patches to keep of each image (B, C, *image): indices (B, K) int64, in ascending order.

    The first image is at `position` of the run's stream.
    """
    patches = math.prod(length // size for length, size in zip(images.shape[2:], patch, strict=True))
    positions = position + np.arange(len(images))
    order = derive_keys(seed, positions[:, None], np.arange(patches)[None]).argsort(1, kind="stable")
    patch_indices = from_numpy(np.sort(order[:, : count_kept_patches(dropout, patches)], 1))
    return copy_to_device(patch_indices, images.device)


def count_kept_patches(dropout: float, patches: int) -> int:
    """Return the number of `patches` that remain if the share `dropout` of them is dropped; at least 1."""
    return max(1, round(patches * (1 - dropout)))


def progressive_macs(options: ProgressiveOptions, model: ModelConfig, samples: int, total: int) -> float:
    """Count the multiply-adds of one image's forward pass after `samples` of the run's `total` training samples.

    Dropped pixels and patches and the unused part of the last block are not counted.
    """
    dropout = options.patch_dropout if samples < options.patch_dropout_until * total else 0.0
    return _cached_forward_macs(model, image_size_at(options, model, samples, total), dropout)


@lru_cache(maxsize=16)
def _cached_forward_macs(model: ModelConfig, image: tuple[int, ...], dropout: float) -> float:
    """Count the multiply-adds for images of this size, of which patches are dropped with the share `dropout`;
    cached."""
    return model.computed_macs(
        image, count_kept_patches(dropout, math.prod(patch_grid(image, model.patch))) if dropout else None
    )
