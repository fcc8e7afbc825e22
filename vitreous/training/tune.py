"""Fine-tuning of all parameters, of the head and the last blocks, or of low-rank adapters (LoRA, arXiv:2106.09685).

Frozen parameters get no gradient, and blocks before the first trainable one store no activations. For a layer with
weight W and bias b, a low-rank adapter of rank r with matrices A and B and scale alpha computes

    y = W x + b + (alpha / r) B A x

A is drawn at random and B is zero, so a new adapter does not change the output.
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

HEAD_MODULES = ("head", "representation")  # modules that may have random weights after pre-trained weights are loaded
#: modules between the last block and the head
MODULES_AFTER_BLOCKS = ("encoder.norm", "body.norm", "norm", "neck", "pooling", "pooled_norm")


def check_fine_tuning(config: ModelConfig, tune: FineTuneConfig) -> None:
    """Raise UsageError if the model does not support the fine-tuning options, or if LoRA is set and `peft` is not
    installed."""
    depth = config.depth
    if tune.last_blocks is not None and tune.lora_rank:
        raise UsageError("last_blocks and lora_rank cannot be combined", "use one of them")
    if tune.last_blocks is not None and not 0 <= tune.last_blocks <= depth:
        raise UsageError(
            f"last_blocks is {tune.last_blocks}, but the model has {depth} blocks", f"use 0 (only the head) to {depth}"
        )
    if tune.lora_rank < 0 or tune.lora_alpha <= 0 or not 0 <= tune.lora_dropout < 1:
        raise UsageError(
            "lora_rank must be at least 0, lora_alpha above 0, and lora_dropout at least 0 and below 1, not "
            f"{tune.lora_rank}, {tune.lora_alpha:g} and {tune.lora_dropout:g}"
        )
    if tune.lora_rank and find_spec("peft") is None:
        raise UsageError("LoRA requires the library peft, which is not installed", install_hint("lora"))


def prepare_fine_tuning(model: Model, tune: FineTuneConfig) -> str:
    """Freeze parameters or add LoRA adapters in place, as `tune` specifies. Returns a description such as "training
    1,930 of 5,526,346 parameters: the head", or "" if all parameters are trained.

    The head and the representation layer before it are always trainable. With `last_blocks`, the layers after the last
    block are trainable too: the last norm, the neck, the pooling. A block is a block of the encoder, a residual unit of
    a BiT, or a Swin block with the patch merging before it, counted over all stages. Raises UsageError for unsupported
    options and unknown layer names.
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
    """Freeze all parameters except those of the head, the last `num_trained` blocks and the layers after them. Returns
    a description.

    Frozen modules run without dropout and stochastic depth in training, as in OpenMMLab's `frozen_stages`. Noise in
    modules that cannot adapt to it only degrades features.
    """
    modules, blocks = dict(model.named_modules()), model.blocks()
    frozen = blocks[: len(blocks) - num_trained]
    model.requires_grad_(False)
    for module in [
        modules[name] for name in HEAD_MODULES + MODULES_AFTER_BLOCKS * (num_trained > 0) if name in modules
    ] + blocks[len(frozen) :]:
        module.requires_grad_(True)
    for name, parameter in model.named_parameters():  # patch merging is trained with the block that follows it
        layer = model.config.parameter_layer(name)
        if len(frozen) < layer <= len(blocks):
            parameter.requires_grad_(True)
    for module in [model, *(module for block in frozen for module in block.modules())]:
        for noise in ("dropout", "drop_path"):
            if hasattr(module, noise):
                setattr(module, noise, 0.0)
    return f"the head and the last {num_trained} of {len(blocks)} blocks" if num_trained else "the head"


def add_lora_adapters(model: Model, tune: FineTuneConfig) -> str:
    """Add a LoRA adapter to every target layer, in place, and freeze all other parameters except the head's. Returns a
    description.

    Dropout and stochastic depth stay active, because every block is trained through its adapters.
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
    """Return the names of the linear layers before the head whose names end in one of the `endings`. Raises UsageError
    if an ending matches no layer, or a layer that is not linear."""
    candidates = {name: module for name, module in model.named_modules() if name.split(".")[0] not in HEAD_MODULES}
    linear = [name for name, module in candidates.items() if isinstance(module, nn.Linear)]
    linear_names = ", ".join(sorted({name.rpartition(".")[2] for name in linear})) or "none before its head"
    targets: list[str] = []
    for ending in endings:
        matches = [name for name in candidates if f".{name}".endswith(f".{ending}")]
        if not matches or set(matches) - set(linear):
            raise UsageError(
                f"lora_targets: {ending} matches {'layers that are not linear' if matches else 'no layer'}",
                f"use linear layers of the model: {linear_names}",
            )
        targets += [name for name in matches if name not in targets]
    return targets


def merge_lora_adapters(model: Model) -> Model:
    """Merge LoRA adapters into the weights of a copy, W + (alpha / r) B A. The copy is a standard model with the same
    outputs.

    A model without adapters is returned unchanged. Merging weights in half precision loses digits, so pass float32
    weights.
    """
    # in a dense model, the backbone has the attribute `peft_config`
    if not any(hasattr(module, "peft_config") for module in model.modules()):
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
    """Make the encoder recompute the activations of its blocks in the backward pass instead of storing them."""
    for module in model.modules():
        if isinstance(module, Encoder):
            module.recompute = True
