"""Construction of models by name or config."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from vitreous.errors import UsageError, suggest_nearest
from vitreous.models.base import VisionModel
from vitreous.models.config import ModelConfig
from vitreous.models.names import config_from_name
from vitreous.nn.no_init import NoInitMode

Model = VisionModel[Any]


def build_model(config: ModelConfig) -> Any:
    """Build a randomly initialised model of the config's family."""
    return config.model_class()(config)


def create_untrained_model(
    name: str,
    image_size: int | tuple[int, ...] | None = None,
    num_classes: int | None = None,
    channels: int | None = None,
    **changes: Any,
) -> Any:
    """Build a model by name, freshly initialised: `create_untrained_model("ViT-B/16", image_size=384, num_classes=37)`.

    `image_size` is in pixels, one number or one per axis. `num_classes` defaults to the name's (1000 for most); 0 omits
    the head. `channels` of an image: 3, or 4 for a DiT's latents. `changes` are fields of `ViTConfig`, `BiTConfig`,
    `SwinConfig` or `DiTConfig`; a dict changes the fields of a group that it names. Raises UsageError for an unknown
    name or field and for a size that the patch does not divide.
    """
    axes = len(config_from_name(name).image)
    if "patch_size" in changes and not name.lower().startswith("swin"):
        size = changes.pop("patch_size")
        changes["patch"] = (size,) * axes if isinstance(size, int) else tuple(size)
    config = config_from_name(name, None if "patch" in changes else image_size)
    if "patch" in changes and image_size is not None:
        changes["image"] = (image_size,) * axes if isinstance(image_size, int) else tuple(image_size)
    option_names = {"num_classes", *config.option_names()} - {"classes"}
    unknown = set(changes) - set(option_names)
    if unknown:
        option = min(unknown)
        raise UsageError(
            f"a {type(config).__name__.removesuffix('Config')} has no {option}",
            suggest_option(config, option, option_names),
        )
    classes = config.classes if num_classes is None else num_classes
    return build_model(config.with_options(classes=classes, channels=channels or config.channels, **changes))


def suggest_option(config: ModelConfig, option: str, options: Iterable[str]) -> str:
    """Suggest the group with a field of this name as a keyword, else the nearest known option; "" if there is none."""
    path = next((path for path in config.option_paths() if path.endswith(f".{option}")), "")
    group = path.partition(".")[0]
    return f'use {group}={{"{option}": …}}' if group else suggest_nearest(option, sorted(options))


def build_without_init(config: ModelConfig) -> Model:
    """Build a model whose parameters have shapes but no values; `load_state_dict(…, assign=True)` fills them."""
    with torch.device("meta"), NoInitMode():
        return build_model(config)
