"""What lies beside foreign weights, and what is known of whoever made them: config.json, preprocessing, class names."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from vitreous.data.preprocess import HALF, IMAGENET, Preprocess
from vitreous.errors import VitreousError, WeightsError
from vitreous.models.config import ModelConfig, ViTConfig
from vitreous.weights.foreign import json_in
from vitreous.weights.table import Format
from vitreous.weights.transformers import said_by, whole

CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
#: format -> mean and deviation of the pixels its authors trained on, where nothing says otherwise
PIXELS = {"timm": IMAGENET, "dinov2": IMAGENET, "torchvision": IMAGENET, "sam": IMAGENET, "clip": CLIP}
# PIL's numbers, in transformers' files
FILTERS = {"bilinear": "bilinear", "bicubic": "bicubic", 2: "bilinear", 3: "bicubic"}


def fields(said: dict[str, Any]) -> dict[str, Any]:
    """What a config.json of transformers, of CLIP's two towers, of open_clip or of timm says of the model, in the words
    of `ViTConfig`."""
    if "model_cfg" in said:  # open_clip's, which says the form of GELU only where it is that of CLIP's first weights
        return {
            "gelu": "quick" if dict_in(said, "model_cfg").get("quick_gelu") else "none",
            "resize": "bicubic-antialias",
        }
    said = dict_in(said, "vision_config") or said  # of a model with a text tower, or of all of SAM
    if "architecture" not in said:
        return said_by(said)
    size = dict_in(said, "pretrained_cfg").get("input_size")
    found: dict[str, Any] = (
        {"image": tuple(whole("input_size", side) for side in size[1:])} if isinstance(size, list) else {}
    )
    found["resize"] = "bicubic-antialias"  # timm's rule for whatever it loads, whoever trained it
    if "quickgelu" in str(said["architecture"]):
        found["gelu"] = "quick"
    return found


def dict_in(said: dict[str, Any], name: str) -> dict[str, Any]:
    """An object inside of another, empty where there is none."""
    return said[name] if isinstance(said.get(name), dict) else {}


def preprocessing(form: Format, config: ModelConfig, folder: Path | None, said: dict[str, Any]) -> Preprocess:
    """The preprocessing that a preprocessor_config.json or timm's config.json tells, else that of the format's authors.

    Raises WeightsError where they tell what cannot be meant.
    """
    told = json_in(folder / "preprocessor_config.json") if folder else {}
    try:
        return preprocessed(form, config, told, said)
    except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError, VitreousError) as error:
        raise WeightsError(
            f"the preprocessing beside {form.title} cannot be meant ({str(error)[:100]})", "download it again"
        ) from None


def preprocessed(form: Format, config: ModelConfig, told: dict[str, Any], said: dict[str, Any]) -> Preprocess:
    """The preprocessing that what is `told` of the images and `said` of the model make."""
    mean, std = PIXELS.get(form.name, HALF)
    if form.name == "huggingface":
        dino = isinstance(config, ViTConfig) and config.layer_scale is not None
        mean, std = CLIP if isinstance(config, ViTConfig) and config.first_norm else IMAGENET if dino else HALF
    trained = dict_in(said, "pretrained_cfg")
    mean, std = (
        tuple(map(float, told.get(f"image_{word}") or trained.get(word) or own))
        for word, own in (("mean", mean), ("std", std))
    )
    share = float(trained.get("crop_pct") or 1.0)
    crop, size = told.get("crop_size"), told.get("size")
    if isinstance(crop, dict) and isinstance(size, dict) and size.get("shortest_edge"):
        share = min(1.0, crop.get("height", size["shortest_edge"]) / size["shortest_edge"])
    squash = form.suffix == ".npz" or (isinstance(size, dict) and "height" in size and not told.get("do_center_crop"))
    filtered = FILTERS.get(
        told.get("resample") or trained.get("interpolation"), "bilinear" if form.suffix == ".npz" else "bicubic"
    )
    channels = config.channels
    if not all(map(math.isfinite, (*mean, *std, share))) or min(std) <= 0 or not 0 < share <= 1:
        raise ValueError(f"mean {mean}, deviation {std}, crop {share}")
    return Preprocess(
        image=(config.image[-2], config.image[-1]),
        channels=channels,
        mean=tuple((mean * channels)[:channels]),
        std=tuple((std * channels)[:channels]),
        fit="squash" if squash else "crop",
        share=share,
        filter=filtered,  # type: ignore[arg-type]
    )


def class_names(config: ModelConfig, said: dict[str, Any]) -> tuple[str, ...]:
    """The names in a config.json, if they are as many as the model's classes and all different; else their numbers."""
    labels = said.get("id2label") or {}
    names = tuple(str(labels.get(str(i), "")) for i in range(config.classes)) if isinstance(labels, dict) else ()
    known = len(names) == config.classes and all(names) and len(set(names)) == len(names)
    return names if known else tuple(map(str, range(config.classes)))
