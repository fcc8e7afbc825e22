"""Gram anchoring (arXiv:2508.10104, section 4.2): the similarities of an image's patches stay those of an earlier
teacher, although its features may change.

Shapes: b images, N patches of each, D width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

FEATURE_PRODUCTS = 3  # products of (D, N) and (N, D) matrices that `gram_loss` needs if it avoids (N, N) matrices
PATCH_PRODUCTS = 2  # products of (N, D) and (D, N) matrices that it needs otherwise


def gram_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Compute the mean squared difference of the patch similarities, a scalar: patch tokens of the student and of the
    Gram teacher, both (b, N, D) (arXiv:2508.10104, Eq. 2, as in DINOv3's code).

    Tokens are normalised to length one, in float32. Similarities are those within an image.

        X, Y = normalize(student), normalize(teacher); loss = (X X^T - Y Y^T).square().mean()

    If an image has more patches than about 1.5 D, no (N, N) matrix is computed. With E = X - Y and F = X + Y:

        X X^T - Y Y^T = (E F^T + F E^T) / 2; its squared norm = (<E^T E, F^T F> + <E^T F, F^T E>) / 2

    Unlike |X^T X|^2 + |Y^T Y|^2 - 2 |X^T Y|^2, which is equal, this loses no digits if student and teacher are similar.
    """
    student, teacher = F.normalize(student.float(), dim=-1), F.normalize(teacher.float(), dim=-1)
    patches, width = student.shape[1:]
    if PATCH_PRODUCTS * patches <= FEATURE_PRODUCTS * width:
        return (student @ student.mT - teacher @ teacher.mT).square().mean()
    difference, total = student - teacher, student + teacher
    cross = difference.mT @ total
    products = (difference.mT @ difference) * (total.mT @ total) + cross * cross.mT
    return products.sum((1, 2)).mean() / (2 * patches**2)


def resize_patch_maps(patches: Tensor, old_grid: tuple[int, ...], grid: tuple[int, ...]) -> Tensor:
    """Resize patch tokens of a grid to another grid, bicubic without antialiasing, as DINOv3's code does with the
    tokens of its Gram teacher: (b, N, D) -> (b, N', D) float32."""
    if old_grid == grid:
        return patches.float()
    maps = torch.unflatten(patches.float(), 1, old_grid).permute(0, 3, 1, 2)
    resized = F.interpolate(maps, grid, mode="bicubic", antialias=False, align_corners=False)
    return resized.flatten(2).mT
