"""Sizes and names of each family: tables, and the two functions by which a name is read and written."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from vitreous.errors import UsageError, nearest
from vitreous.models.configs.axial import AxialConfig
from vitreous.models.configs.bit import BiTConfig
from vitreous.models.configs.hybrid import ConvStemConfig, HybridConfig, StemConfig
from vitreous.models.configs.vit import ViTConfig
from vitreous.nn.sizes import format_size, nearby

Image = tuple[int, ...] | None

#: width, depth, heads, hidden: arXiv:2010.11929 Table 1; Ti and S arXiv:2012.12877; M DeiT-III; g and G
#: arXiv:2106.04560; e arXiv:2209.06794; So400m arXiv:2305.13035; mu big_vision's smallest.
SIZES = {
    "mu": (32, 1, 2, 128),
    "Ti": (192, 12, 3, 768),
    "S": (384, 12, 6, 1536),
    "M": (512, 12, 8, 2048),
    "B": (768, 12, 12, 3072),
    "L": (1024, 24, 16, 4096),
    "H": (1280, 32, 16, 5120),
    "g": (1408, 40, 16, 6144),
    "G": (1664, 48, 16, 8192),
    "e": (1792, 56, 16, 15360),
    "So400m": (1152, 27, 16, 4304),
}
PATCHES = (8, 14, 16, 32)
WORDS = {
    "tiny": "Ti",
    "small": "S",
    "medium": "M",
    "base": "B",
    "large": "L",
    "huge": "H",
    "giant": "g",
    "gigantic": "G",
    "enormous": "e",
}

#: units of each stage of a ResNet by its depth (arXiv:1512.03385 Table 1, arXiv:1912.11370)
RESNETS = {"26": (2, 2, 2, 2), "50": (3, 4, 6, 3), "101": (3, 4, 23, 3), "152": (3, 8, 36, 3), "200": (3, 24, 36, 3)}

NO_TOKENS: dict[str, Any] = {"pool": "mean", "class_token": False}
_DINOV2: dict[str, Any] = {
    "patch": (14, 14),
    "image": (518, 518),
    "layer_scale": 1e-5,
    "classes": 0,
    "resize": "bicubic-offset",
}
_REGISTERS: dict[str, Any] = _DINOV2 | {"registers": 4, "resize": "bicubic-antialias"}
_CLIP: dict[str, Any] = {
    "first_norm": True,
    "norm": "pooled",
    "gelu": "quick",
    "eps": 1e-5,
    "projection_bias": False,
    "head_bias": False,
}
_SAM: dict[str, Any] = NO_TOKENS | {
    "image": (1024, 1024),
    "attention": "decomposed",
    "window": 14,
    "neck": 256,
    "norm": "none",
    "classes": 0,
    "resize": "bicubic",
}
_GIANT = {"width": 1536, "depth": 40, "heads": 24, "hidden": 4096, "mlp": "swiglu"}
_DEIT: dict[str, Any] = {"pool": "distilled", "slots": 2, "resize": "bicubic"}
_DEIT3: dict[str, Any] = {"slots": 0, "layer_scale": 1e-4, "resize": "bicubic"}
#: families that are a plain ViT with other options: family -> size and patch -> what differs from ViT of that size
KIN: dict[str, dict[str, dict[str, Any]]] = {
    "DeiT": {f"{size}/16-distilled": _DEIT for size in ("Ti", "S", "B")},
    "DeiT-III": dict.fromkeys(("S/16", "M/16", "B/16", "L/16", "H/14"), _DEIT3),
    "DINO": {name: {"classes": 0, "resize": "bicubic-offset"} for name in ("S/16", "S/8", "B/16", "B/8")},
    "DINOv2": dict.fromkeys(("S/14", "B/14", "L/14"), _DINOV2)
    | {f"{name}-registers": _REGISTERS for name in ("S/14", "B/14", "L/14")}
    | {"g/14": _DINOV2 | _GIANT, "g/14-registers": _REGISTERS | _GIANT},
    "MAE": {name: {"classes": 0, "resize": "bicubic"} for name in ("B/16", "L/16", "H/14")},
    "CLIP": {name: _CLIP | {"classes": out} for name, out in {"B/32": 512, "B/16": 512, "L/14": 768}.items()},
    "SAM": {
        "B/16": _SAM | {"global_blocks": (2, 5, 8, 11)},
        "L/16": _SAM | {"global_blocks": (5, 11, 17, 23)},
        "H/16": _SAM | {"global_blocks": (7, 15, 23, 31)},
    },
    "Axial-ViT": {name: NO_TOKENS | {"axial": True} for name in ("B/16", "B/32")},
}
#: blocks of the stem, and the pixels of a token where the name's number says something else (arXiv:2010.11929 Table 6,
#: AugReg)
HYBRIDS: dict[str, tuple[tuple[int, ...], int | None]] = {
    "R+ViT-Ti/16": ((), 32),  # named so, though a token covers 32 pixels: patches of 8 on a map of a quarter
    "R26+ViT-S/32": ((2, 2, 2, 2), None),
    "R26+ViT-B/32": ((2, 2, 2, 2), None),
    "R50+ViT-B/16": ((3, 4, 9), None),
    "R50+ViT-B/32": ((3, 4, 6, 3), None),
    "R50+ViT-L/16": ((3, 4, 9), None),
    "R50+ViT-L/32": ((3, 4, 6, 3), None),
}
CONVS = ("Conv+ViT-128x4/8", "Conv+ViT-Ti/16", "Conv+ViT-S/16")  # arXiv:2106.14881, with the stem of ConvStemConfig
BITS = ("50x1", "50x2", "50x3", "101x1", "101x3", "152x1", "152x2", "152x4", "200x3")

#: What `vitreous models` lists; other patches and `ViT-WIDTHxDEPTH/PATCH` are built on request.
NAMES = [
    *(f"ViT-{size}/{patch}" for size in SIZES if size not in ("mu", "e") for patch in PATCHES),
    *HYBRIDS,
    *CONVS,
    *(f"BiT-R{name}" for name in BITS),
    "AxialResNet-50",
    *(f"{family}-{name}" for family, members in KIN.items() for name in members),
]

_CANONICAL = re.compile(r"(?:vit-)?(?P<size>[a-z][a-z0-9]*|\d+x\d+)/(?P<patch>\d+)", re.IGNORECASE)
_TIMM = re.compile(
    r"(?:google/)?vit[-_](?P<size>[a-z]+)[-_](?:patch)?(?P<patch>\d+)(?:[-_](?P<image>\d+))?(?:[-_]in21k)?(?:\..*)?",
    re.IGNORECASE,
)
_HYBRID = re.compile(r"r(?P<depth>\d+)(?:x(?P<factor>\d+))?\+(?:vit-)?(?P<rest>\w+/(?P<patch>16|32))", re.IGNORECASE)
_CONV = re.compile(r"conv\+(?:vit-)?(?P<rest>\w+/\d+)", re.IGNORECASE)
_RESNET = re.compile(r"(?:bit-)?r(?P<depth>\d+)x(?P<factor>\d+)", re.IGNORECASE)


def parse_bit(name: str, image: Image) -> BiTConfig | None:
    """`BiT-R50x1`, `R50x1` or `AxialResNet-50`."""
    size: Any = image or (224, 224)
    if name == "AxialResNet-50":
        return BiTConfig(image=size, axial=True)
    resnet = _RESNET.fullmatch(name)
    if resnet is None or resnet["depth"] not in RESNETS:
        return None
    return BiTConfig(image=size, blocks=RESNETS[resnet["depth"]], factor=int(resnet["factor"]))


def parse_hybrid(name: str, image: Image) -> ViTConfig | None:
    """`R50+ViT-B/16`, `R26x2+ViT-S/32` or `Conv+ViT-S/16`."""
    conv, resnet = _CONV.fullmatch(name), _HYBRID.fullmatch(name)
    if conv:
        return at(plain(conv["rest"]), {"stem": ConvStemConfig()}, image)
    options = {"resize": "zoom", "gelu": "tanh"}
    if name in HYBRIDS:
        blocks, pixels = HYBRIDS[name]
        return at(plain(name.partition("+")[2], pixels), {"stem": StemConfig(blocks), **options}, image)
    if resnet is None or resnet["depth"] not in RESNETS:
        return None
    stem = StemConfig(staged(resnet["depth"], int(resnet["patch"])), 64 * int(resnet["factor"] or 1))
    return at(plain(resnet["rest"]), {"stem": stem, **options}, image)


def parse_axial(name: str, image: Image) -> ViTConfig | None:
    """`Axial-ViT-B/16`."""
    rest = name.lower().removeprefix("axial-vit-")
    return None if rest == name.lower() else at(plain(name[-len(rest) :]), NO_TOKENS | {"axial": True}, image)


def parse_kin(name: str, image: Image) -> ViTConfig | None:
    """A row of `KIN`, `DeiT-S/16-distilled`."""
    for prefix, members in KIN.items():
        row = members.get(name.removeprefix(f"{prefix}-"))
        if row is not None and name.startswith(f"{prefix}-"):
            return at(plain(name.removeprefix(f"{prefix}-").partition("-")[0]), row, image)
    return None


def parse_vit(name: str, image: Image) -> ViTConfig:
    """A row of `KIN`, `ViT-B/16`, `B/16` or `ViT-128x6/4`. Raises UsageError for any other name."""
    return parse_kin(name, image) or at(plain(name), {}, image)


def staged(depth: str, patch: int) -> tuple[int, ...]:
    """Units of each stage of a hybrid's ResNet: for tokens of 16 pixels those of stage 4 are in stage 3 (section
    4.1)."""
    first, second, third, fourth = RESNETS[depth]
    return (first, second, third + fourth) if patch == 16 else (first, second, third, fourth)


def at(config: ViTConfig, changes: dict[str, Any], image: tuple[int, ...] | None) -> ViTConfig:
    """A config with changes, at an image size if one is said."""
    patch = changes.get("patch", config.patch)
    size = image or changes.get("image") or (config.image if not changes else nearby(config.image, patch))
    return replace(config, **(changes | {"image": size}))


def plain(name: str, pixels: int | None = None) -> ViTConfig:
    """The config of a plain ViT; `pixels` that a token covers, where the name's number is not that. Raises UsageError
    for an unknown name, and a patch of less than a pixel."""
    match = _CANONICAL.fullmatch(name) or _TIMM.fullmatch(name)
    sizes = {key.lower(): key for key in SIZES if key not in ("g", "G")} | WORDS
    size = match and match["size"]
    known = size in SIZES or (size and size.lower() in sizes)
    if not match or not size or (not known and not size[0].isdigit()):
        raise UsageError(f"unknown model {name}", nearest(name, NAMES) or "`vitreous models` lists them")
    if known:
        width, depth, heads, hidden = SIZES[size if size in SIZES else sizes[size.lower()]]
    else:
        width, depth = map(int, size.split("x"))
        heads, hidden = max(1, width // 32), 4 * width
    patch = (pixels or int(match["patch"]),) * 2
    if patch[0] < 1:
        raise UsageError(f"unknown model {name}", "a patch is at least one pixel")
    image = int(match.groupdict().get("image") or 0)
    return ViTConfig(
        image=(image, image) if image else nearby((224, 224), patch),
        patch=patch,
        width=width,
        depth=depth,
        heads=heads,
        hidden=hidden,
    )


def bit_name(config: BiTConfig) -> str:
    """`BiT-R50x1`."""
    depth = next((key for key, row in RESNETS.items() if row == config.blocks), "-".join(map(str, config.blocks)))
    return f"AxialResNet-{depth}" if config.axial else f"BiT-R{depth}x{config.factor}"


def hybrid_name(config: HybridConfig) -> str:
    """`R50+ViT-B/16`, or `Conv+ViT-S/16`."""
    stem, name = config.stem, plain_name(config)
    if isinstance(stem, ConvStemConfig):
        return f"Conv{'' if stem == ConvStemConfig() else '-'.join(map(str, stem.widths))}+ViT-{name}"
    size = name.partition("/")[0]
    for hybrid, (blocks, _) in HYBRIDS.items():
        if (blocks, 64) == (stem.blocks, stem.width) and f"+ViT-{size}/" in hybrid:
            return hybrid
    depth = next((depth for depth in RESNETS if staged(depth, config.patch[0]) == stem.blocks), None)
    return f"R{depth or '-'.join(map(str, stem.blocks))}x{stem.width / 64:g}+ViT-{name}"


def axial_name(config: AxialConfig) -> str:
    """`Axial-ViT-B/16`."""
    return f"Axial-ViT-{plain_name(config)}"


def vit_name(config: ViTConfig) -> str:
    """`ViT-B/16`, `ViT-128x6/4` where no size fits, or the row of `KIN` that has what the config has."""
    shape = (config.width, config.depth, config.heads, config.hidden, config.patch)
    if defining(config) != (*shape, *USUAL):
        for prefix, members in KIN.items():
            for member in members:
                if defining(parse_vit(f"{prefix}-{member}", None)) == defining(config):
                    return f"{prefix}-{member}"
    return f"ViT-{plain_name(config)}"


def plain_name(config: ViTConfig) -> str:
    """`B/16`, or `128x6/4`."""
    shape = (config.width, config.depth, config.heads, config.hidden)
    size = next((key for key, row in SIZES.items() if row == shape), f"{config.width}x{config.depth}")
    return f"{size}/{format_size(config.patch)}"


#: what tells families apart; everything else (classes, image, resizing, regularisation) is the user's
DEFINING = ("axial", "attention", "window", "neck", "first_norm", "registers", "mlp", "layer_scale")
USUAL = (*(getattr(ViTConfig, name) for name in DEFINING), False)


def defining(config: ViTConfig) -> tuple[Any, ...]:
    """The values that tell families apart."""
    shape = (config.width, config.depth, config.heads, config.hidden, config.patch)
    return (*shape, *(getattr(config, name) for name in DEFINING), config.pool == "distilled")
