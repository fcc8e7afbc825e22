"""What the first layer looks for: principal components of its filters (arXiv:2010.11929, Fig. 7 left)."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from vitreous.inspection.principal import principal
from vitreous.models.config import BiTConfig
from vitreous.models.zoo import Model
from vitreous.nn.convstem import ConvStem
from vitreous.nn.resnet import standardize

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
    found = principal(kernels.flatten(1), most)
    return Filters(layer, len(kernels), found.directions.unflatten(1, kernels.shape[1:]), found.share)


def first_layer(model: Model) -> tuple[str, Tensor]:
    """What the layer that reads the image is called, and its (D, C, *size) float32 filters.

    The patch embedding; the root convolution of a BiT or of a hybrid, its filters standardised as they are on every
    pass; or the first convolution of a stem of small ones.
    """
    part: Any = model
    stem = part.body if isinstance(model.config, BiTConfig) else part.stem
    if stem is None:
        weight = part.projection.weight.detach()
        weight = weight.to_dense() if weight.is_mkldnn else weight  # as `nn.frozen` packs it
        return "patch embedding", weight.float().cpu().unflatten(1, (model.config.channels, *model.config.patch))
    if isinstance(stem, ConvStem):
        return "first convolution of the stem", stem.stages[0].conv.weight.detach().float().cpu()  # type: ignore[union-attr]
    root = stem.root.conv
    return "root convolution", standardize(root.weight.detach().float(), root.numerics).cpu()
