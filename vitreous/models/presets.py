"""Tables of the published sizes and names of the model families, which `models.configs` uses to parse and format
names."""

from __future__ import annotations

from typing import Any

#: size name -> width, depth, heads, hidden channels of the MLP. Sources: arXiv:2010.11929, Table 1; Ti and S
#: arXiv:2012.12877; M DeiT-III; g and G arXiv:2106.04560; e arXiv:2209.06794; So400m arXiv:2305.13035; gopt
#: arXiv:2502.14786; mu is the smallest size of big_vision.
VIT_SIZES = {
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
    "gopt": (1536, 40, 16, 6144),
}
PRESET_PATCHES = (8, 14, 16, 32)  # patch sizes, in pixels, of the listed plain ViTs
#: size in names of other libraries -> size name
SIZE_WORDS = {
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

#: depth of a ResNet -> units of each stage (arXiv:1512.03385, Table 1; arXiv:1912.11370)
RESNET_BLOCKS = {
    "26": (2, 2, 2, 2),
    "50": (3, 4, 6, 3),
    "101": (3, 4, 23, 3),
    "152": (3, 8, 36, 3),
    "200": (3, 24, 36, 3),
}

#: options of a ViT without prefix tokens
NO_TOKENS: dict[str, Any] = {"pool": "mean", "class_token": False}
_DINOV2: dict[str, Any] = {
    "patch": (14, 14),
    "image": (518, 518),
    "norm.layer_scale": 1e-5,
    "classes": 0,
    "positions.resize": "bicubic-offset",
}
_REGISTERS: dict[str, Any] = _DINOV2 | {"registers": 4, "positions.resize": "bicubic-antialias"}
_CLIP: dict[str, Any] = {
    "first_norm": True,
    "norm.final": "pooled",
    "mlp.gelu": "quick",
    "norm.eps": 1e-5,
    "projection_bias": False,
    "head.bias": False,
}
_SIGLIP: dict[str, Any] = {"class_token": False, "pool": "attention", "mlp.gelu": "tanh", "classes": 0}
_SAM: dict[str, Any] = NO_TOKENS | {
    "image": (1024, 1024),
    "attention.kind": "decomposed",
    "attention.window": 14,
    "neck": 256,
    "norm.final": "none",
    "classes": 0,
    "positions.resize": "bicubic",
}
_VITDET: dict[str, Any] = _SAM | {"neck": 0, "position_grid": (14, 14)}
_GIANT = {"width": 1536, "depth": 40, "heads": 24, "mlp.hidden": 4096, "mlp.kind": "swiglu"}
_DINOV3: dict[str, Any] = {
    **{"norm.layer_scale": 1e-5, "norm.eps": 1e-5, "registers": 4, "classes": 0, "positions.kind": "none"},
    **{"attention.kind": "rotary", "attention.key_bias": False},
    **{"rotary.base": 100.0, "rotary.coordinates": "centred", "rotary.rounded": True},
}
_DINOV3_7B: dict[str, Any] = _DINOV3 | {
    **{"like": "B/16", "width": 4096, "depth": 40, "heads": 32, "mlp.hidden": 8192, "mlp.kind": "swiglu"},
    **{"attention.qkv_bias": False, "attention.key_bias": True},
}
_EVA02: dict[str, Any] = {
    **{"patch": (14, 14), "mlp.kind": "swiglu", "pool": "mean", "norm.final": "pooled", "classes": 0},
    **{"attention.kind": "rotary", "attention.key_bias": False, "rotary.coordinates": "reference"},
}
_EVA02_CLIP: dict[str, Any] = _EVA02 | {
    **{"attention.inner_norm": True, "mlp.norm": True, "pool": "class", "norm.final": "tokens"}
}
_PE: dict[str, Any] = {
    **{"first_norm": True, "projection_bias": False, "norm.eps": 1e-5, "attention.kind": "rotary", "rotary.offset": 1},
    **{"pool": "attention", "head.pool_heads": 8, "head.bias": False, "positions.resize": "bilinear"},
}
_PE_G: dict[str, Any] = _PE | {
    **{"like": "B/14", "width": 1536, "depth": 50, "mlp.hidden": 8960, "head.pool_hidden": 6144, "heads": 16},
    **{"class_token": False, "rotary.offset": 0, "image": (448, 448), "classes": 1280},
}
_PE_SPATIAL: dict[str, Any] = _PE | {
    **{"pool": "mean", "norm.final": "none", "head.pool_heads": 0, "head.bias": True, "classes": 0}
}
_AIMV2: dict[str, Any] = NO_TOKENS | {
    **{"like": "B/14", "norm.kind": "rms", "norm.eps": 1e-5, "norm.patches": True, "mlp.kind": "swiglu", "classes": 0},
    **{"attention.qkv_bias": False, "attention.out_bias": False, "mlp.bias": False},
}
_VIT5: dict[str, Any] = {
    **{"norm.kind": "rms", "norm.layer_scale": 1e-4, "registers": 4, "positions.slots": 0},
    **{"attention.kind": "rotary", "attention.qkv_bias": False, "attention.qk_norm": True},
    **{"rotary.coordinates": "reference", "rotary.reference": 14, "rotary.register_base": 100.0},
    **{"regularization.drop_path_rises": False},
}
_DEIT: dict[str, Any] = {"pool": "distilled", "positions.slots": 2, "positions.resize": "bicubic"}
_DEIT3: dict[str, Any] = {"positions.slots": 0, "norm.layer_scale": 1e-4, "positions.resize": "bicubic"}
#: variants of a plain ViT: name prefix -> size and patch -> options that differ from the plain ViT of that size
VIT_VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "DeiT": {f"{size}/16-distilled": _DEIT for size in ("Ti", "S", "B")},
    "DeiT-III": dict.fromkeys(("S/16", "M/16", "B/16", "L/16", "H/14"), _DEIT3),
    "DINO": {name: {"classes": 0, "positions.resize": "bicubic-offset"} for name in ("S/16", "S/8", "B/16", "B/8")},
    "DINOv2": dict.fromkeys(("S/14", "B/14", "L/14"), _DINOV2)
    | {f"{name}-registers": _REGISTERS for name in ("S/14", "B/14", "L/14")}
    | {"g/14": _DINOV2 | _GIANT, "g/14-registers": _REGISTERS | _GIANT}
    # as trained by facebookresearch/dinov2's vitl14.yaml; the published L/14 is distilled and has GELU
    | {"L/14-swiglu": _DINOV2 | {"mlp.hidden": 2736, "mlp.kind": "swiglu"}},
    "DINOv3": dict.fromkeys(("S/16", "B/16", "L/16"), _DINOV3)
    | {
        "S+/16": _DINOV3 | {"like": "S/16", "mlp.kind": "swiglu"},
        "H+/16": _DINOV3 | {"like": "H/16", "heads": 20, "mlp.kind": "swiglu"},
        "7B/16": _DINOV3_7B,
    },
    # the register is a second class token (arXiv:2604.12012)
    "TIPSv2": dict.fromkeys(("B/14", "L/14", "So400m/14"), _REGISTERS | {"registers": 1, "image": (448, 448)}),
    # widths of the gated MLP are 8/3 of the width (arXiv:2303.11331, Table 11)
    "EVA02": {
        "Ti/14": _EVA02 | {"mlp.hidden": 512},
        "S/14": _EVA02 | {"mlp.hidden": 1024},
        "B/14": _EVA02 | {"mlp.hidden": 2048, "mlp.norm": True},
        "L/14": _EVA02 | {"mlp.hidden": 2730, "mlp.norm": True},
    },
    "EVA02-CLIP": {
        "B/16": _EVA02_CLIP | {"patch": (16, 16), "mlp.hidden": 2048, "classes": 512},
        "L/14": _EVA02_CLIP | {"mlp.hidden": 2730, "classes": 768},
    },
    "PE-Core": {
        "Ti/16": _PE | {"image": (384, 384), "classes": 512},
        "S/16": _PE | {"image": (384, 384), "classes": 512},
        "B/16": _PE | {"classes": 1024},
        "L/14": _PE | {"image": (336, 336), "classes": 1024},
        "G/14": _PE_G,
    },
    "PE-Spatial": {"B/16": _PE_SPATIAL | {"image": (512, 512)}, "L/14": _PE_SPATIAL | {"image": (448, 448)}},
    "AIMv2": {
        "L/14": _AIMV2 | {"width": 1024, "depth": 24, "heads": 8, "mlp.hidden": 2816},
        "H/14": _AIMV2 | {"width": 1536, "depth": 24, "heads": 12, "mlp.hidden": 4096},
        "1B/14": _AIMV2 | {"width": 2048, "depth": 24, "heads": 16, "mlp.hidden": 5632},
        "3B/14": _AIMV2 | {"width": 3072, "depth": 24, "heads": 24, "mlp.hidden": 8192},
    },
    "ViT-5": dict.fromkeys(("S/16", "B/16", "L/16"), _VIT5),
    "MAE": {name: {"classes": 0, "positions.resize": "bicubic"} for name in ("B/16", "L/16", "H/14")},
    "CLIP": {name: _CLIP | {"classes": out} for name, out in {"B/32": 512, "B/16": 512, "L/14": 768}.items()},
    "SigLIP": {
        name: _SIGLIP | {"image": (size, size)}
        for name, size in {
            "B/16": 224,
            "B/32": 256,
            "L/16": 256,
            "So400m/14": 378,  # of images of 384 pixels, 27 x 27 whole patches are used
            "So400m/16": 256,
            "gopt/16": 256,
        }.items()
    },
    "SAM": {
        "B/16": _SAM | {"attention.global_blocks": (2, 5, 8, 11)},
        "L/16": _SAM | {"attention.global_blocks": (5, 11, 17, 23)},
        "H/16": _SAM | {"attention.global_blocks": (7, 15, 23, 31)},
    },
    "ViTDet": {
        "B/16": _VITDET | {"attention.global_blocks": (2, 5, 8, 11)},
        "L/16": _VITDET | {"attention.global_blocks": (5, 11, 17, 23)},
        "H/16": _VITDET | {"attention.global_blocks": (7, 15, 23, 31)},
    },
    "Axial-ViT": {name: NO_TOKENS | {"axial": True} for name in ("B/16", "B/32")},
}
#: size of CLIP -> width of its text encoder, and channels of the embedding (arXiv:2103.00020, Table 20)
TEXT_SIZES = {"B": (512, 512), "L": (768, 768)}
#: size of PE-Core -> width, depth and positions of its text encoder (perception_models' core/vision_encoder/config.py)
PE_TEXT_SIZES = {
    **dict.fromkeys(("Ti", "S"), (512, 12, 32)),
    **dict.fromkeys(("B", "L"), (1024, 24, 32)),
    "G": (1280, 24, 72),
}
#: image encoders with their text encoders
IMAGE_TEXT_NAMES = (
    *(f"CLIP-{name}-text" for name in VIT_VARIANTS["CLIP"]),
    *(f"SigLIP-{name}-text" for name in ("B/16", "L/16", "So400m/14")),
    *(f"SigLIP2-{name}-text" for name in VIT_VARIANTS["SigLIP"]),
    *(f"EVA02-CLIP-{name}-text" for name in VIT_VARIANTS["EVA02-CLIP"]),
    *(f"PE-Core-{name}-text" for name in VIT_VARIANTS["PE-Core"]),
)
#: hybrid name -> units of the stem's stages, and the pixels per token if they differ from the number in the name
#: (arXiv:2010.11929, Table 6; AugReg)
HYBRID_PRESETS: dict[str, tuple[tuple[int, ...], int | None]] = {
    "R+ViT-Ti/16": ((), 32),  # despite its name, 32 pixels per token: patches of 8 on a map of stride 4
    "R26+ViT-S/32": ((2, 2, 2, 2), None),
    "R26+ViT-B/32": ((2, 2, 2, 2), None),
    "R50+ViT-B/16": ((3, 4, 9), None),
    "R50+ViT-B/32": ((3, 4, 6, 3), None),
    "R50+ViT-L/16": ((3, 4, 9), None),
    "R50+ViT-L/32": ((3, 4, 6, 3), None),
}
#: ViTs with a convolutional stem (arXiv:2106.14881); `Conv` without numbers is the default ConvStemConfig
CONV_HYBRID_NAMES = ("Conv+ViT-128x4/8", "Conv32-128x1-256x1-256+ViT-128x4/8", "Conv+ViT-Ti/16", "Conv+ViT-S/16")
BIT_NAMES = ("50x1", "50x2", "50x3", "101x1", "101x3", "152x1", "152x2", "152x4", "200x3")

#: size name -> width of the first stage, blocks of each stage, heads of each stage (arXiv:2103.14030, section 3.3)
SWIN_SIZES = {
    "T": (96, (2, 2, 6, 2), (3, 6, 12, 24)),
    "S": (96, (2, 2, 18, 2), (3, 6, 12, 24)),
    "B": (128, (2, 2, 18, 2), (4, 8, 16, 32)),
    "L": (192, (2, 2, 18, 2), (6, 12, 24, 48)),
}
SWIN_WINDOWS = {1: 7, 2: 8}  # version of Swin -> default length of a window, in tokens
SWIN_NAMES = (
    *(f"Swin-{name}" for name in ("T/4", "S/4", "B/4", "L/4", "B/4-window12", "L/4-window12")),
    *(f"SwinV2-{size}/4{window}" for size in "TSB" for window in ("", "-window16")),
    *(f"SwinV2-{size}/4-window{window}" for size in "BL" for window in ("12", "12to16", "12to24")),
)
