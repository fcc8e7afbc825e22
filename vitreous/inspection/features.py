"""Principal components of filters and of patch tokens, and pooled features.

Shapes: B batch, C channels, D width, n samples, F features, K components.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitreous.inspection.hooks import eval_mode, forward_to_last_norm, get_patch_grid
from vitreous.models.base import VisionModel
from vitreous.nn.resnet import StandardizedConv

MAX_FILTERS = 28  # number of components of filters, as in the paper: four rows of seven
CLIPPED_SHARE = 0.01  # share of patches clipped at either end of the colour scale


class PrincipalComponents(NamedTuple):
    """The first K principal components of samples (n, F): `mean` (F,), unit `directions` (K, F), and `share` (K,) of
    the variance that each explains."""

    mean: Tensor
    directions: Tensor
    share: Tensor

    def project(self, features: Tensor) -> Tensor:
        """Project samples (n, F) to coordinates (n, K) along the directions."""
        return (features - self.mean) @ self.directions.T


def fit_pca(features: Tensor, count: int) -> PrincipalComponents:
    """Fit at most `count` principal components to samples (n, F), in float64.

    The sign of a direction is chosen so that its entry of largest magnitude is positive. If all samples are equal, the
    directions are zero vectors.
    """
    samples = features.double()
    mean = samples.mean(0)
    centred = samples - mean
    is_wide = centred.shape[1] > centred.shape[0]
    # the smaller of the Gram matrix and the scatter matrix, which have the same nonzero eigenvalues
    values, vectors = torch.linalg.eigh(centred @ centred.T if is_wide else centred.T @ centred)
    count = max(1, min(count, len(centred) - 1, centred.shape[1]))
    values, vectors = values.flip(0).clamp(min=0), vectors.flip(1)[:, :count].T
    directions = vectors @ centred if is_wide else vectors
    directions = directions / directions.norm(dim=1, keepdim=True).clamp(min=1e-30)
    largest_entries = directions.gather(1, directions.abs().argmax(1, keepdim=True))
    directions = torch.where(largest_entries < 0, -directions, directions) * (values.sum() > 0)
    return PrincipalComponents(
        mean.float(), directions.float(), (values[:count] / values.sum().clamp(min=1e-300)).float()
    )


class FilterComponents(NamedTuple):
    """Principal components of a layer's filters: `components` (K, C, *size) float32 of unit length, and `share` (K,) of
    the filters' variance that each explains.

    `layer` is a description of the layer, `count` the number of its filters.
    """

    layer: str
    count: int
    components: Tensor
    share: Tensor


def compute_filter_components(model: VisionModel[Any], max_count: int = MAX_FILTERS) -> FilterComponents:
    """Compute the first `max_count` principal components of the filters of the model's first layer."""
    layer, kernels = get_first_layer_filters(model)
    components = fit_pca(kernels.flatten(1), max_count)
    return FilterComponents(
        layer, len(kernels), components.directions.unflatten(1, kernels.shape[1:]), components.share
    )


def get_first_layer_filters(model: VisionModel[Any]) -> tuple[str, Tensor]:
    """Return a description of the model's first layer, and its filters (D, C, *size) float32.

    The layer is the patch embedding; the root convolution of a BiT or hybrid, with standardised weights; or the first
    convolution of a stem.
    """
    module = model.first_layer()
    if isinstance(module, StandardizedConv):
        return "root convolution", module.filters().detach().float().cpu()
    weight = module.weight
    assert isinstance(weight, Tensor)
    weight = weight.detach()
    if model.config.front == "patches":
        weight = weight.to_dense() if weight.is_mkldnn else weight  # packed by `nn.frozen`
        return "patch embedding", weight.float().cpu().unflatten(1, (model.config.channels, *model.config.cell))
    return "first convolution of the stem", weight.float().cpu()


class PatchColours(NamedTuple):
    """Colours of patches: the first three principal components of their tokens, scaled to [0, 1].

    - `all` (B, *grid, 3): components fitted to all patches; `share` (3,) of the variance that each explains.
    - `foreground` (B, *grid) bool: patches of the foreground.
    - `inside` (B, *grid, 3): components fitted to the foreground's patches only, 0 elsewhere.
    """

    all: Tensor
    share: Tensor
    foreground: Tensor
    inside: Tensor


def extract_patch_tokens(model: VisionModel[Any], images: Tensor) -> Tensor:
    """Compute the patch tokens (B, *grid, D) float32 of images (B, C, *image) after the last norm, or the last feature
    map of a BiT."""
    with eval_mode(model):
        return (
            forward_to_last_norm(model, images)[:, model.config.prefix :]
            .float()
            .unflatten(1, get_patch_grid(model, images))
        )


def extract_pooled_features(model: VisionModel[Any], images: Tensor) -> Tensor:
    """Compute the pooled features (B, D) float32 of images (B, C, *image), before the head and its representation
    layer."""
    with eval_mode(model):
        return model.pool(forward_to_last_norm(model, images)).float()


def colour_patch_tokens(maps: Tensor) -> PatchColours:
    """Compute the colours of patch tokens (B, *grid, D), consistent across images, as in DINOv2 (arXiv:2304.07193).

    The first component is thresholded at its mean, which yields two regions. The region with the smaller share of
    border patches is the foreground, to which components are then fitted again.
    """
    tokens = maps.flatten(0, -2)
    components = fit_pca(tokens, 3)
    scores = components.project(tokens)
    is_above_mean = (scores[:, 0] > 0).view(maps.shape[:-1])
    is_border = build_border_mask(tuple(maps.shape[1:-1]))
    foreground = (
        is_above_mean
        if is_above_mean[:, is_border].float().mean() <= is_above_mean[:, ~is_border].float().mean() or is_border.all()
        else ~is_above_mean
    )
    foreground_colours = torch.zeros(*maps.shape[:-1], 3)
    if foreground.sum() > 3:
        foreground_tokens = tokens[foreground.flatten()]
        foreground_colours[foreground] = rescale_percentiles(fit_pca(foreground_tokens, 3).project(foreground_tokens))
    return PatchColours(
        rescale_percentiles(scores).view(*maps.shape[:-1], 3),
        F.pad(components.share, (0, 3 - len(components.share))),
        foreground,
        foreground_colours,
    )


def build_border_mask(grid: tuple[int, ...]) -> Tensor:
    """Build a mask of shape `grid`, bool: true for positions at an end of an axis."""
    is_border = torch.ones(grid, dtype=torch.bool)
    if min(grid) > 2:
        is_border[tuple(slice(1, -1) for _ in grid)] = False
    return is_border


def rescale_percentiles(scores: Tensor) -> Tensor:
    """Rescale components (n, K) to (n, 3) in [0, 1], each from its 1st to its 99th percentile; missing components are
    0.5."""
    low, high = (scores.quantile(q, dim=0) for q in (CLIPPED_SHARE, 1 - CLIPPED_SHARE))
    scaled = ((scores - low) / (high - low).clamp(min=1e-12)).clamp(0, 1)
    return F.pad(scaled, (0, 3 - scaled.shape[1]), value=0.5)
