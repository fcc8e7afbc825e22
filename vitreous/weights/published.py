"""Weights published by their authors, by a short name: address, licence, and published accuracy.

A name such as `dinov2-s14` can be used wherever weights are given. Every address, digest and accuracy comes from the
authors' pages (`reference`), or from timm 1.0's table of models if noted. Unpublished values are empty. Does not import
PyTorch.
"""

from __future__ import annotations

import os
from fnmatch import fnmatchcase

from vitreous.errors import UsageError, find_closest_match
from vitreous.weights.published_encoders import ENCODERS
from vitreous.weights.published_entry import (
    FINE_TUNED_KINETICS_METRIC,
    FINE_TUNED_METRIC,
    LINEAR_PROBE_METRIC,
    TOP1_METRIC,
    PublishedWeights,
)

META_URL = "https://dl.fbaipublicfiles.com"
GOOGLE_URL = "https://storage.googleapis.com"
MICROSOFT_URL = "https://github.com/SwinTransformer/storage/releases/download"
AUGREG_FINE_TUNING = "imagenet2012-steps_20k"
EVAL_CROP = 0.875  # crop size relative to the short side of the image, in evaluations at 224 of 256 pixels


def augreg_weights(
    name: str, model: str, file: str, accuracy: float | None, size: int = 224, reference: str = ""
) -> PublishedWeights:
    """Build the entry of AugReg weights (arXiv:2106.10270); those that were not fine-tuned have 21,843 classes."""
    source = f"{GOOGLE_URL}/vit_models/augreg/{file}.npz"
    reference = reference or "README of google-research/vision_transformer"
    return PublishedWeights(
        name, model, source=source, image_size=size, licence="Apache-2.0", reference=reference, accuracy=accuracy
    )


def deit_weights(name: str, model: str, file: str, accuracy: float, size: int = 224) -> PublishedWeights:
    """Build the entry of DeiT weights (arXiv:2012.12877). File names end in the first 8 digits of their SHA-256, as in
    PyTorch's hub."""
    fields = {"digest": f"sha256:{file[-8:]}", "resize": "bicubic", "share": EVAL_CROP}
    reference = "README_deit.md of facebookresearch/deit"
    return PublishedWeights(
        name,
        model,
        source=f"{META_URL}/deit/{file}.pth",
        image_size=size,
        licence="Apache-2.0",
        reference=reference,
        accuracy=accuracy,
        accuracy_note=TOP1_METRIC,
        **fields,
    )


def deit3_weights(name: str, model: str, file: str, accuracy: float, size: int = 224) -> PublishedWeights:
    """Build the entry of DeiT III weights (arXiv:2204.07118)."""
    source, reference = f"{META_URL}/deit/deit_3_{file}.pth", "README_revenge.md of facebookresearch/deit"
    return PublishedWeights(
        name,
        model,
        source=source,
        image_size=size,
        licence="Apache-2.0",
        reference=reference,
        accuracy=accuracy,
        resize="bicubic",
    )


def vit5_weights(name: str, model: str, file: str, accuracy: float, size: int = 224) -> PublishedWeights:
    """Build the entry of ViT-5 weights (arXiv:2602.08071)."""
    return PublishedWeights(
        name,
        model,
        source=f"https://huggingface.co/FengWang3211/ViT-5/resolve/main/vit5_{file}_patch16_{size}.pth",
        image_size=size,
        licence="Apache-2.0",
        reference="README of wangf3014/ViT-5",
        accuracy=accuracy,
        resize="bicubic",
    )


def dino_weights(name: str, model: str, file: str, accuracy: float) -> PublishedWeights:
    """Build the entry of DINO weights (arXiv:2104.14294)."""
    source, reference = f"{META_URL}/dino/{file}_pretrain/{file}_pretrain.pth", "README of facebookresearch/dino"
    fields = {"resize": "bicubic-offset", "share": EVAL_CROP}
    return PublishedWeights(
        name,
        model,
        source=source,
        image_size=224,
        licence="Apache-2.0",
        reference=reference,
        accuracy=accuracy,
        accuracy_note=LINEAR_PROBE_METRIC,
        **fields,
    )


def dinov2_weights(name: str, model: str, file: str, accuracy: float) -> PublishedWeights:
    """Build the entry of DINOv2 weights (arXiv:2304.07193, with registers arXiv:2309.16588)."""
    source, reference = f"{META_URL}/dinov2/{file[:13]}/{file}_pretrain.pth", "README of facebookresearch/dinov2"
    resize = "bicubic-antialias" if file.endswith("reg4") else "bicubic-offset"
    return PublishedWeights(
        name,
        model,
        source=source,
        image_size=518,
        licence="Apache-2.0",
        reference=reference,
        accuracy=accuracy,
        accuracy_note=LINEAR_PROBE_METRIC,
        resize=resize,
    )


