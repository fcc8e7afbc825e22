"""Preprocessing of foreign weights: from preprocessor_config.json or timm's config.json, else that of the format's
authors."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from vitreous.data.modalities.base import HALF_MOMENTS, IMAGENET_MOMENTS, Preprocess
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.data.modalities.native import NativePreprocess
from vitreous.errors import VitreousError, WeightsError
from vitreous.models.config import ModelConfig
from vitreous.models.configs.base import PixelScaling
from vitreous.weights.sidecar import get_nested_dict, read_json_object, require_config_integer
from vitreous.weights.table import WeightsFormat

#: mean and standard deviation of each channel
PIXEL_STATISTICS: dict[PixelScaling, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "unit": ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
    "half": HALF_MOMENTS,
    "imagenet": IMAGENET_MOMENTS,
    "clip": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
}
#: format -> pixel statistics of its authors' training, unless specified
FORMAT_PIXEL_STATISTICS: dict[str, PixelScaling] = {
    "timm": "imagenet",
    "dinov2": "imagenet",
    "dinov3": "imagenet",
    "torchvision": "imagenet",
    "sam": "imagenet",
    "vitdet": "imagenet",
    "videomae": "imagenet",
    "clip": "clip",
}
MIN_CONVNEXT_SQUASH = 384  # pixels: image size from which transformers' ConvNeXt squashes images
# PIL's numbers, in transformers' files
RESAMPLE_FILTERS: dict[Any, Literal["bilinear", "bicubic"]] = {
    "bilinear": "bilinear",
    "bicubic": "bicubic",
    2: "bilinear",
    3: "bicubic",
}


def load_preprocessing(
    weights_format: WeightsFormat, config: ModelConfig, folder: Path | None, settings: dict[str, Any]
) -> Preprocess:
    """Load the preprocessing from preprocessor_config.json or timm's config.json, else use the default of the format's
    authors. Raises WeightsError for invalid values."""
    processor = read_json_object(folder / "preprocessor_config.json") if folder else {}
    pixels = weights_format.get_pixel_scaling(config) or FORMAT_PIXEL_STATISTICS.get(weights_format.name)
    return parse_preprocessing(
        weights_format.title, config, processor, settings, pixels=pixels, is_npz=weights_format.suffix == ".npz"
    )


def parse_preprocessing(
    title: str,
    config: ModelConfig,
    processor: dict[str, Any],
    settings: dict[str, Any],
    *,
    pixels: PixelScaling | None = None,
    is_npz: bool = False,
) -> Preprocess:
    """Parse the preprocessing of a model, `title` in messages, from `processor` (preprocessor_config.json) and
    `settings` (config.json). `pixels`: default statistics (None: those of the config). `is_npz`: whether the weights
    are a Google file. Raises WeightsError for invalid values."""
    try:
        return build_preprocessing(config, processor, settings, pixels, is_npz)
    except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError, VitreousError) as error:
        raise WeightsError(
            f"the preprocessing of {title} is invalid ({str(error)[:100]})", "download it again"
        ) from None


def build_preprocessing(
    config: ModelConfig, processor: dict[str, Any], settings: dict[str, Any], pixels: PixelScaling | None, is_npz: bool
) -> Preprocess:
    """Build the preprocessing as `parse_preprocessing` does. Raises ValueError and other errors for invalid values."""
    default_preprocess = config.default_preprocess()
    mean, std = PIXEL_STATISTICS[pixels or default_preprocess.pixels]
    timm_config = get_nested_dict(settings, "pretrained_cfg")
    mean, std = (
        tuple(map(float, processor.get(f"image_{statistic}") or timm_config.get(statistic) or default))
        for statistic, default in (("mean", mean), ("std", std))
    )
    crop, size = processor.get("crop_size"), processor.get("size")
    # transformers' ConvNeXt crops small images and squashes large ones
    is_large_convnext = (
        "crop_pct" in processor and isinstance(size, dict) and (size.get("shortest_edge") or 0) >= MIN_CONVNEXT_SQUASH
    )
    share = float(timm_config.get("crop_pct") or (not is_large_convnext and processor.get("crop_pct")) or 1.0)
    if isinstance(crop, dict) and isinstance(size, dict) and size.get("shortest_edge"):
        share = min(1.0, crop.get("height", size["shortest_edge"]) / size["shortest_edge"])
    squash = (
        is_npz
        or is_large_convnext
        or timm_config.get("crop_mode") == "squash"
        or (
            "height" in size and not processor.get("do_center_crop")
            if isinstance(size, dict)
            else default_preprocess.fit == "squash"
        )
    )
    filter_name = RESAMPLE_FILTERS.get(
        processor.get("resample") or timm_config.get("interpolation"),
        "bilinear" if is_npz else default_preprocess.filter,
    )
    channels = config.channels
    if not all(map(math.isfinite, (*mean, *std, share))) or min(std) <= 0 or not 0 < share <= 1:
        raise ValueError(f"mean {mean}, std {std}, crop {share}")
    preprocess = ImagePreprocess(
        image=(config.image[-2], config.image[-1]),
        channels=channels,
        mean=tuple((mean * channels)[:channels]),
        std=tuple((std * channels)[:channels]),
        fit="squash" if squash else "crop",
        share=share,
        filter=filter_name,
    )
    if "max_num_patches" not in processor:  # of SigLIP 2 NaFlex
        return preprocess
    tokens = require_config_integer("max_num_patches", processor["max_num_patches"])
    return replace(NativePreprocess.from_preprocess(preprocess, tokens, config.patch), rounding="up")
