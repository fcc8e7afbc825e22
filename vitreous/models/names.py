"""Configs of models by name, for all families. Does not import PyTorch, so errors in names are reported quickly."""

from __future__ import annotations

import re

from vitreous.errors import UsageError, suggest_nearest
from vitreous.models.config import ModelConfig, ViTConfig
from vitreous.models.families import FAMILIES, config_type
from vitreous.models.presets import NO_TOKENS as NO_TOKENS
from vitreous.models.presets import SIZE_WORDS
from vitreous.models.presets import VIT_SIZES as VIT_SIZES
from vitreous.nn.sizes import nearest_divisible_size

#: names listed by `vitreous models`; `config_from_name` also parses other patch sizes and names with explicit sizes,
#: `ViT-WIDTHxDEPTH/PATCH` and `Swin-WIDTHxBLOCKS-BLOCKS/PATCH`
MODEL_NAMES = [name for family in FAMILIES for name in config_type(family).preset_names]

#: patterns of other libraries' names -> canonical names; the first match is used
_SPELLINGS = [
    (re.compile(r"dinov2[-_]vit(\w)(\d+)"), r"DINOv2-\1/\2"),
    (re.compile(r"dinov2[-_]vit(\w)(\d+)_reg4?"), r"DINOv2-\1/\2-registers"),
    (re.compile(r"vit_(\w+)_patch(\d+)_reg4_dinov2.*"), r"DINOv2-\1/\2-registers"),
    (re.compile(r"vit_(\w+)_patch(\d+)_dinov2.*"), r"DINOv2-\1/\2"),
    (re.compile(r"vit_(\w+)_patch(\d+)_clip_.*"), r"CLIP-\1/\2"),
    (re.compile(r"samvit_(\w+)_patch16.*"), r"SAM-\1/16"),
    (re.compile(r"(?:facebook/)?dino[-_]vit(\w)(\d+)"), r"DINO-\1/\2"),
    (re.compile(r"(?:facebook/)?deit[-_](\w+?)[-_]distilled[-_]patch(\d+).*"), r"DeiT-\1/\2-distilled"),
    (re.compile(r"(?:facebook/)?deit[-_](tiny|small|base)[-_]patch(\d+)(?:[-_](\d+))?"), r"vit_\1_patch\2"),
    (re.compile(r"(?:deit3|deit-iii)_(\w+)_patch(\d+).*"), r"DeiT-III-\1/\2"),
    (re.compile(r"(?:facebook/)?vit-mae-(base|large)"), r"MAE-\1/16"),
    (re.compile(r"(?:facebook/)?vit-mae-huge"), "MAE-H/14"),
    (re.compile(r"(?:facebook/)?(?:vit[-_])?mae[-_](?:vit[-_])?(\w+?)(?:[-_]patch(\d+))"), r"MAE-\1/\2"),
    (re.compile(r"(?:openai/)?clip-vit-(\w+)-patch(\d+)"), r"CLIP-\1/\2"),
    (re.compile(r"(?:facebook/)?sam[-_]vit[-_](\w+)"), r"SAM-\1/16"),
    (re.compile(r"vit_tiny_r_s16_p8.*|r_ti_16|r\+ti/16"), "R+ViT-Ti/16"),
    (re.compile(r"vit_(\w+)_r(\d+)_s(\d+).*"), r"R\2+ViT-\1/\3"),
    (re.compile(r"r(\d+)(?:x1)?\+(?:vit-)?(\w+)[/_](\d+)"), r"R\1+ViT-\2/\3"),
    (re.compile(r"r(\d+)_(\w+)_(\d+)"), r"R\1+ViT-\2/\3"),
    (re.compile(r"(?:microsoft/)?swin[-_](\w+?)[-_]patch(\d+)[-_]window(\d+).*"), r"Swin-\1/\2-window\3"),
    (re.compile(r"(?:microsoft/)?swinv2[-_](\w+?)[-_](?:patch4[-_])?window(\d+(?:to\d+)?).*"), r"SwinV2-\1/4-window\2"),
    (re.compile(r"swin_([tsb])"), r"Swin-\1/4"),
    (re.compile(r"swin_v2_([tsb])"), r"SwinV2-\1/4"),
    (re.compile(r"(?:google/)?vivit-(\w)-(\d+)x(\d+).*"), r"ViViT-\1/\2x\3"),
    (re.compile(r"(?:mcg-nju/)?videomae-(small|base|large|huge).*"), r"VideoMAE-\1/16x2"),
    (re.compile(r"resnetv2_(\d+x\d+)_bit.*"), r"BiT-R\1"),
    (re.compile(r"(?:google/)?bit-(\d+)"), r"BiT-R\1x1"),
]

