"""Mean attention distance of heads in pixels (arXiv:2010.11929, section 4.5 and D.7, Figs. 7 and 11).

Shapes: B batch, C channels, S sequences of an image (rows, columns, windows, or the whole image), T tokens of a
sequence, h heads, Q queries, R attentions of a model.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitreous.errors import DataError
from vitreous.inspection.hooks import AttentionCall, Span, get_patch_grid, visit_attention_calls
from vitreous.models.base import VisionModel


@dataclass(frozen=True)
class AttentionDistances:
    """Mean attention distances of a model's heads in pixels: `per_image` (images, R, h) float64, NaN for heads that a
    block does not have.

    For each of the R attentions, `layers` has its block, `spans` the tokens to which a query attends, and `uniform` the
    distance of uniform attention over these tokens. Axial blocks have two attentions.
    """

    layers: tuple[int, ...]
    spans: tuple[Span, ...]
    uniform: tuple[float, ...]
    per_image: Tensor

    @property
    def mean(self) -> Tensor:
        """Return the mean over images (R, h)."""
        return self.per_image.mean(0)

    @property
    def std(self) -> Tensor:
        """Return the standard deviation over images (R, h); zero for a single image."""
        return self.per_image.std(0, correction=0)


def compute_attention_distances(model: VisionModel[Any], batches: Iterable[Tensor]) -> AttentionDistances:
    """Compute the mean attention distance of each head, for images of one size in batches (B, C, *image).

    For a head, this is the mean over its patch queries q of sum_k A[q, k] d(q, k), with d the distance between patch
    centres in pixels. Equivalent loop:

        for q, k in product(patches, patches): total += A[q, k] * p * sqrt((row_q - row_k)^2 + (column_q - column_k)^2)

    Prefix tokens are dropped as queries and as keys, without renormalisation, so attention to the class token or a
    register has distance 0. Padding tokens of windows are dropped in the same way. If attention is within rows, columns
    or windows, all of them are averaged with equal weights per query. For grids with more than two axes (video), the
    distance is within the frame, along the last two axes.

    Raises UsageError for a model without attention, and DataError for images of different sizes or if there are no
    images.
    """
    batch_distances: list[Tensor] = []
    attention_specs: list[tuple[int, Span, float]] = []
    for images in batches:
        grid = get_patch_grid(model, images)
        attentions: list[tuple[int, Span, float]] = []
        batch: list[Tensor] = []

        def store_layer_distances(call: AttentionCall, grid=grid, attentions=attentions, batch=batch) -> None:
            """Append the distances of an attention (B, h) and its description."""
            full_grid = call.full_grid or grid
            shift = call.windows.effective_shift(full_grid) if call.windows else ()
            reference = uniform_attention_distance(
                full_grid if call.windows else call.grid, call.patch, call.grid, shift
            )
            attentions.append((call.layer, call.span, reference))
            batch.append(mean_attention_distance(call, call.patch, full_grid))

        visit_attention_calls(model, images, store_layer_distances)
        if attention_specs and attention_specs != attentions:
            raise DataError(
                "the batches have images of different sizes", "compute the distances of each size separately"
            )
        attention_specs = attentions
        heads = max(distances.shape[1] for distances in batch)
        batch = [F.pad(distances, (0, heads - distances.shape[1]), value=math.nan) for distances in batch]
        batch_distances.append(torch.stack(batch, 1).cpu())
    if not batch_distances:
        raise DataError("there are no images to analyse")
    layers, spans, reference = zip(*attention_specs, strict=True)
    return AttentionDistances(layers, spans, reference, torch.cat(batch_distances))


def mean_attention_distance(call: AttentionCall, patch: tuple[int, ...], grid: tuple[int, ...]) -> Tensor:
    """Compute the mean distance (B, h) float64 of one attention, in pixels, for patches of `patch` pixels in `grid`."""
    patch_mask = mask_real_patches(call, grid)
    positions = torch.nonzero(torch.ones(call.grid))[:, -2:].float() * torch.tensor(patch[-2:])
    positions = F.pad(positions, (2 - positions.shape[1], 0, call.prefix, 0)).to(call.x.device)  # (T, 2)
    total = torch.zeros((), dtype=torch.float64)
    for queries, weights in call.iterate_chunks():
        rows, columns = (positions[queries, None] - positions).unbind(-1)
        distances = torch.hypot(rows, columns) * patch_mask[:, queries, None] * patch_mask[:, None]  # (S, Q, T)
        weights = weights.reshape(len(call.x), len(patch_mask), *weights.shape[-3:])
        total = total + torch.einsum("bshqt,sqt->bh", weights, distances).double().cpu()
    return total / patch_mask.sum().cpu()


def mask_real_patches(call: AttentionCall, grid: tuple[int, ...]) -> Tensor:
    """Return a mask (S, T) float32: 1 for patches of the image, 0 for prefix tokens and the padding of windows."""
    if call.windows is not None:
        patch_mask = call.windows.partition_windows(torch.ones(1, *grid, 1)).reshape(-1, call.tokens)
    else:
        patches = call.tokens - call.prefix
        patch_mask = F.pad(torch.ones(math.prod(grid) // patches, patches), (call.prefix, 0))
    return patch_mask.to(call.x.device)


def uniform_attention_distance(
    grid: tuple[int, ...], patch: tuple[int, ...], window: tuple[int, ...] = (), shift: tuple[int, ...] = ()
) -> float:
    """Compute the mean distance in pixels between two patches of the same window, including pairs of a patch with
    itself.

    Without `window` it is over the whole grid: 116.49 for 14 x 14 patches of 16 pixels. For more than two axes, only
    the last two are used. `shift` is where the first full window begins along each axis, in tokens.
    """
    total = count = 0.0
    shift = shift or (0,) * len(grid)
    axes = [
        split_window_lengths(length, size, window_start)
        for length, size, window_start in zip(grid[-2:], (window or grid)[-2:], shift[-2:], strict=True)
    ]
    for window_sizes in itertools.product(*axes):
        # along an axis of n patches, 2 (n - k) ordered pairs have the distance k > 0, and n pairs have the distance 0
        offsets = [
            (torch.arange(n).double() * p, (n - torch.arange(n)) * (1 + (torch.arange(n) > 0)))
            for n, p in zip(window_sizes, patch[-2:], strict=True)
        ]
        distance, pair_counts = offsets[0]
        for more_offsets, more_counts in offsets[1:]:
            distance, pair_counts = torch.hypot(distance[:, None], more_offsets), pair_counts[:, None] * more_counts
        patches = math.prod(window_sizes)
        total += (distance * pair_counts).sum().item() / patches  # sum over queries of their mean distance
        count += patches
    return total / count


def split_window_lengths(length: int, size: int, first_length: int = 0) -> list[int]:
    """Return the lengths of windows of `size` along an axis of `length`, after a first window of `first_length`, if
    above 0: 5, 2 -> [2, 2, 1]."""
    return [first_length] * (first_length > 0) + [min(size, length - low) for low in range(first_length, length, size)]