def mae_weights(name: str, model: str, file: str, accuracy: float, md5: str) -> PublishedWeights:
    """Build the entry of MAE weights (arXiv:2111.06377)."""
    source, reference = f"{META_URL}/mae/pretrain/mae_pretrain_vit_{file}.pth", "README of facebookresearch/mae"
    fields = {"digest": f"md5:{md5}", "resize": "bicubic", "share": EVAL_CROP}
    return PublishedWeights(
        name,
        model,
        source=source,
        image_size=224,
        licence="CC-BY-NC-4.0",
        reference=reference,
        accuracy=accuracy,
        accuracy_note=FINE_TUNED_METRIC,
        **fields,
    )


def sam_weights(name: str, model: str, file: str, md5: str) -> PublishedWeights:
    """Build the entry of SAM weights (arXiv:2304.02643). File names end in the first digits of their MD5, which is
    published in full elsewhere."""
    source, reference = f"{META_URL}/segment_anything/sam_vit_{file}.pth", "README of facebookresearch/segment-anything"
    return PublishedWeights(
        name, model, source=source, image_size=1024, licence="Apache-2.0", reference=reference, digest=f"md5:{md5}"
    )


def swin_weights(name: str, model: str, file: str, accuracy: float | None, size: int = 224) -> PublishedWeights:
    """Build the entry of Swin weights (arXiv:2103.14030) or Swin V2 weights (arXiv:2111.09883)."""
    source, reference = f"{MICROSOFT_URL}/{file}.pth", "MODELHUB.md of microsoft/Swin-Transformer"
    return PublishedWeights(
        name,
        model,
        source=source,
        image_size=size,
        licence="MIT",
        reference=reference,
        accuracy=accuracy,
        share=EVAL_CROP,
    )


def bit_weights(
    name: str, model: str, file: str, accuracy: float | None, size: int, reference: str
) -> PublishedWeights:
    """Build the entry of BiT weights (arXiv:1912.11370)."""
    return PublishedWeights(
        name,
        model,
        source=f"{GOOGLE_URL}/bit_models/{file}.npz",
        image_size=size,
        licence="Apache-2.0",
        reference=reference,
        accuracy=accuracy,
    )


