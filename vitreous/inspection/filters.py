"""What the first layer looks for: principal components of its filters (arXiv:2010.11929, Fig. 7 left)."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from vitreous.inspection.principal import principal
from vitreous.models.zoo import Model
from vitreous.nn.resnet import StandardizedConv, standardize

SHOWN = 28  # as in the paper, four rows of seven


class Filters(NamedTuple):
    """`components` (K, C, *size) float32, of length one, and `share` (K,), the part of the filters' variance that each
    explains.

    `layer` says in words whose filters they are, `count` how many of them there are.
    """

    layer: str
    count: int
    components: Tensor
    share: Tensor


def filters(model: Model, most: int = SHOWN) -> Filters:
    """The first principal components of the filters of the layer that reads the image: one row to a filter, columns
    centred."""
    layer, kernels = first_layer(model)
    components = principal(kernels.flatten(1), most)
    return Filters(layer, len(kernels), components.directions.unflatten(1, kernels.shape[1:]), components.share)


def first_layer(model: Model) -> tuple[str, Tensor]:
    """What the layer that reads the image is called, and its (D, C, *size) float32 filters.

    The patch embedding; the root convolution of a BiT or of a hybrid, its filters standardised as they are on every
    pass; or the first convolution of a stem of small ones.
    """
    first = model.first_layer()
    if isinstance(first, StandardizedConv):
        return "root convolution", standardize(first.weight.detach().float(), first.numerics).cpu()
    weight: Any = first.weight.detach()  # type: ignore[operator]
    if model.config.front == "patches":
        weight = weight.to_dense() if weight.is_mkldnn else weight  # as `nn.frozen` packs it
        return "patch embedding", weight.float().cpu().unflatten(1, (model.config.channels, *model.config.patch))
    return "first convolution of the stem", weight.float().cpu()
