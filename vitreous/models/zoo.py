"""Names and sizes: the only registry, complete at import."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from vitreous.errors import UsageError, nearest
from vitreous.models.config import ViTConfig, nearby
from vitreous.models.vit import ViT
from vitreous.nn.grid import by

#: width, depth, heads, hidden: arXiv:2010.11929 Table 1; Ti and S arXiv:2012.12877; g arXiv:2106.04560; mu big_vision's.
SIZES = {
    "mu": (32, 1, 2, 128),
    "Ti": (192, 12, 3, 768),
    "S": (384, 12, 6, 1536),
    "B": (768, 12, 12, 3072),
    "L": (1024, 24, 16, 4096),
    "H": (1280, 32, 16, 5120),
    "g": (1408, 40, 16, 6144),
}
PATCHES = (8, 14, 16, 32)
WORDS = {"tiny": "Ti", "small": "S", "base": "B", "large": "L", "huge": "H", "giant": "g"}

#: What `vitreous models` lists; other patches and `ViT-WIDTHxDEPTH/PATCH` are built on request.
NAMES = [f"ViT-{size}/{patch}" for size in SIZES if size != "mu" for patch in PATCHES]

_CANONICAL = re.compile(r"(?:vit-)?(?P<size>[a-z]+|\d+x\d+)/(?P<patch>\d+)", re.IGNORECASE)
_TIMM = re.compile(r"(?:google/)?vit[-_](?P<size>[a-z]+)[-_](?:patch)?(?P<patch>\d+)(?:[-_](?P<image>\d+))?", re.IGNORECASE)


def configure(name: str, image_size: int | tuple[int, ...] | None = None) -> ViTConfig:
    """The config that a name stands for, at `image_size` pixels (the name's own, else the multiple of the patch nearest 224).

    Accepted in any case: `ViT-B/16`, `B/16`, `vit_base_patch16_224`, `vit_b_16`, `google/vit-base-patch16-224`, and
    `ViT-128x6/4` for a width of 128 and a depth of 6 with heads of 32 channels. Raises UsageError for any other.
    """
    match = _CANONICAL.fullmatch(name) or _TIMM.fullmatch(name)
    sizes = {key.lower(): key for key in SIZES} | WORDS
    size = match and match["size"].lower()
    if not match or not size or (size not in sizes and not size[0].isdigit()):
        raise UsageError(f"unknown model {name}", nearest(name, NAMES) or "`vitreous models` lists them")
    if size in sizes:
        width, depth, heads, hidden = SIZES[sizes[size]]
    else:
        width, depth = map(int, size.split("x"))
        heads, hidden = max(1, width // 32), 4 * width
    patch = (int(match["patch"]),) * 2
    if patch[0] < 1:
        raise UsageError(f"unknown model {name}", "a patch is at least one pixel")
    image = image_size or int(match.groupdict().get("image") or 0) or nearby((224, 224), patch)
    image = (image, image) if isinstance(image, int) else tuple(image)
    return ViTConfig(image=image, patch=patch, width=width, depth=depth, heads=heads, hidden=hidden)


def name_of(config: ViTConfig) -> str:
    """The canonical name of a config, `ViT-B/16`, or `ViT-128x6/4` where no row of the table fits."""
    shape = (config.width, config.depth, config.heads, config.hidden)
    size = next((key for key, row in SIZES.items() if row == shape), f"{config.width}x{config.depth}")
    return f"ViT-{size}/{by(config.patch)}"


def create(
    name: str,
    image_size: int | tuple[int, ...] | None = None,
    num_classes: int = 1000,
    channels: int = 3,
    **changes: Any,
) -> ViT:
    """Build a model by name, freshly initialised: `create("ViT-B/16", image_size=384, num_classes=37)`.

    `image_size` in pixels, one number or one per axis; `num_classes=0` leaves the head out; `changes` are fields of
    `ViTConfig`. Raises UsageError for an unknown name or field and for a size that the patch does not divide.
    """
    config = configure(name, image_size)
    unknown = set(changes) - set(ViTConfig.__dataclass_fields__)
    if unknown:
        word = min(unknown)
        raise UsageError(f"a ViT has no {word}", nearest(word, ViTConfig.__dataclass_fields__))
    return ViT(replace(config, classes=num_classes, channels=channels, **changes))
