"""Parameter groups of the optimiser: which parameters share a weight decay, a learning-rate factor and a step count."""

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
#: output convolutions of a detector's proposals and masks
DETECTOR_OUTPUT_WEIGHTS = ("cls_logits.weight", "bbox_pred.weight", "mask_fcn_logits.weight")
#: parameters without weight decay in ViTDet: LayerNorms of blocks and absolute positions. Its other LayerNorms, over
#: channels, are a separate class of detectron2 that `weight_decay_norm` does not cover, so they decay.
VITDET_EXEMPT = re.compile(r"\.(attention|mlp)\.norm\.|\bbackbone\.encoder\.norm\.|\bbackbone\.(position|slots)\b")


class ParameterGroup(NamedTuple):
    """Parameters with the same optimiser settings.

    Args:
        kind: `matrix` for hidden matrices, `decay` for other parameters with weight decay, `to_dict` for those without.
        factor: factor of the learning rate.
        starts_frozen: whether the parameters are frozen at the start of the run; they then have a separate step count.
    """

    kind: str
    factor: float = 1.0
    starts_frozen: bool = False

    @property
    def text(self) -> str:
        """The group's name in a checkpoint."""
        name = self.kind if self.factor == 1 else f"{self.kind}@{self.factor:g}"
        return f"{name}+starts-frozen" if self.starts_frozen else name


GroupFunction = Callable[[str, Tensor], ParameterGroup]


def choose_group(
    options: OptimizerConfig, model: ModelConfig, objective: Objective, name: str, parameter: Tensor
) -> ParameterGroup:
    """Return the group of an objective's parameter, which may have any shape."""
    group_kind = choose_group_kind(name, parameter, options.decay_on)
    return ParameterGroup(
        group_kind, learning_rate_factor(options, model, objective, name), name in objective.frozen_at_start()
    )


def choose_default_group(name: str, parameter: Tensor) -> ParameterGroup:
    """Return the group of a parameter of any shape if only matrices decay and all learning rates are the same."""
    return ParameterGroup(choose_group_kind(name, parameter))


def choose_group_kind(name: str, parameter: Tensor, decay_on: DecayRule = "matrices") -> str:
    """Return the kind of a parameter's group from its name and shape.

    `matrix`: matrices of the blocks, and convolutions except a detector's last ones, all of which decay. The rule
    `decay_on` divides the other parameters into `decay` and `to_dict`.
    """
    is_weight = parameter.ndim >= 2 and (name.endswith("weight") or "lora_" in name)
    # the network that predicts a Swin V2's position biases does not decay
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
    """Return the learning-rate factor of a parameter: layer decay (arXiv:2106.08254), times all factors of
    `options.rates` whose text is in the name.

    With decay d, d^(L + 1) before the blocks, d^(L - i) for block i of L (from 0), 1 after them. The objective's
    `input_tokens` count as parameters before the blocks.
    """
    factor = math.prod(multiplier for text, multiplier in options.rates if text in name)
    if options.layer_decay == 1:
        return factor
    inner = name.removeprefix("model.")
    while inner.startswith("backbone."):  # of a dense model, and of its adapter
        inner = inner.removeprefix("backbone.")
    layer = 0 if name in objective.input_tokens else model.parameter_layer(inner)
    return factor * options.layer_decay ** (model.depth + 1 - layer)


def clip_submodule(objective: Objective, name: str) -> str:
    """Return the submodule with which a parameter's gradient is clipped: the first word of its name, or `model` for an
    input token."""
    return "model" if name in objective.input_tokens else name.partition(".")[0]