BIT_PAGE = "README of google-research/big_transfer"
TIMM_PAGE = "timm 1.0, results-imagenet.csv"
PUBLISHED_WEIGHTS = (
    augreg_weights("vit-ti16-augreg", "ViT-Ti/16", "Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0", None),
    augreg_weights("vit-s32-augreg", "ViT-S/32", "S_32-i21k-300ep-lr_0.001-aug_none-wd_0.1-do_0.0-sd_0.0", None),
    augreg_weights("vit-s16-augreg", "ViT-S/16", "S_16-i21k-300ep-lr_0.001-aug_light1-wd_0.03-do_0.0-sd_0.0", None),
    augreg_weights("vit-b32-augreg", "ViT-B/32", "B_32-i21k-300ep-lr_0.001-aug_light1-wd_0.1-do_0.0-sd_0.0", None),
    augreg_weights("vit-b16-augreg", "ViT-B/16", "B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0", None),
    augreg_weights(
        "vit-b8-augreg",
        "ViT-B/8",
        file="B_8-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0",
        accuracy=None,
        size=224,
        reference="timm 1.0",
    ),
    augreg_weights("vit-l16-augreg", "ViT-L/16", "L_16-i21k-300ep-lr_0.001-aug_strong1-wd_0.1-do_0.0-sd_0.0", None),
    augreg_weights(
        "r26-s32-augreg", "R26+ViT-S/32", "R26_S_32-i21k-300ep-lr_0.001-aug_light1-wd_0.1-do_0.0-sd_0.0", None
    ),
    augreg_weights(
        "r50-l32-augreg", "R50+ViT-L/32", "R50_L_32-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.1-sd_0.1", None
    ),
    augreg_weights(
        "vit-ti16-augreg-in1k-384",
        "ViT-Ti/16",
        f"Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0--{AUGREG_FINE_TUNING}-lr_0.03-res_384",
        0.7822,
        384,
    ),
    augreg_weights(
        "vit-s32-augreg-in1k-384",
        "ViT-S/32",
        f"S_32-i21k-300ep-lr_0.001-aug_none-wd_0.1-do_0.0-sd_0.0--{AUGREG_FINE_TUNING}-lr_0.01-res_384",
        0.7958,
        384,
    ),
    augreg_weights(
        "vit-s16-augreg-in1k-384",
        "ViT-S/16",
        f"S_16-i21k-300ep-lr_0.001-aug_light1-wd_0.03-do_0.0-sd_0.0--{AUGREG_FINE_TUNING}-lr_0.03-res_384",
        0.8373,
        384,
    ),
    augreg_weights(
        "vit-b32-augreg-in1k-384",
        "ViT-B/32",
        f"B_32-i21k-300ep-lr_0.001-aug_light1-wd_0.1-do_0.0-sd_0.0--{AUGREG_FINE_TUNING}-lr_0.01-res_384",
        0.8359,
        384,
    ),
    augreg_weights(
        "vit-b16-augreg-in1k",
        "ViT-B/16",
        f"B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0--{AUGREG_FINE_TUNING}-lr_0.01-res_224",
        0.84532,
        reference=TIMM_PAGE,
    ),
    augreg_weights(
        "vit-b16-augreg-in1k-384",
        "ViT-B/16",
        f"B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0--{AUGREG_FINE_TUNING}-lr_0.03-res_384",
        0.8549,
        384,
    ),
    augreg_weights(
        "vit-b8-augreg-in1k",
        "ViT-B/8",
        f"B_8-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0--{AUGREG_FINE_TUNING}-lr_0.01-res_224",
        0.85798,
        reference=TIMM_PAGE,
    ),
    augreg_weights(
        "vit-l16-augreg-in1k",
        "ViT-L/16",
        f"L_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.1-sd_0.1--{AUGREG_FINE_TUNING}-lr_0.01-res_224",
        0.85834,
        reference=TIMM_PAGE,
    ),
    augreg_weights(
        "vit-l16-augreg-in1k-384",
        "ViT-L/16",
        f"L_16-i21k-300ep-lr_0.001-aug_strong1-wd_0.1-do_0.0-sd_0.0--{AUGREG_FINE_TUNING}-lr_0.01-res_384",
        0.8559,
        384,
    ),
    augreg_weights(
        "r26-s32-augreg-in1k-384",
        "R26+ViT-S/32",
        f"R26_S_32-i21k-300ep-lr_0.001-aug_light1-wd_0.1-do_0.0-sd_0.0--{AUGREG_FINE_TUNING}-lr_0.01-res_384",
        0.8385,
        384,
    ),
    augreg_weights(
        "r50-l32-augreg-in1k-384",
        "R50+ViT-L/32",
        f"R50_L_32-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.1-sd_0.1--{AUGREG_FINE_TUNING}-lr_0.01-res_384",
        0.8599,
        384,
    ),
    PublishedWeights(
        "vit-h14-in21k",
        "ViT-H/14",
        source=f"{GOOGLE_URL}/vit_models/imagenet21k/ViT-H_14.npz",
        image_size=224,
        licence="Apache-2.0",
        reference="README of google-research/vision_transformer",
    ),
    deit_weights("deit-ti16", "ViT-Ti/16", "deit_tiny_patch16_224-a1311bcf", 0.722),
    deit_weights("deit-s16", "ViT-S/16", "deit_small_patch16_224-cd65a155", 0.799),
    deit_weights("deit-b16", "ViT-B/16", "deit_base_patch16_224-b5f2ef4d", 0.818),
    deit_weights("deit-b16-384", "ViT-B/16", "deit_base_patch16_384-8de9b5d1", 0.829, 384),
    deit_weights("deit-ti16-distilled", "DeiT-Ti/16-distilled", "deit_tiny_distilled_patch16_224-b40b3cf7", 0.745),
    deit_weights("deit-s16-distilled", "DeiT-S/16-distilled", "deit_small_distilled_patch16_224-649709d9", 0.812),
    deit_weights("deit-b16-distilled", "DeiT-B/16-distilled", "deit_base_distilled_patch16_224-df68dfff", 0.834),
    deit_weights(
        "deit-b16-distilled-384", "DeiT-B/16-distilled", "deit_base_distilled_patch16_384-d0272ac0", 0.852, 384
    ),
    deit3_weights("deit3-s16", "DeiT-III-S/16", "small_224_1k", 0.814),
    deit3_weights("deit3-s16-384", "DeiT-III-S/16", "small_384_1k", 0.834, 384),
    deit3_weights("deit3-b16", "DeiT-III-B/16", "base_224_1k", 0.838),
    deit3_weights("deit3-b16-384", "DeiT-III-B/16", "base_384_1k", 0.850, 384),
    deit3_weights("deit3-l16", "DeiT-III-L/16", "large_224_1k", 0.849),
    deit3_weights("deit3-l16-384", "DeiT-III-L/16", "large_384_1k", 0.858, 384),
    deit3_weights("deit3-h14", "DeiT-III-H/14", "huge_224_1k", 0.852),
    deit3_weights("deit3-s16-in21k", "DeiT-III-S/16", "small_224_21k", 0.831),
    deit3_weights("deit3-s16-in21k-384", "DeiT-III-S/16", "small_384_21k", 0.848, 384),
    deit3_weights("deit3-b16-in21k", "DeiT-III-B/16", "base_224_21k", 0.857),
    deit3_weights("deit3-b16-in21k-384", "DeiT-III-B/16", "base_384_21k", 0.867, 384),
    deit3_weights("deit3-l16-in21k", "DeiT-III-L/16", "large_224_21k", 0.870),
    deit3_weights("deit3-l16-in21k-384", "DeiT-III-L/16", "large_384_21k", 0.877, 384),
    deit3_weights("deit3-h14-in21k", "DeiT-III-H/14", "huge_224_21k_v1", 0.872),
    vit5_weights("vit5-s16", "ViT-5-S/16", "small", 0.822),
    vit5_weights("vit5-b16", "ViT-5-B/16", "base", 0.842),
    vit5_weights("vit5-b16-384", "ViT-5-B/16", "base", 0.854, 384),
    vit5_weights("vit5-l16", "ViT-5-L/16", "large", 0.849),
    vit5_weights("vit5-l16-384", "ViT-5-L/16", "large", 0.860, 384),
    dino_weights("dino-s16", "DINO-S/16", "dino_deitsmall16", 0.770),
    dino_weights("dino-s8", "DINO-S/8", "dino_deitsmall8", 0.797),
    dino_weights("dino-b16", "DINO-B/16", "dino_vitbase16", 0.782),
    dino_weights("dino-b8", "DINO-B/8", "dino_vitbase8", 0.801),
    dinov2_weights("dinov2-s14", "DINOv2-S/14", "dinov2_vits14", 0.811),
    dinov2_weights("dinov2-b14", "DINOv2-B/14", "dinov2_vitb14", 0.845),
    dinov2_weights("dinov2-l14", "DINOv2-L/14", "dinov2_vitl14", 0.863),
    dinov2_weights("dinov2-g14", "DINOv2-g/14", "dinov2_vitg14", 0.865),
    dinov2_weights("dinov2-s14-registers", "DINOv2-S/14-registers", "dinov2_vits14_reg4", 0.809),
    dinov2_weights("dinov2-b14-registers", "DINOv2-B/14-registers", "dinov2_vitb14_reg4", 0.846),
    dinov2_weights("dinov2-l14-registers", "DINOv2-L/14-registers", "dinov2_vitl14_reg4", 0.867),
    dinov2_weights("dinov2-g14-registers", "DINOv2-g/14-registers", "dinov2_vitg14_reg4", 0.871),
    mae_weights("mae-b16", "MAE-B/16", "base", 0.836, "8cad7c"),
    mae_weights("mae-l16", "MAE-L/16", "large", 0.859, "b8b06e"),
    mae_weights("mae-h14", "MAE-H/14", "huge", 0.869, "9bdbb0"),
    sam_weights("sam-b16", "SAM-B/16", "b_01ec64", "01ec64d29a2fca3f0661936605ae66f8"),
    sam_weights("sam-l16", "SAM-L/16", "l_0b3195", "0b3195507c641ddb6910d2bb5adee89c"),
    sam_weights("sam-h16", "SAM-H/16", "h_4b8939", "4b8939a88964f0f4ff5f5b2642c598a6"),
    swin_weights("swin-t4", "Swin-T/4", "v1.0.0/swin_tiny_patch4_window7_224", 0.812),
    swin_weights("swin-s4", "Swin-S/4", "v1.0.0/swin_small_patch4_window7_224", 0.832),
    swin_weights("swin-b4", "Swin-B/4", "v1.0.0/swin_base_patch4_window7_224", 0.835),
    swin_weights("swin-b4-384", "Swin-B/4-window12", "v1.0.0/swin_base_patch4_window12_384", 0.845, 384),
    swin_weights("swin-b4-in22k", "Swin-B/4", "v1.0.0/swin_base_patch4_window7_224_22k", None),
    swin_weights("swin-b4-in22k-in1k", "Swin-B/4", "v1.0.0/swin_base_patch4_window7_224_22kto1k", 0.852),
    swin_weights(
        "swin-b4-in22k-in1k-384", "Swin-B/4-window12", "v1.0.0/swin_base_patch4_window12_384_22kto1k", 0.864, 384
    ),
    swin_weights("swin-l4-in22k", "Swin-L/4", "v1.0.0/swin_large_patch4_window7_224_22k", None),
    swin_weights("swin-l4-in22k-in1k", "Swin-L/4", "v1.0.0/swin_large_patch4_window7_224_22kto1k", 0.863),
    swin_weights(
        "swin-l4-in22k-in1k-384", "Swin-L/4-window12", "v1.0.0/swin_large_patch4_window12_384_22kto1k", 0.873, 384
    ),
    swin_weights("swinv2-t4", "SwinV2-T/4", "v2.0.0/swinv2_tiny_patch4_window8_256", 0.818, 256),
    swin_weights("swinv2-t4-window16", "SwinV2-T/4-window16", "v2.0.0/swinv2_tiny_patch4_window16_256", 0.828, 256),
    swin_weights("swinv2-s4", "SwinV2-S/4", "v2.0.0/swinv2_small_patch4_window8_256", 0.837, 256),
    swin_weights("swinv2-s4-window16", "SwinV2-S/4-window16", "v2.0.0/swinv2_small_patch4_window16_256", 0.841, 256),
    swin_weights("swinv2-b4", "SwinV2-B/4", "v2.0.0/swinv2_base_patch4_window8_256", 0.842, 256),
    swin_weights("swinv2-b4-window16", "SwinV2-B/4-window16", "v2.0.0/swinv2_base_patch4_window16_256", 0.846, 256),
    bit_weights("bit-m-r50x1", "BiT-R50x1", file="BiT-M-R50x1", accuracy=None, size=224, reference=BIT_PAGE),
    bit_weights("bit-m-r101x1", "BiT-R101x1", file="BiT-M-R101x1", accuracy=None, size=224, reference=BIT_PAGE),
    bit_weights(
        "bit-m-r152x4-in1k",
        "BiT-R152x4",
        file="BiT-M-R152x4-ILSVRC2012",
        accuracy=0.84916,
        size=480,
        reference=TIMM_PAGE,
    ),
    bit_weights(
        "bit-r50x1-distilled", "BiT-R50x1", file="distill/R50x1_224", accuracy=0.828, size=224, reference=BIT_PAGE
    ),
    PublishedWeights(
        "videomae-b16",
        "VideoMAE-B/16x2",
        source="hf:MCG-NJU/videomae-base",
        image_size=224,
        licence="CC-BY-NC-4.0",
        reference="MODEL_ZOO.md of MCG-NJU/VideoMAE",
        accuracy=0.809,
        accuracy_note=FINE_TUNED_KINETICS_METRIC,
    ),
    *ENCODERS,
)
PUBLISHED_BY_NAME = {published.name: published for published in PUBLISHED_WEIGHTS}


