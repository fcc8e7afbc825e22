"""Sizes and names of each family: tables, and the two functions by which a name is read and written."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from vitreous.errors import UsageError, nearest
from vitreous.models.configs.adapter import AdapterConfig
from vitreous.models.configs.bit import BiTConfig
from vitreous.models.configs.detector import DetectorConfig
from vitreous.models.configs.dit import DITS
from vitreous.models.configs.hybrid import ConvStemConfig, HybridConfig, StemConfig
from vitreous.models.configs.segmenter import SegmenterConfig
from vitreous.models.configs.swin import SwinConfig
from vitreous.models.configs.video import ARRANGEMENTS
from vitreous.models.configs.vit import AxialConfig, ViTConfig
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
_VITDET: dict[str, Any] = _SAM | {"neck": 0, "position_grid": (14, 14)}
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
    | {"g/14": _DINOV2 | _GIANT, "g/14-registers": _REGISTERS | _GIANT}
    # what facebookresearch/dinov2's vitl14.yaml trains; the published L/14 is distilled and has GELU
    | {"L/14-swiglu": _DINOV2 | {"hidden": 2736, "mlp": "swiglu"}},
    "MAE": {name: {"classes": 0, "resize": "bicubic"} for name in ("B/16", "L/16", "H/14")},
    "CLIP": {name: _CLIP | {"classes": out} for name, out in {"B/32": 512, "B/16": 512, "L/14": 768}.items()},
    "SAM": {
        "B/16": _SAM | {"global_blocks": (2, 5, 8, 11)},
        "L/16": _SAM | {"global_blocks": (5, 11, 17, 23)},
        "H/16": _SAM | {"global_blocks": (7, 15, 23, 31)},
    },
    "ViTDet": {
        "B/16": _VITDET | {"global_blocks": (2, 5, 8, 11)},
        "L/16": _VITDET | {"global_blocks": (5, 11, 17, 23)},
        "H/16": _VITDET | {"global_blocks": (7, 15, 23, 31)},
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
#: arXiv:2106.14881, with the stem of ConvStemConfig where none is named
CONVS = ("Conv+ViT-128x4/8", "Conv32-128x1-256x1-256+ViT-128x4/8", "Conv+ViT-Ti/16", "Conv+ViT-S/16")
BITS = ("50x1", "50x2", "50x3", "101x1", "101x3", "152x1", "152x2", "152x4", "200x3")

#: width of the first stage, blocks and heads of all (arXiv:2103.14030, section 3.3)
SWINS = {
    "T": (96, (2, 2, 6, 2), (3, 6, 12, 24)),
    "S": (96, (2, 2, 18, 2), (3, 6, 12, 24)),
    "B": (128, (2, 2, 18, 2), (4, 8, 16, 32)),
    "L": (192, (2, 2, 18, 2), (6, 12, 24, 48)),
}
SWIN_WINDOWS = {1: 7, 2: 8}  # of names that say no other, by version
SWIN_NAMES = (
    *(f"Swin-{name}" for name in ("T/4", "S/4", "B/4", "L/4", "B/4-window12", "L/4-window12")),
    *(f"SwinV2-{size}/4{window}" for size in "TSB" for window in ("", "-window16")),
    *(f"SwinV2-{size}/4-window{window}" for size in "BL" for window in ("12", "12to16", "12to24")),
)

#: What `vitreous models` lists; other patches, `ViT-WIDTHxDEPTH/PATCH` and `Swin-WIDTHxBLOCKS-BLOCKS/PATCH` are built
#: on request.
NAMES = [
    *(f"ViT-{size}/{patch}" for size in SIZES if size not in ("mu", "e") for patch in PATCHES),
    *HYBRIDS,
    *CONVS,
    *(f"BiT-R{name}" for name in BITS),
    "AxialResNet-50",
    *SWIN_NAMES,
    *(f"DiT-{size}/{patch}" for size in DITS for patch in (2, 4, 8)),
    *(f"{family}-{name}" for family, members in KIN.items() for name in members),
    *(f"ViViT-{size}/16x2{'' if one == 'joint' else f'-{one}'}" for size in "BL" for one in ARRANGEMENTS),
    *(f"VideoMAE-{size}/16x2" for size in "SBLH"),
]

_CANONICAL = re.compile(r"(?:vit-)?(?P<size>[a-z][a-z0-9]*|\d+x\d+)/(?P<patch>\d+(?:x\d+){0,2})", re.IGNORECASE)
_TIMM = re.compile(
    r"(?:google/)?vit[-_](?P<size>[a-z]+)[-_](?:patch)?(?P<patch>\d+)(?:[-_](?P<image>\d+))?(?:[-_]in21k)?(?:\..*)?",
    re.IGNORECASE,
)
_HYBRID = re.compile(r"r(?P<depth>\d+)(?:x(?P<factor>\d+))?\+(?:vit-)?(?P<rest>\w+/(?P<patch>16|32))", re.IGNORECASE)
_CONV = re.compile(r"conv(?P<stages>\d+(?:x\d+)?(?:-\d+(?:x\d+)?)+)?\+(?:vit-)?(?P<rest>\w+/\d+)", re.IGNORECASE)
_RESNET = re.compile(r"(?:bit-)?r(?P<depth>\d+)x(?P<factor>\d+)", re.IGNORECASE)

_SWIN = re.compile(
    r"swin(?P<second>v2)?-(?P<size>[a-z]+|(?P<width>\d+)x(?P<blocks>\d+(?:-\d+)*))/(?P<patch>\d+)"
    r"(?:-window(?:(?P<from>\d+)to)?(?P<window>\d+))?",
    re.IGNORECASE,
)


def parse_bit(name: str, image: Image) -> BiTConfig | None:
    """`BiT-R50x1`, `R50x1` or `AxialResNet-50`."""
    size: Any = image or (224, 224)
    if name == "AxialResNet-50":
        return BiTConfig(image=size, axial=True)
    resnet = _RESNET.fullmatch(name)
    if resnet is None or resnet["depth"] not in RESNETS:
        return None
    return BiTConfig(image=size, blocks=RESNETS[resnet["depth"]], factor=int(resnet["factor"]))


def parse_swin(name: str, image: Image) -> SwinConfig | None:
    """`Swin-T/4`, `Swin-B/4-window12` for images of 384 pixels, `SwinV2-B/4-window12to16` with positions from windows
    of 12, or `Swin-32x2-2/2`: a width of 32 and two stages of two blocks on patches of 2, with heads of 32 channels.

    Raises UsageError for a patch or a window of 0.
    """
    match = _SWIN.fullmatch(name)
    if match is None:
        return None
    size = WORDS.get(match["size"].lower(), match["size"]).upper().replace("TI", "T")
    if match["width"]:
        width, blocks = int(match["width"]), tuple(map(int, match["blocks"].split("-")))
        heads = tuple(max(1, width // 32) * 2**stage for stage in range(len(blocks)))
    elif size in SWINS:
        width, blocks, heads = SWINS[size]
    else:
        return None
    version = 2 if match["second"] else 1
    patch, window = int(match["patch"]), int(match["window"] or SWIN_WINDOWS[version])
    if min(patch, window, int(match["from"] or 1)) < 1 or (match["from"] and version == 1):
        raise UsageError(f"unknown model {name}", "a patch is at least one pixel, a window at least one token")
    scale = patch * 2 ** (len(blocks) - 1)
    # windows divide the grids of the published models, the last of which is one window, or half of one
    side = window * scale // (1 + (version == 2 and window > SWIN_WINDOWS[2]))
    pixels: Any = image or ((side, side) if match["width"] is None else nearby((224, 224), (scale, scale)))
    trained = ()
    if match["from"]:  # at images of which the last grid was half a window
        trained = (*(int(match["from"]),) * (len(blocks) - 1), int(match["from"]) // 2)
    return SwinConfig(
        image=pixels,
        patch_size=(patch, patch),
        width=width,
        blocks=blocks,
        heads=heads,
        window=window,
        version=version,
        pretrained_window=trained,
    )


def conv_stem(stages: str | None) -> ConvStemConfig:
    """The stem of `16-32x1-64x2`, the usual one of None."""
    if stages is None:
        return ConvStemConfig()
    stages = stages.lower()
    sizes = [stage.partition("x") for stage in stages.split("-")]
    counts = [int(units or 0) for *_, units in sizes] if "x" in stages else [0] * (len(sizes) - 1) + [1]
    return ConvStemConfig(widths=tuple(int(width) for width, *_ in sizes), blocks=tuple(counts))


def conv_stem_name(stem: ConvStemConfig) -> str:
    """`16-32x1-64x2`, the shortest text that `conv_stem` reads as this stem."""
    if stem == ConvStemConfig():
        return ""
    if stem.blocks == (*(0,) * (len(stem.blocks) - 1), 1):
        return "-".join(map(str, stem.widths))
    text = "-".join(f"{w}x{n}" if n else f"{w}" for w, n in zip(stem.widths, stem.blocks, strict=True))
    return text if any(stem.blocks) else f"{text}x0"


def parse_hybrid(name: str, image: Image) -> ViTConfig | None:
    """`R50+ViT-B/16`, `R26x2+ViT-S/32`, `Conv+ViT-S/16`, or with the channels of each stage `Conv16-32-64+ViT-S/16`,
    and the residual units in it `Conv16-32x1-64x2+ViT-S/16`; without them, one in the last."""
    conv, resnet = _CONV.fullmatch(name), _HYBRID.fullmatch(name)
    if conv:
        return at(plain(conv["rest"]), {"stem": conv_stem(conv["stages"])}, image)
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
    patch = (pixels,) if pixels else tuple(map(int, match["patch"].lower().split("x")))
    patch = patch * 2 if len(patch) == 1 else patch
    if min(patch) < 1:
        raise UsageError(f"unknown model {name}", "a patch is at least one pixel")
    image = int(match.groupdict().get("image") or 0)
    return ViTConfig(
        image=(image, image) if image else nearby((224, 224) if len(patch) == 2 else (64, 64, 64), patch),
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


def swin_name(config: SwinConfig) -> str:
    """`Swin-T/4`, `Swin-B/4-window12`, or `Swin-32x2-2/2` where no size fits."""
    own = (config.width, config.blocks, config.heads)
    free = f"{config.width}x{'-'.join(map(str, config.blocks))}"
    size = next((key for key, row in SWINS.items() if row == own), free)
    trained = f"{config.pretrained_window[0]}to" if config.pretrained_window else ""
    window = "" if config.window == SWIN_WINDOWS[config.version] else f"-window{trained}{config.window}"
    return f"Swin{'V2' * (config.version == 2)}-{size}/{format_size(config.patch_size)}{window}"


def hybrid_name(config: HybridConfig) -> str:
    """`R50+ViT-B/16`, `Conv+ViT-S/16`, or `Conv16-32x1-64x2+ViT-S/16`."""
    stem, name = config.stem, plain_name(config)
    if isinstance(stem, ConvStemConfig):
        return f"Conv{conv_stem_name(stem)}+ViT-{name}"
    size = name.partition("/")[0]
    for hybrid, (blocks, _) in HYBRIDS.items():
        if (blocks, 64) == (stem.blocks, stem.width) and f"+ViT-{size}/" in hybrid:
            return hybrid
    depth = next((depth for depth in RESNETS if staged(depth, config.patch[0]) == stem.blocks), None)
    return f"R{depth or '-'.join(map(str, stem.blocks))}x{stem.width / 64:g}+ViT-{name}"


def axial_name(config: AxialConfig) -> str:
    """`Axial-ViT-B/16`."""
    return f"Axial-ViT-{plain_name(config)}"


def parse_dense(name: str, image: Image) -> None:
    """None: a backbone has a name, what is put on it has not."""


def adapter_name(config: AdapterConfig, backbone: str) -> str:
    """`ViT-S/16 with an adapter`, for the name of the ViT."""
    return f"{backbone} with an adapter"


def segmenter_name(config: SegmenterConfig, backbone: str) -> str:
    """`ViT-S/16 with a unet head`, for the name of the backbone."""
    return f"{backbone} with a {config.head} head"


def detector_name(config: DetectorConfig, backbone: str) -> str:
    """`ViT-S/16 with Mask R-CNN`, for the name of the backbone."""
    return f"{backbone} with {'Mask' if config.masks else 'Faster'} R-CNN"


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
    patch = format_size(config.patch) if len(config.patch) == 2 else "x".join(map(str, config.patch))
    return f"{size}/{patch}"


#: what tells families apart; everything else (classes, image, resizing, regularisation) is the user's
DEFINING = ("axial", "attention", "window", "neck", "first_norm", "registers", "mlp", "layer_scale")
USUAL = (*(getattr(ViTConfig, name) for name in DEFINING), False)


def defining(config: ViTConfig) -> tuple[Any, ...]:
    """The values that tell families apart."""
    shape = (config.width, config.depth, config.heads, config.hidden, config.patch)
    return (*shape, *(getattr(config, name) for name in DEFINING), config.pool == "distilled")
