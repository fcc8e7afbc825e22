"""vitreous models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tyro.conf import Positional

if TYPE_CHECKING:
    from vitreous.cli.console import Console


@dataclass(frozen=True)
class Options:
    """List the models: parameters, tokens and cost of one image.

    Example: vitreous models 'ViT-*' --image-size 384
    """

    pattern: Positional[str] = "*"
    """Names to list, with * and ?."""
    image_size: int | None = None
    """Pixels (default: the multiple of the patch nearest 224)."""
    num_classes: int = 1000
    """Classes of the head."""


def run(options: Options, console: Console) -> dict[str, Any]:
    """Print the table; multiply-adds count as two operations."""
    from dataclasses import replace
    from fnmatch import fnmatchcase

    from vitreous.errors import UsageError, nearest
    from vitreous.models.hollow import hollow
    from vitreous.models.vit import macs
    from vitreous.models.zoo import NAMES, configure
    from vitreous.nn.grid import by

    names = [name for name in NAMES if fnmatchcase(name.lower(), options.pattern.lower())]
    if not names:
        raise UsageError(f"no model is called {options.pattern}", nearest(options.pattern, NAMES) or "try `vitreous models`")
    rows = []
    for name in names:
        try:
            model = hollow(replace(configure(name, options.image_size), classes=options.num_classes))
        except UsageError as error:
            if len(names) == 1:
                raise
            console.note(f"{name} left out: {error.message}")
            continue
        config = model.config
        tokens = config.prefix + config.grid[0] * config.grid[1]
        count = sum(p.numel() for p in model.parameters())
        rows.append(
            {"name": name, "image": by(config.image), "parameters": count, "tokens": tokens, "gflops": round(2 * macs(config) / 1e9, 3)}
        )
    console.table(
        ["model", "image", "parameters", "tokens", "GFLOPs"],
        [[r["name"], r["image"], f"{r['parameters']:,}", str(r["tokens"]), f"{r['gflops']:.1f}"] for r in rows],
    )
    console.say("GFLOPs of one forward pass, a multiply-add counted as two; training costs three times as much.")
    return {"models": rows}
