"""Infer a model's config from the shapes in a file's header."""

from __future__ import annotations

import math
from collections.abc import Container
from typing import Any, NamedTuple

from vitreous.config import nest_paths
from vitreous.errors import WeightsError
from vitreous.models.config import TRANSFORMER_FIELDS, BiTConfig, NumericsName, ViTConfig, transformer_config
from vitreous.models.names import VIT_SIZES


class ViTShape(NamedTuple):
    """Sizes of a ViT that every format determines: width, depth, MLP width, patch size in pixels, and tokens with
    positions."""

    width: int
    depth: int
    hidden: int
    patch: tuple[int, ...]
    tokens: int


def infer_vit_config(
    size: ViTShape, fields: dict[str, Any], settings: dict[str, Any], slots: tuple[int, ...] | None = None
) -> ViTConfig:
    """Build the config from these sizes and fields; `settings` (of a config.json or the user) take precedence.

    `slots`: candidate numbers of prefix tokens with positions, the likeliest first (default: all prefix tokens except
    registers, all, or none). An unknown number of heads defaults to that of the published model of the same size, else
    to one per 64 channels. Raises ValueError if settings contradict the shapes, WeightsError if positions fit no grid.
    """
    settings = {name: value for name, value in settings.items() if name in TRANSFORMER_FIELDS}
    sizes = {"width": size.width, "depth": size.depth, "mlp.hidden": size.hidden, "patch": size.patch}
    for name, value in (sizes | {name: fields[name] for name in ("channels", "registers") if name in fields}).items():
        if settings.get(name, value) != value:
            raise ValueError(f"its settings have {name} {settings[name]}, and its tensors have {value}")
    heads = find_published_heads(size.width, size.depth, size.hidden) or max(1, size.width // 64)
    if size.width % heads and not {"heads"} & (fields.keys() | settings.keys()):
        raise ValueError(
            f"the number of heads is not in the file and must divide the width {size.width}; set --heads N"
        )
    fields = sizes | {"heads": heads} | fields | settings
    registers = fields.get("registers", 0)
    num_class_tokens = fields.get("class_token", True) + (fields.get("pool") == "distilled")
    slot_candidates = slots if slots is not None else (num_class_tokens, num_class_tokens + registers, 0)
    grid, fields["positions.slots"] = infer_position_grid(
        size.tokens, slot_candidates, settings.get("image"), size.patch
    )
    fields["image"] = tuple(g * p for g, p in zip(grid, size.patch, strict=True))
    return transformer_config(**nest_paths(fields))


def infer_clip_size(settings: dict[str, Any], frames: int) -> tuple[int, ...]:
    """Return frames, height and width of a video model's clips. By default clips have `frames` frames of 224 pixels;
    two numbers in the settings are height and width."""
    image = settings.get("image") or (224, 224)
    return image if len(image) == 3 else (frames, *image)


def find_published_heads(width: int, depth: int, hidden: int) -> int | None:
    """Return the attention heads of the published model of that width, depth and MLP width; None if there is none."""
    return next((size[2] for size in VIT_SIZES.values() if (size[0], size[1], size[3]) == (width, depth, hidden)), None)


def infer_position_grid(
    tokens: int, slots: tuple[int, ...], image: tuple[int, ...] | None, patch: tuple[int, ...]
) -> tuple[tuple[int, ...], int]:
    """Infer the patch grid of `tokens` positions, and the number of prefix tokens among them: the first of `slots` that
    fits. `image`: image size in pixels if known; else the grid is square. Raises WeightsError if none fits, ValueError
    if image and patch have different numbers of axes."""
    if image is not None and len(image) != len(patch):
        raise ValueError(f"its patches have {len(patch)} axes, but the image size has {len(image)}")
    for count in slots:
        num_patches = tokens - count
        if image is not None and num_patches == math.prod(i // p for i, p in zip(image, patch, strict=True)):
            return tuple(i // p for i, p in zip(image, patch, strict=True)), count
        side = math.isqrt(max(num_patches, 0))
        if image is None and num_patches > 0 and side * side == num_patches:
            return (side, side), count
    token_note = f" in addition to {slots[0]} for the class token" if len(slots) == 1 and slots[0] else ""
    raise WeightsError(
        f"{tokens} positions form no {'square grid' if image is None else 'grid of that image'} of patches{token_note}",
        "set the image size of the positions in pixels: --source-size HEIGHT WIDTH",
    )


def is_ambiguous_grid(grid: tuple[int, ...]) -> bool:
    """Return whether another grid with more than one row and column has as many patches, such as 4 x 16 for 8 x 8."""
    return any(grid[0] % rows == 0 for rows in range(2, grid[0]))


def infer_bit_config(
    root: tuple[int, ...], blocks: tuple[int, ...], classes: int, numerics: NumericsName, settings: dict[str, Any]
) -> BiTConfig:
    """Build the config of a BiT; `root` has the output and input channels of the first convolution. The image size is
    224 unless set. Raises ValueError if `root` is not two numbers."""
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
    """Count the units of each stage of a ResNet; `template` is a tensor name with placeholders for stage and unit, both
    counted from one."""
    blocks: list[int] = []
    while template.format(len(blocks) + 1, 1) in shapes:
        units = 1
        while template.format(len(blocks) + 1, units + 1) in shapes:
            units += 1
        blocks.append(units)
    return tuple(blocks)
