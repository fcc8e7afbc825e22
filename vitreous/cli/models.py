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
    """

    pattern: Positional[str] = "*"
    """Model names, with * and ?; or a custom size such as ViT-128x6/4."""
    weights: bool = False
    """List published weights instead: name for --init and load, size, licence, published accuracy."""
    image_size: int | None = None
    """Image size in pixels (default: the multiple of the patch size nearest 224)."""
    num_classes: int | None = None
    """Classes of the head (default: as in the model name, 1000 for most)."""


def run(options: Options, console: Console) -> dict[str, Any]:
    """Print the table of models, or of published weights. Raises UsageError if no name matches the pattern."""
    if options.weights:
        return list_published_weights(options, console)
    import math
    from contextlib import suppress
    from fnmatch import fnmatchcase

    from vitreous.errors import UsageError, suggest_nearest
    from vitreous.models.names import MODEL_NAMES, config_from_name
    from vitreous.models.zoo import build_without_init
    from vitreous.nn.sizes import format_size

    names = [name for name in MODEL_NAMES if fnmatchcase(name.lower(), options.pattern.lower())]
    if not names and not set("*?[") & set(options.pattern):  # a custom size, such as ViT-128x6/4
        with suppress(UsageError):
            config_from_name(options.pattern, options.image_size)
            names = [options.pattern]
    if not names:
        message = f"unknown model {options.pattern}"
        raise UsageError(message, suggest_nearest(options.pattern, MODEL_NAMES) or "try `vitreous models`")
    models = []
    for name in names:
        try:
            config = config_from_name(name, options.image_size)
            if options.num_classes is not None:
                config = config.with_options(classes=options.num_classes)
            num_parameters = sum(p.numel() for p in build_without_init(config).parameters())
        except UsageError as error:
            if len(names) == 1:
                raise
            console.note(f"{name} skipped: {error.message}")
            continue
        num_activations = config.count_activations()
        model = {"name": name, "image_size": format_size(config.image), "parameters": num_parameters}
        model |= {"tokens": config.prefix + math.prod(config.grid), "gflops": round(2 * config.macs() / 1e9, 3)}
        models.append(model | {"activation_bytes_bf16": None if num_activations is None else 2 * num_activations})
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


def list_published_weights(options: Options, console: Console) -> dict[str, Any]:
    """Print the published weights that match the pattern. Raises UsageError if there are none, and for an option that
    applies to models only."""
    from dataclasses import asdict

    from vitreous.errors import UsageError
    from vitreous.weights.published import select_published_weights

    for name in ("image_size", "num_classes"):
        if getattr(options, name) is not None:
            message = f"--{name.replace('_', '-')} applies to models, not to --weights"
            raise UsageError(message, "remove one of them")
    published = select_published_weights(options.pattern)
    cells = []
    for weights in published:
        accuracy = None if weights.accuracy is None else f"{weights.accuracy:.1%} {weights.accuracy_note}"
        cells.append(
            [
                weights.name,
                weights.model,
                weights.image_size,
                weights.licence,
                weights.digest.partition(":")[0] or None,
                accuracy,
            ]
        )
    console.table(["weights", "model", "image", "licence", "digest", "published on ImageNet"], cells)
    console.print_line("digest: checksum that verifies the download; if none is published, only the size is verified.")
    console.print_line("--json also prints the URLs, and the sources of the metrics.")
    return {"weights": [asdict(weights) for weights in published]}
