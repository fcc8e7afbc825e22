"""Fine-tuning of all parameters, of the head and the last blocks, or of low-rank adapters (LoRA, arXiv:2106.09685).

Frozen parameters get no gradient, and blocks before the first trainable one store no activations. A low-rank adapter of
a layer with weight W adds, with r rows in A and a number alpha,

    y = W x + b + (alpha / r) B A x        A drawn at random, B zero, so that a fresh adapter changes nothing
"""

from __future__ import annotations

import copy
from importlib.util import find_spec
from typing import Any

from torch import nn

from vitreous.errors import UsageError, install_hint
from vitreous.models.config import ModelConfig
from vitreous.models.zoo import Model
from vitreous.nn.encoder import Encoder
from vitreous.training.run import FineTuneConfig

HEAD_MODULES = ("head", "representation")  # modules that may be new when weights are loaded
MODULES_AFTER_BLOCKS = (
    "encoder.norm",
    "body.norm",
    "norm",
    "neck",
    "pooling",
    "pooled_norm",
)  # modules between the last block and the head


def check_fine_tuning(config: ModelConfig, tune: FineTuneConfig) -> None:
    """Raise UsageError for unsupported fine-tuning options, or if LoRA is set and `peft` is not installed."""
    depth = config.depth
    if tune.last_blocks is not None and tune.lora_rank:
        raise UsageError("last_blocks and lora_rank cannot be combined", "use one of them")
    if tune.last_blocks is not None and not 0 <= tune.last_blocks <= depth:
        raise UsageError(
            f"last_blocks is {tune.last_blocks}, but the model has {depth} blocks", f"use 0 (only the head) to {depth}"
        )
    if tune.lora_rank < 0 or tune.lora_alpha <= 0 or not 0 <= tune.lora_dropout < 1:
        raise UsageError("lora_rank must be at least 0, lora_alpha above 0, lora_dropout at least 0 and below 1")
    if tune.lora_rank and find_spec("peft") is None:
        raise UsageError("LoRA needs the library peft, which is not installed", install_hint("lora"))


def prepare_fine_tuning(model: Model, tune: FineTuneConfig) -> str:
    """Set which parameters are trainable, in place, and return a description: "training 1,930 of 5,526,346 parameters:
    the head"; "" for all.

    The head is always trainable, with the representation layer before it. With the last blocks, so are the layers that
    follow them: the last norm, the neck, the pooling. A block is a block of the encoder; of a BiT, a residual unit; of
    a Swin, a block with the patch merging before it, counted over all stages. Raises UsageError as `check_fine_tuning`
    does, and for unknown layer names.
    """
    check_fine_tuning(model.config, tune)
    if tune.lora_rank:
        description = add_lora_adapters(model, tune)
    elif tune.last_blocks is not None:
        description = freeze_backbone(model, tune.last_blocks)
    else:
        return ""
    num_trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return f"training {num_trainable:,} of {sum(p.numel() for p in model.parameters()):,} parameters: {description}"


def freeze_backbone(model: Model, num_trained: int) -> str:
    """Freeze everything except the head, the last blocks and the layers after them, and return a description.

    Frozen modules run without dropout and stochastic depth in training, as in OpenMMLab's `frozen_stages`: noise in
    modules that cannot adapt to it only degrades features.
    """
    modules, stack = dict(model.named_modules()), model.blocks()
    frozen = stack[: len(stack) - num_trained]
    model.requires_grad_(False)
    for module in [
        modules[name] for name in HEAD_MODULES + MODULES_AFTER_BLOCKS * (num_trained > 0) if name in modules
    ] + stack[len(frozen) :]:
        module.requires_grad_(True)
    for name, parameter in model.named_parameters():  # patch merging is trained with the block that follows it
        layer = model.config.parameter_layer(name)
        if len(frozen) < layer <= len(stack):
            parameter.requires_grad_(True)
    for module in [model, *(module for block in frozen for module in block.modules())]:
        for noise in ("dropout", "drop_path"):
            if hasattr(module, noise):
                setattr(module, noise, 0.0)
    return f"the head and the last {num_trained} of {len(stack)} blocks" if num_trained else "the head"


def add_lora_adapters(model: Model, tune: FineTuneConfig) -> str:
    """Add an adapter to every target, in place, freeze everything else except the head, and return a description.

    Dropout and stochastic depth stay active, because every block learns through its adapters.
    """
    names = find_lora_targets(model, tune.lora_targets)
    from peft import LoraConfig, inject_adapter_in_model  # imported here because it takes seconds

    rank, alpha = tune.lora_rank, tune.lora_alpha
    options: dict[str, Any] = {"r": rank, "lora_alpha": alpha, "lora_dropout": tune.lora_dropout}
    inject_adapter_in_model(LoraConfig(**options, target_modules=names), model)
    modules = dict(model.named_modules())
    for module in (modules[name] for name in HEAD_MODULES if name in modules):
        module.requires_grad_(True)
    return f"the head and adapters of rank {rank} at {len(names)} layers ({', '.join(tune.lora_targets)})"


def find_lora_targets(model: Model, endings: tuple[str, ...]) -> list[str]:
    """Return the names of the linear layers before the head that have one of these endings. Raises UsageError for an
    ending that matches no layer, or another type of layer."""
    candidates = {name: module for name, module in model.named_modules() if name.split(".")[0] not in HEAD_MODULES}
    linear = [name for name, module in candidates.items() if isinstance(module, nn.Linear)]
    linear_names = ", ".join(sorted({name.rpartition(".")[2] for name in linear})) or "no linear layers before its head"
    targets: list[str] = []
    for ending in endings:
        matches = [name for name in candidates if f".{name}".endswith(f".{ending}")]
        if not matches or set(matches) - set(linear):
            raise UsageError(
                f"lora_targets: {ending} matches {'other than linear' if matches else 'no'} layers",
                f"the model has {linear_names}",
            )
        targets += [name for name in matches if name not in targets]
    return targets


def merge_lora_adapters(model: Model) -> Model:
    """Return a copy with the adapters' products added to the weights, W + (alpha / r) B A: a standard model with the
    same outputs.

    Models without adapters are returned unchanged. Weights in half precision lose digits here: pass the float32
    weights.
    """
    if not any(hasattr(module, "peft_config") for module in model.modules()):  # in a dense model, the backbone has it
        return model
    from peft.tuners.tuners_utils import BaseTunerLayer

    merged = copy.deepcopy(model)
    for name, layer in list(merged.named_modules()):
        if isinstance(layer, BaseTunerLayer):
            layer.merge()
            parent, _, attribute = name.rpartition(".")
            setattr(merged.get_submodule(parent), attribute, layer.get_base_layer())
    for module in merged.modules():
        if hasattr(module, "peft_config"):
            del module.peft_config
    return merged


def enable_block_recompute(model: Model) -> None:
    """Make the encoder recompute its blocks in the backward pass instead of storing activations."""
    for module in model.modules():
        if isinstance(module, Encoder):
            module.recompute = True
