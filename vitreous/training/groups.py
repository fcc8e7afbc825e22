"""Parameter groups of the optimiser: parameters that share weight decay, learning-rate factor and step count."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from vitreous.models.config import ModelConfig
from vitreous.objectives.base import Objective
from vitreous.training.run import DecayRule, OptimizerConfig

GROUP_KINDS = ("matrix", "decay", "plain")
#: last convolutions of a detector's region proposal network and mask head
DETECTOR_OUTPUT_WEIGHTS = ("cls_logits.weight", "bbox_pred.weight", "mask_fcn_logits.weight")
#: parameters without weight decay in ViTDet: LayerNorms of blocks and absolute positions. Its other LayerNorms, over
#: channels, are a separate class of detectron2 that `weight_decay_norm` does not cover, so they decay.
VITDET_EXEMPT = re.compile(r"\.(attention|mlp)\.norm\.|\bbackbone\.encoder\.norm\.|\bbackbone\.(position|slots)\b")


class ParameterGroup(NamedTuple):
    """The settings that the parameters of an optimiser group share.

    Args:
        kind: `matrix` for hidden weight matrices, `decay` for other parameters with weight decay, `plain` for
            parameters without weight decay.
        factor: factor of the learning rate.
        starts_frozen: whether the parameters are frozen at the start of the run; they then have a separate step count.
    """

    kind: str
    factor: float = 1.0
    starts_frozen: bool = False

    @property
    def text(self) -> str:
        """The name of the group in a checkpoint."""
        name = self.kind if self.factor == 1 else f"{self.kind}@{self.factor:g}"
        return f"{name}+starts-frozen" if self.starts_frozen else name


GroupFunction = Callable[[str, Tensor], ParameterGroup]


def choose_group(
    options: OptimizerConfig, model: ModelConfig, objective: Objective, name: str, parameter: Tensor
) -> ParameterGroup:
    """Return the optimiser group of an objective's parameter, of any shape, from its name and the optimiser's
    options."""
    group_kind = choose_group_kind(name, parameter, options.decay_on)
    return ParameterGroup(
        group_kind, learning_rate_factor(options, model, objective, name), name in objective.frozen_at_start()
    )


def choose_default_group(name: str, parameter: Tensor) -> ParameterGroup:
    """Return the group of a parameter, of any shape, with default settings: weight decay of matrices only, no
    learning-rate factors."""
    return ParameterGroup(choose_group_kind(name, parameter))


def choose_group_kind(name: str, parameter: Tensor, decay_on: DecayRule = "matrices") -> str:
    """Return the kind of a parameter's group from its name and shape.

    `matrix`: weight matrices of the blocks, and convolution weights except the last ones of a detector; they have
    weight decay under every rule. The rule `decay_on` divides all other parameters into `decay` and `plain`.
    """
    is_weight = parameter.ndim >= 2 and (name.endswith("weight") or "lora_" in name)
    # without weight decay: the MLP of Swin V2 that predicts position biases
    is_weight = is_weight and ".part.position." not in name
    if is_weight and not name.endswith(DETECTOR_OUTPUT_WEIGHTS):
        hidden = ".blocks." in name or ".merge." in name
        if parameter.ndim == 4 or (hidden and parameter.ndim == 2):
            return "matrix"
    decays = {
        "matrices": is_weight,
        "multi-axis": parameter.ndim >= 2 or name.endswith("mask_token"),
        "mmdet": "norm" not in name and ".position." not in name,
        "vitdet": not VITDET_EXEMPT.search(name),
        "all": True,
    }
    return "decay" if decays[decay_on] else "plain"


def learning_rate_factor(options: OptimizerConfig, model: ModelConfig, objective: Objective, name: str) -> float:
    """Return the learning-rate factor of a parameter: layer decay (arXiv:2106.08254), times the factor of every entry
    of `options.rates` whose text is contained in the parameter's name.

    Layer decay d of a model with L blocks: d^(L + 1) before the blocks, d^(L - i) for block i (from 0), 1 after the
    blocks. The objective's `input_tokens`, such as a mask token, count as parameters before the blocks.
    """
    factor = math.prod(multiplier for text, multiplier in options.rates if text in name)
    if options.layer_decay == 1:
        return factor
    inner = name.removeprefix("model.")
    while inner.startswith("backbone."):  # once for a dense model, twice with an adapter
        inner = inner.removeprefix("backbone.")
    layer = 0 if name in objective.input_tokens else model.parameter_layer(inner)
    return factor * options.layer_decay ** (model.depth + 1 - layer)


def clip_submodule(objective: Objective, name: str) -> str:
    """Return the name of the submodule with which a parameter's gradient is clipped: the first word of the parameter's
    name, or `model` for an input token."""
    return "model" if name in objective.input_tokens else name.partition(".")[0]
