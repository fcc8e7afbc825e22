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
    try:
        return parse_preprocessing(weights_format, config, processor, settings)
    except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError, VitreousError) as error:
        raise WeightsError(
            f"the preprocessing of {weights_format.title} is invalid ({str(error)[:100]})", "download it again"
        ) from None


def parse_preprocessing(
    weights_format: WeightsFormat, config: ModelConfig, processor: dict[str, Any], settings: dict[str, Any]
) -> Preprocess:
    """Parse the preprocessing from `processor` (preprocessor_config.json) and `settings` (config.json). Raises
    ValueError for invalid values."""
    default_preprocess = config.default_preprocess()
    mean, std = PIXEL_STATISTICS[
        weights_format.get_pixel_scaling(config)
        or FORMAT_PIXEL_STATISTICS.get(weights_format.name, default_preprocess.pixels)
    ]
    timm_config = get_nested_dict(settings, "pretrained_cfg")
    mean, std = (
        tuple(map(float, processor.get(f"image_{statistic}") or timm_config.get(statistic) or default))
        for statistic, default in (("mean", mean), ("std", std))
    )
    share = float(timm_config.get("crop_pct") or 1.0)
    crop, size = processor.get("crop_size"), processor.get("size")
    if isinstance(crop, dict) and isinstance(size, dict) and size.get("shortest_edge"):
        share = min(1.0, crop.get("height", size["shortest_edge"]) / size["shortest_edge"])
    squash = weights_format.suffix == ".npz" or (
        "height" in size and not processor.get("do_center_crop")
        if isinstance(size, dict)
        else default_preprocess.fit == "squash"
    )
    filter_name = RESAMPLE_FILTERS.get(
        processor.get("resample") or timm_config.get("interpolation"),
        "bilinear" if weights_format.suffix == ".npz" else default_preprocess.filter,
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
