"""Work that a run may leave out in its first part: patches of a picture, and pixels of it.

B pictures of a batch, N patches; `position` is that of the batch in the run's stream of pictures. Both are functions of
the position alone, so a resumed run leaves out the same.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitreous.data.keys import key
from vitreous.models.config import ModelConfig, ViTConfig
from vitreous.models.cost import computed, macs, unread
from vitreous.training.run import Run


def shrunk(images: Tensor, run: Run, position: int) -> Tensor:
    """(B, C, *image) -> (B, C, *smaller): the pictures at the size of their place in the run (progressive resolution).

    Each side starts at the share `progressive` of the model's grid and grows, linearly and by whole patches, until
    `progressive_until` of the run. The encoder reads its positions at the smaller grid, as it does at any.
    """
    sides = list(sides_at(run, position))
    return (
        images
        if list(images.shape[2:]) == sides
        else F.interpolate(images, size=sides, mode="bilinear", antialias=True)
    )


def step_at(run: Run, position: int) -> int:
    """Where the step that a position belongs to begins: all of a step is treated alike, whoever computes it."""
    return position - position % run.step_size


def sides_at(run: Run, position: int) -> tuple[int, ...]:
    """Pixels per axis of the pictures at a place in the run."""
    share = run.progressive + (1 - run.progressive) * step_at(run, position) / max(1, run.progressive_until * run.total)
    if share >= 1:
        return run.model.image
    return tuple(
        max(1, math.floor(cells * share)) * length
        for cells, length in zip(run.model.grid, run.model.patch, strict=True)
    )


def kept(images: Tensor, run: Run, position: int) -> Tensor | None:
    """(B, C, *image) -> (B, K) int64: the patches of each picture that patch dropout leaves, None where it leaves
    all."""
    if not run.patch_dropout or step_at(run, position) >= run.patch_dropout_until * run.total:
        return None
    patches = math.prod(side // length for side, length in zip(images.shape[2:], run.model.patch, strict=True))
    count = left(run.patch_dropout, patches)
    places = position + np.arange(len(images))  # of the pictures in the stream: the same whatever batch they come in
    order = key(run.seed, places[:, None], np.arange(patches)[None]).argsort(1, kind="stable")
    return torch.from_numpy(np.sort(order[:, :count], 1)).to(images.device)


def left(dropped: float, patches: int) -> int:
    """How many of so many patches are left, when that share of them is dropped."""
    return max(1, round(patches * (1 - dropped)))


def cost(run: Run, position: int) -> float:
    """Multiply-adds of one picture's forward pass at a place in the run, without the pixels and patches that are left
    out, and without what of the last block is not read."""
    dropped = run.patch_dropout if position < run.patch_dropout_until * run.total else 0.0
    return _cost(run.model, sides_at(run, position), dropped)


@lru_cache(maxsize=16)
def _cost(model: ModelConfig, image: tuple[int, ...], dropped: float) -> float:
    if not dropped or not isinstance(model, ViTConfig):
        return computed(model, image)
    blocks = replace(model, image=image, stem=None)
    patches = math.prod(blocks.grid)
    # as many patches in a row: the cost of blocks depends on their number alone
    thin = (left(dropped, patches), *(1,) * (len(image) - 1))
    spared = replace(blocks, image=tuple(n * p for n, p in zip(thin, blocks.patch, strict=True)))
    projection = math.prod(blocks.patch) * blocks.channels * blocks.width
    skipped = (macs(blocks) - patches * projection) - (macs(spared) - math.prod(thin) * projection)
    return macs(model, image) - skipped - unread(model, math.prod(thin) + model.prefix)