MAX_SMALL_IMAGE_SIDE = 64  # pixels: images with sides up to this are not enlarged by default
LARGE_IMAGE_SIZE = (224, 224)  # default input (height, width) for larger images
#: annotation type -> default input (height, width) of `train`; `classes` are class maps for segmentation
ANNOTATED_IMAGE_SIZES = {"objects": (320, 320), "classes": (256, 256)}


def config_from_name(name: str, image_size: int | tuple[int, ...] | None = None) -> ModelConfig:
    """Return the config of a model name, at `image_size` pixels.

    The default image size is the size in the name, else the multiple of the patch nearest to 224. Case is ignored.
    Accepted names are:

    - ViTs: `ViT-B/16`, `B/16`, `vit_base_patch16_224`, `vit_b_16`, `google/vit-base-patch16-224`;
    - ViTs with explicit sizes: `ViT-128x6/4` has a width of 128 and a depth of 6, with heads of 32 channels,
      `ViT-128x6/8x8x8` is for volumes;
    - other families: `R50+ViT-B/16`, `Conv+ViT-S/16`, `BiT-R50x1`, `Axial-ViT-B/16`, `DeiT-S/16-distilled`,
      `DINOv2-B/14-registers`, `CLIP-L/14`, `SAM-B/16`, `ViTDet-B/16`, `Swin-T/4`, and other libraries' names for these.

    Raises UsageError for any other name.
    """
    canonical_names = {key.lower(): key for key in reversed(MODEL_NAMES)}
    for pattern, canonical_pattern in _SPELLINGS:
        match = pattern.fullmatch(name.lower())
        if match:
            tokens = re.split(r"([/-])", match.expand(canonical_pattern))
            normalised = "".join(SIZE_WORDS.get(token.lower(), token) for token in tokens)
            name = canonical_names.get(normalised.lower(), normalised)
            break
    name = name if name in MODEL_NAMES else canonical_names.get(name.lower(), name)
    image = (image_size, image_size) if isinstance(image_size, int) else image_size and tuple(image_size)
    configs = (config_type(family).parse_name(name, image) for family in FAMILIES)
    config = next((config for config in configs if config is not None), None)
    if config is None:
        raise UsageError(
            f"unknown model {name}", suggest_nearest(name, MODEL_NAMES) or "run `vitreous models` to list the names"
        )
    return config


def vit_config_from_name(name: str, image_size: int | tuple[int, ...] | None = None) -> ViTConfig:
    """Return the config of a ViT by name, as `config_from_name` does. Raises UsageError also for names of other
    families."""
    config = config_from_name(name, image_size)
    if isinstance(config, ViTConfig):
        return config
    raise UsageError(f"{name} is not a ViT", "use a ViT; `vitreous models 'ViT-*'` lists the names")


def choose_small_model(size: tuple[int, ...]) -> str:
    """Return the default model for images of this (height, width), both at most `MAX_SMALL_IMAGE_SIDE` pixels."""
    return "ViT-64x6/2" if max(size) <= 16 else "Conv+ViT-128x4/8"


def choose_default_image_size(size: tuple[int, int], annotated: str = "") -> tuple[int, ...]:
    """Return the default --image-size (height, width) of `train` for a dataset whose first training image has `size`,
    in pixels.

    `annotated` is the annotation type, `objects` or `classes` (class maps); "" for image labels.
    """
    if annotated:
        return ANNOTATED_IMAGE_SIZES[annotated]
    if max(size) > MAX_SMALL_IMAGE_SIDE:
        return LARGE_IMAGE_SIZE
    return nearest_divisible_size(size, config_from_name(choose_small_model(size)).patch)