def find_published_weights(source: str | os.PathLike[str]) -> PublishedWeights | None:
    """Return the published weights named `source`, in any case; None for an existing path or any other source."""
    published = PUBLISHED_BY_NAME.get(os.fspath(source).lower())
    return None if published is None or os.path.lexists(source) else published


def find_published_name(model: str) -> str:
    """Return the name of the first published weights of a model, such as `vit-s16-augreg`; "" if there are none."""
    return next((published.name for published in PUBLISHED_WEIGHTS if published.model == model), "")


def nearest_published_name(name: str) -> str:
    """Return the name of published weights most similar to `name`, or "" if none is similar."""
    return find_closest_match(name.lower(), PUBLISHED_BY_NAME)


def select_published_weights(pattern: str) -> list[PublishedWeights]:
    """Return the published weights whose name, or whose model's name, matches a pattern with * and ?, in any case.
    Raises UsageError if none matches."""
    pattern = pattern.lower()
    matches = [
        entry
        for entry in PUBLISHED_WEIGHTS
        if fnmatchcase(entry.name, pattern) or fnmatchcase(entry.model.lower(), pattern)
    ]
    if not matches:
        nearest = nearest_published_name(pattern)
        hint = f"did you mean {nearest}?" if nearest else "list them: vitreous models --weights"
        raise UsageError(f"no published weights match {pattern}", hint)
    return matches
