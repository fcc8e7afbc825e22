"""Work that a run may leave out in its first part: patches of a picture, and pixels of it.

B pictures of a batch, N patches; `position` is that of the batch in the run's stream of pictures. Both are functions of
the position alone, so a resumed run leaves out the same.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitreous.data.keys import key
from vitreous.training.run import Run


def shrunk(images: Tensor, run: Run, position: int) -> Tensor:
    """(B, C, *image) -> (B, C, *smaller): the pictures at the size of their place in the run (progressive resolution).

    Each side starts at the share `progressive` of the model's grid and grows, linearly and by whole patches, until
    `progressive_until` of the run. The encoder reads its positions at the smaller grid, as it does at any.
    """
    share = run.progressive + (1 - run.progressive) * position / max(1, run.progressive_until * run.total)
    if share >= 1:
        return images
    sides = [max(1, math.floor(cells * share)) * length for cells, length in zip(run.model.grid, run.model.patch, strict=True)]
    return images if list(images.shape[2:]) == sides else F.interpolate(images, size=sides, mode="bilinear", antialias=True)


def kept(images: Tensor, run: Run, position: int) -> Tensor | None:
    """(B, C, *image) -> (B, K) int64: the patches of each picture that patch dropout leaves, None where it leaves all."""
    if not run.patch_dropout or position >= run.patch_dropout_until * run.total:
        return None
    patches = math.prod(side // length for side, length in zip(images.shape[2:], run.model.patch, strict=True))
    count = max(1, round(patches * (1 - run.patch_dropout)))
    order = key(run.seed, position, np.arange(len(images))[:, None], np.arange(patches)[None]).argsort(1, kind="stable")
    return torch.from_numpy(np.sort(order[:, :count], 1)).to(images.device)
