"""Construction of models from names or configs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from vitreous.errors import ResourceError, UsageError, suggest_nearest
from vitreous.models.base import VisionModel
from vitreous.models.config import ModelConfig
from vitreous.models.names import config_from_name
from vitreous.nn.no_init import NoInitMode
from vitreous.system.machine import get_free_memory

Model = VisionModel[Any]
LARGE_MODEL = 10**7  # width^2 x depth from which a model may not fit into memory; that of a ViT-B is 7 million


def build_model(config: ModelConfig) -> Any:
    """Build a randomly initialised model of the config's family. Raises UsageError for sizes that its layers do not
    support, ResourceError for a model that does not fit into the machine's memory."""
    if torch.empty(0).device.type == "cpu" and config.width**2 * config.depth > LARGE_MODEL:
        check_model_memory(build_without_init(config))
    try:
        return config.model_class()(config)
    except ValueError as error:
        raise UsageError(
            f"{config.name()} cannot be built: {error}", "change the width, the heads or this option"
        ) from None


def check_model_memory(model: Model) -> None:
    """Raise ResourceError if the parameters of a model on the meta device need more memory in float32 than is free."""
    count = sum(parameter.numel() for parameter in model.parameters())
    free = get_free_memory("cpu")
    if free and 4 * count > free:
        raise ResourceError(
            f"{model.config.name()} has {count / 1e9:.1f} billion parameters, which need {4 * count / 2**30:.0f} GiB "
            f"in float32, but {free / 2**30:.0f} GiB are free",
            "use a smaller model, or a machine with more memory",
        )


def create_untrained_model(
    name: str,
    image_size: int | tuple[int, ...] | None = None,
    num_classes: int | None = None,
    channels: int | None = None,
    **changes: Any,
) -> Any:
    """Build a model by name with random initialisation.

    For example: `create_untrained_model("ViT-B/16", image_size=384, num_classes=37)`.

    - `image_size` is in pixels, one number or one per axis.
    - `num_classes` defaults to the number in the published model (1000 for most); 0 omits the head.
    - `channels` defaults to 3, or for a DiT to the 4 channels of its latents.
    - `changes` are fields of `ViTConfig`, `BiTConfig`, `SwinConfig` or `DiTConfig`; a dict changes fields of a group of
      options, such as `attention={"window": 7}`.

    Raises UsageError for an unknown name or field and for a size that the patch does not divide.
    """
    axes = len(config_from_name(name).image)
    if "patch_size" in changes and not name.lower().startswith("swin"):
        size = changes.pop("patch_size")
        changes["patch"] = (size,) * axes if isinstance(size, int) else tuple(size)
    config = config_from_name(name, None if "patch" in changes else image_size)
    if "patch" in changes and image_size is not None:
        changes["image"] = (image_size,) * axes if isinstance(image_size, int) else tuple(image_size)
    option_names = {"num_classes", *config.option_names()} - {"classes"}
    unknown_options = set(changes) - set(option_names)
    if unknown_options:
        option = min(unknown_options)
        raise UsageError(
            f"a {type(config).__name__.removesuffix('Config')} has no option {option}",
            suggest_option(config, option, option_names),
        )
    classes = config.classes if num_classes is None else num_classes
    return build_model(config.with_options(classes=classes, channels=channels or config.channels, **changes))


def suggest_option(config: ModelConfig, option: str, options: Iterable[str]) -> str:
    """Return a hint for an unknown option: the group that has a field of this name, else the most similar option; "" if
    there is none."""
    path = next((path for path in config.option_paths() if path.endswith(f".{option}")), "")
    group = path.partition(".")[0]
    return f'use {group}={{"{option}": …}}' if group else suggest_nearest(option, sorted(options))


def build_without_init(config: ModelConfig) -> Model:
    """Build a model on the meta device, whose parameters have shapes but no values; `load_state_dict(…, assign=True)`
    sets them."""
    with torch.device("meta"), NoInitMode():
        return build_model(config)
