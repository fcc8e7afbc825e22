"""From the shapes in a file's header to the config of the model that they belong to."""

from __future__ import annotations

import math
from collections.abc import Container
from typing import Any, NamedTuple

from vitreous.config import nest_paths
from vitreous.errors import WeightsError
from vitreous.models.config import TRANSFORMER_FIELDS, BiTConfig, NumericsName, ViTConfig, transformer_config
from vitreous.models.names import VIT_SIZES


class ViTShape(NamedTuple):
    """What every layout tells of a ViT; `patch` in pixels, `tokens` those that have positions."""

    width: int
    depth: int
    hidden: int
    patch: tuple[int, ...]
    tokens: int


def infer_vit_config(
    size: ViTShape, fields: dict[str, Any], settings: dict[str, Any], slots: tuple[int, ...] | None = None
) -> ViTConfig:
    """The config of these sizes and fields; `settings` (of a config.json or the user) take precedence.

    `slots`: how many positions may belong to prefix tokens, the likeliest first (default: those of all prefix tokens
    but registers, of all, or none). An unknown number of heads is that of the published model of that size, else one
    per 64 channels. Raises ValueError where settings contradict the shapes, WeightsError where positions fit no grid.
    """
    settings = {name: value for name, value in settings.items() if name in TRANSFORMER_FIELDS}
    sizes = {"width": size.width, "depth": size.depth, "mlp.hidden": size.hidden, "patch": size.patch}
    for name, value in (sizes | {name: fields[name] for name in ("channels", "registers") if name in fields}).items():
        if settings.get(name, value) != value:
            raise ValueError(f"it is said to have {name} {settings[name]}, and its tensors have {value}")
    heads = find_published_heads(size.width, size.depth, size.hidden) or max(1, size.width // 64)
    if size.width % heads and not {"heads"} & (fields.keys() | settings.keys()):
        raise ValueError(
            f"the number of heads is not in the file and must divide the width {size.width}; say it: --heads N"
        )
    fields = sizes | {"heads": heads} | fields | settings
    registers = fields.get("registers", 0)
    singles = fields.get("class_token", True) + (fields.get("pool") == "distilled")
    choices = slots if slots is not None else (singles, singles + registers, 0)
    grid, fields["positions.slots"] = infer_position_grid(size.tokens, choices, settings.get("image"), size.patch)
    fields["image"] = tuple(g * p for g, p in zip(grid, size.patch, strict=True))
    return transformer_config(**nest_paths(fields))


def infer_clip_size(settings: dict[str, Any], frames: int) -> tuple[int, ...]:
    """Frames, height and width of a video model's clips: as the settings have them, else so many `frames` of 224
    pixels, in which two numbers are height and width."""
    image = settings.get("image") or (224, 224)
    return image if len(image) == 3 else (frames, *image)


def find_published_heads(width: int, depth: int, hidden: int) -> int | None:
    """Attention heads of the published model of that width, depth and MLP width; None where there is none."""
    return next((row[2] for row in VIT_SIZES.values() if (row[0], row[1], row[3]) == (width, depth, hidden)), None)


def infer_position_grid(
    tokens: int, slots: tuple[int, ...], image: tuple[int, ...] | None, patch: tuple[int, ...]
) -> tuple[tuple[int, ...], int]:
    """The grid of patches that positions are for, and how many of them belong to prefix tokens: the first of `slots`
    that fits.

    `image` in pixels, where it is known; else the grid is a square. Raises WeightsError where none fits,
    ValueError for an image of other axes than the patch.
    """
    if image is not None and len(image) != len(patch):
        raise ValueError(f"its patches have {len(patch)} sides, and the image size is said to have {len(image)}")
    for count in slots:
        rest = tokens - count
        if image is not None and rest == math.prod(i // p for i, p in zip(image, patch, strict=True)):
            return tuple(i // p for i, p in zip(image, patch, strict=True)), count
        side = math.isqrt(max(rest, 0))
        if image is None and rest > 0 and side * side == rest:
            return (side, side), count
    own = f" beside {slots[0]} for the class token" if len(slots) == 1 and slots[0] else ""
    raise WeightsError(
        f"{tokens} positions form no {'square grid' if image is None else 'grid of that image'} of patches{own}",
        "say of which image size, in pixels, the positions are: --source-size HEIGHT WIDTH",
    )


def is_ambiguous_grid(grid: tuple[int, ...]) -> bool:
    """Whether as many patches as a square grid has form another grid too, of more than one row and column: 8 x 8 are 4
    x 16."""
    return any(grid[0] % rows == 0 for rows in range(2, grid[0]))


def infer_bit_config(
    root: tuple[int, ...], blocks: tuple[int, ...], classes: int, numerics: NumericsName, settings: dict[str, Any]
) -> BiTConfig:
    """The config of a BiT whose first convolution has `root`, outputs and inputs; the image is 224 where nobody says.

    Raises ValueError where `root` is not two numbers.
    """
    width, channels = root
    factor = width // 64 if width % 64 == 0 else 1
    return BiTConfig(
        image=settings.get("image") or (224, 224),
        channels=channels,
        classes=classes,
        blocks=blocks,
        factor=factor,
        width=width // factor,
        numerics=numerics,
    )


def count_resnet_units(shapes: Container[str], template: str) -> tuple[int, ...]:
    """Units of each stage of a ResNet, from a name of theirs with holes for stage and unit, both counted from one."""
    blocks: list[int] = []
    while template.format(len(blocks) + 1, 1) in shapes:
        units = 1
        while template.format(len(blocks) + 1, units + 1) in shapes:
            units += 1
        blocks.append(units)
    return tuple(blocks)
