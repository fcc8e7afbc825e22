"""The verb `vitreous models`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tyro.conf import Positional

from vitreous.cli.console import Console


@dataclass(frozen=True)
class Options:
    """List models with parameters, tokens and GFLOPs per image; or published weights by name.

    Example: vitreous models 'ViT-*' --image-size 384
    Example: vitreous models 'dino*' --weights
    Example: vitreous models --weights --max-parameters 30
    """

    pattern: Positional[str] = "*"
    """Model names, with * and ?; or a custom size such as ViT-128x6/4."""
    weights: bool = False
    """List published weights instead: name for --init and load, size, licence, published accuracy."""
    image_size: int | None = None
    """Image size in pixels (default: the multiple of the patch size nearest 224)."""
    num_classes: int | None = None
    """Classes of the head (default: as in the model name, 1000 for most)."""
    max_parameters: float | None = None
    """List models of at most this number of parameters only, in millions."""
    max_gflops: float | None = None
    """List models of at most this number of GFLOPs per image only."""


def run(options: Options, console: Console) -> dict[str, Any]:
    """Print the table of models, or of published weights. Raises UsageError if no model matches the options."""
    if options.weights:
        return list_published_weights(options, console)
    from vitreous.errors import UsageError

    names, models = list_model_names(options), []
    for name in names:
        try:
            models.append(describe_model(name, options))
        except UsageError as error:
            if len(names) == 1:
                raise
            console.note(f"{name} skipped: {error.message}")
    models = [model for model in models if is_within_limits(model, options)]
    check_any_listed(models, options)
    cells = []
    for name, image, num_parameters, tokens, gflops, size in (model.values() for model in models):
        cells.append(
            [name, image, f"{num_parameters:,}", tokens, f"{gflops:.1f}", None if size is None else f"{size / 1e6:.0f}"]
        )
    console.table(["model", "image", "parameters", "tokens", "GFLOPs", "MB/image"], cells)
    console.print_line(
        "GFLOPs: one forward pass (a multiply-add is two operations); a training step needs three times as many."
    )
    console.print_line(
        "MB/image: activations of the blocks that the backward pass needs, in bfloat16; float32 needs twice as much."
    )
    return {"models": models}


def list_model_names(options: Options) -> list[str]:
    """Return the names of models that match the pattern, or the name of a custom size. Raises UsageError if there are
    none."""
    from contextlib import suppress
    from fnmatch import fnmatchcase

    from vitreous.errors import UsageError, suggest_nearest
    from vitreous.models.names import MODEL_NAMES, config_from_name

    names = [name for name in MODEL_NAMES if fnmatchcase(name.lower(), options.pattern.lower())]
    if not names and not set("*?[") & set(options.pattern):  # a custom size, such as ViT-128x6/4
        with suppress(UsageError):
            config_from_name(options.pattern, options.image_size)
            names = [options.pattern]
    if not names:
        message = f"unknown model {options.pattern}"
        raise UsageError(message, suggest_nearest(options.pattern, MODEL_NAMES) or "try `vitreous models`")
    return names


def describe_model(name: str, options: Options) -> dict[str, Any]:
    """Return the document of a model: parameters, tokens, compute and memory. Raises UsageError for an image size that
    the model does not support."""
    import math

    from vitreous.models.names import config_from_name
    from vitreous.models.zoo import build_without_init
    from vitreous.nn.sizes import format_size

    config = config_from_name(name, options.image_size)
    if options.num_classes is not None:
        config = config.with_options(classes=options.num_classes)
    num_activations = config.count_activations()
    return {
        "name": name,
        "image_size": format_size(config.image),
        "parameters": sum(p.numel() for p in build_without_init(config).parameters()),
        "tokens": config.prefix + math.prod(config.grid),
        "gflops": round(2 * config.macs() / 1e9, 3),
        "activation_bytes_bf16": None if num_activations is None else 2 * num_activations,
    }


def is_within_limits(model: dict[str, Any], options: Options) -> bool:
    """Return whether the document of a model has at most `max_parameters` and `max_gflops`."""
    return (options.max_parameters is None or model["parameters"] <= 1e6 * options.max_parameters) and (
        options.max_gflops is None or model["gflops"] <= options.max_gflops
    )


def check_any_listed(entries: list[Any], options: Options) -> None:
    """Raise UsageError if no model or weights match the pattern and the limits."""
    from vitreous.errors import UsageError

    if not entries:
        limits = {"--max-parameters": options.max_parameters, "--max-gflops": options.max_gflops}
        given = " ".join(f"{name} {limit:g}" for name, limit in limits.items() if limit is not None)
        raise UsageError(f"no model that matches {options.pattern} is within {given}", "raise the limits")


def list_published_weights(options: Options, console: Console) -> dict[str, Any]:
    """Print the published weights that match the options. Raises UsageError if there are none, and for an option that
    applies to models only."""
    from dataclasses import asdict, replace

    from vitreous.errors import UsageError
    from vitreous.weights.published import select_published_weights
    from vitreous.weights.published_speed import SPEED_HARDWARE

    for name in ("image_size", "num_classes"):
        if getattr(options, name) is not None:
            message = f"--{name.replace('_', '-')} applies to models, not to --weights"
            raise UsageError(message, "remove one of them")
    listed, cells = [], []
    for weights in select_published_weights(options.pattern):
        model = describe_model(weights.model, replace(options, image_size=weights.image_size))
        if not is_within_limits(model, options):
            continue
        milliseconds = weights.cpu_milliseconds
        cost = {"parameters": model["parameters"], "gflops": model["gflops"], "cpu_milliseconds": milliseconds}
        listed.append(asdict(weights) | cost)
        accuracy = None if weights.accuracy is None else f"{weights.accuracy:.1%} {weights.accuracy_note}"
        size = [f"{model['parameters'] / 1e6:.1f}", f"{model['gflops']:.1f}"]
        speed = None if milliseconds is None else f"{milliseconds:,g}"
        licence = weights.licence + " (gated)" * weights.gated
        cells.append([weights.name, weights.model, weights.image_size, *size, speed, licence, accuracy])
    check_any_listed(listed, options)
    console.table(
        ["weights", "model", "image", "M params", "GFLOPs", "CPU ms", "licence", "published on ImageNet"], cells
    )
    console.print_line("M params: millions of parameters. --json also prints URLs, checksums and sources.")
    console.print_line(f"CPU ms: milliseconds of one image, measured with random weights on {SPEED_HARDWARE}.")
    if any(weights["gated"] for weights in listed):
        console.print_line(
            "gated: accept the licence on the Hugging Face Hub, then set HF_TOKEN or run `hf auth login`."
        )
    return {"weights": listed}
