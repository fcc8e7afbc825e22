"""Principal components of filters and of patch tokens, and pooled features.

B batch, D width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitreous.inspection.hooks import eval_mode, forward_to_last_norm, get_patch_grid
from vitreous.models.base import VisionModel
from vitreous.nn.resnet import StandardizedConv

MAX_FILTERS = 28  # as in the paper, four rows of seven
CLIPPED_SHARE = (
    0.01  # share of the patches at either end whose colour is that of the end: a few tokens are far from all others
)


class PrincipalComponents(NamedTuple):
    """The first K components of (n, F) rows: `mean` (F,), unit `directions` (K, F); `share` (K,) of variance."""

    mean: Tensor
    directions: Tensor
    share: Tensor

    def scores(self, rows: Tensor) -> Tensor:
        """(n, F) -> (n, K) coordinates of rows along the directions."""
        return (rows - self.mean) @ self.directions.T


def fit_pca(rows: Tensor, count: int) -> PrincipalComponents:
    """(n, F) -> at most `count` components of the centred rows, float32.

    The largest number of a direction is positive. Rows that do not vary have directions of zeros.
    """
    exact = rows.double()
    mean = exact.mean(0)
    centred = exact - mean
    wide = centred.shape[1] > centred.shape[0]
    values, vectors = torch.linalg.eigh(centred @ centred.T if wide else centred.T @ centred)  # the smaller of the two
    count = max(1, min(count, len(centred) - 1, centred.shape[1]))
    values, vectors = values.flip(0).clamp(min=0), vectors.flip(1)[:, :count].T
    directions = vectors @ centred if wide else vectors
    directions = directions / directions.norm(dim=1, keepdim=True).clamp(min=1e-30)
    largest = directions.gather(1, directions.abs().argmax(1, keepdim=True))
    directions = torch.where(largest < 0, -directions, directions) * (values.sum() > 0)
    return PrincipalComponents(
        mean.float(), directions.float(), (values[:count] / values.sum().clamp(min=1e-300)).float()
    )


class FilterComponents(NamedTuple):
    """`components` (K, C, *size) float32 of length one, and `share` (K,) of the filters' variance that each explains.

    `layer` names the layer, `count` is the number of its filters.
    """

    layer: str
    count: int
    components: Tensor
    share: Tensor


def compute_filter_components(model: VisionModel[Any], most: int = MAX_FILTERS) -> FilterComponents:
    """Return the first principal components of the filters of the layer that reads the image."""
    layer, kernels = get_first_layer_filters(model)
    components = fit_pca(kernels.flatten(1), most)
    return FilterComponents(
        layer, len(kernels), components.directions.unflatten(1, kernels.shape[1:]), components.share
    )


def get_first_layer_filters(model: VisionModel[Any]) -> tuple[str, Tensor]:
    """Return the name of the layer that reads the image, and its (D, C, *size) float32 filters.

    The patch embedding; the root convolution of a BiT or hybrid, standardised as on every pass; or the first
    convolution of a stem.
    """
    first = model.first_layer()
    if isinstance(first, StandardizedConv):
        return "root convolution", first.filters().detach().float().cpu()
    weight = first.weight
    assert isinstance(weight, Tensor)
    weight = weight.detach()
    if model.config.front == "patches":
        weight = weight.to_dense() if weight.is_mkldnn else weight  # as `nn.frozen` packs it
        return "patch embedding", weight.float().cpu().unflatten(1, (model.config.channels, *model.config.cell))
    return "first convolution of the stem", weight.float().cpu()


class PatchColours(NamedTuple):
    """The first three principal components of patch tokens, as numbers in [0, 1].

    `all` (B, *grid, 3) of all patches together, `share` (3,) of variance that each explains; `foreground` (B, *grid)
    bool; `inside` (B, *grid, 3) of the foreground's patches alone, the others 0.
    """

    all: Tensor
    share: Tensor
    foreground: Tensor
    inside: Tensor


def extract_patch_tokens(model: VisionModel[Any], images: Tensor) -> Tensor:
    """(B, C, *image) input -> (B, *grid, D) float32 patch tokens after the last norm, or the last map of a BiT."""
    with eval_mode(model):
        return (
            forward_to_last_norm(model, images)[:, model.config.prefix :]
            .float()
            .unflatten(1, get_patch_grid(model, images))
        )


def extract_pooled_features(model: VisionModel[Any], images: Tensor) -> Tensor:
    """(B, C, *image) input -> (B, D) float32 that the head reads, before a representation layer."""
    with eval_mode(model):
        return model.pool(forward_to_last_norm(model, images)).float()


def colour_patch_tokens(maps: Tensor) -> PatchColours:
    """(B, *grid, D) patch tokens -> colours with one meaning in all images, as in DINOv2 (arXiv:2304.07193).

    The first component is cut at its mean; the foreground is the side with the smaller share of the grids' borders.
    Then components are fitted again within it.
    """
    rows = maps.flatten(0, -2)
    components = fit_pca(rows, 3)
    scores = components.scores(rows)
    above = (scores[:, 0] > 0).view(maps.shape[:-1])
    edge = build_border_mask(tuple(maps.shape[1:-1]))
    foreground = above if above[:, edge].float().mean() <= above[:, ~edge].float().mean() or edge.all() else ~above
    inside = torch.zeros(*maps.shape[:-1], 3)
    if foreground.sum() > 3:
        own = rows[foreground.flatten()]
        inside[foreground] = rescale_percentiles(fit_pca(own, 3).scores(own))
    return PatchColours(
        rescale_percentiles(scores).view(*maps.shape[:-1], 3),
        F.pad(components.share, (0, 3 - len(components.share))),
        foreground,
        inside,
    )


def build_border_mask(grid: tuple[int, ...]) -> Tensor:
    """Return a mask of shape `grid`, bool: the places at an end of an axis."""
    edge = torch.ones(grid, dtype=torch.bool)
    if min(grid) > 2:
        edge[tuple(slice(1, -1) for _ in grid)] = False
    return edge


def rescale_percentiles(scores: Tensor) -> Tensor:
    """(n, K) -> (n, 3) in [0, 1]: each component from its 1st to its 99th percentile; missing components are 0.5."""
    low, high = (scores.quantile(q, dim=0) for q in (CLIPPED_SHARE, 1 - CLIPPED_SHARE))
    even = ((scores - low) / (high - low).clamp(min=1e-12)).clamp(0, 1)
    return F.pad(even, (0, 3 - even.shape[1]), value=0.5)
