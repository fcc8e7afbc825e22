"""`vitreous.create`: a model by name, freshly initialised or with weights."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any, Unpack, overload

from vitreous.config import list_paths, nest_paths
from vitreous.errors import UsageError, suggest_nearest
from vitreous.models import zoo
from vitreous.models.base import VisionModel
from vitreous.models.config import ConfigGroup, ModelConfig, replace_known_fields
from vitreous.models.names import config_from_name
from vitreous.weights.adopt import drop_dense_head, load_pretrained_weights, open_weights
from vitreous.weights.bundle import text_classes_error

if TYPE_CHECKING:
    from vitreous.keywords import ModelKeywords
    from vitreous.models.bit import BiT
    from vitreous.models.dit import DiT
    from vitreous.models.name_types import BiTName, DiTName, SwinName, ViTName
    from vitreous.models.swin import Swin
    from vitreous.models.vit import ViT

#: option name in timm and other libraries -> its name here
TIMM_OPTION_NAMES = {
    "img_size": "image_size",
    "in_chans": "channels",
    "in_channels": "channels",
    "drop_path_rate": "regularization.drop_path",
    "drop_rate": "regularization.dropout",
    "embed_dim": "width",
    "num_heads": "heads",
    "reg_tokens": "registers",
    "init_values": "norm.layer_scale",
    "pretrained_path": "weights",
    "checkpoint_path": "weights",
}
#: timm options that are methods here
TIMM_OPTION_HINTS = {
    "features_only": "use model.features_at(images, strides), or model.forward_intermediates(images)",
    "out_indices": "use model.forward_intermediates(images, indices)",
    "pretrained_cfg": "use vitreous.load(RUN).card.preprocess: preprocessing is stored with the weights",
    "pretrained_cfg_overlay": "use vitreous.load(RUN).card.preprocess: preprocessing is stored with the weights",
    "scriptable": "use torch.export or vitreous.export",
    "exportable": "leave it out: torch.export and vitreous.export need no option",
}
TIMM_POOL_NAMES = {"token": "class", "avg": "mean", "map": "attention"}  # timm's `global_pool`
#: config fields that may be changed with weights; the others must be those of the weights' training
CHANGEABLE_FIELDS = (
    *("regularization.dropout", "regularization.drop_path", "regularization.drop_path_rises"),
    "positions.resize",
)
logger = logging.getLogger("vitreous")


@overload
def create(
    name: ViTName,
    image_size: int | tuple[int, ...] | None = None,
    num_classes: int | None = None,
    channels: int | None = None,
    weights: str | os.PathLike[str] | None = None,
    **changes: Unpack[ModelKeywords],
) -> ViT:
    """Create a ViT from a name of `vitreous models`."""
    ...


@overload
def create(
    name: SwinName,
    image_size: int | tuple[int, ...] | None = None,
    num_classes: int | None = None,
    channels: int | None = None,
    weights: str | os.PathLike[str] | None = None,
    **changes: Unpack[ModelKeywords],
) -> Swin:
    """Create a Swin from a name of `vitreous models`."""
    ...


@overload
def create(
    name: BiTName,
    image_size: int | tuple[int, ...] | None = None,
    num_classes: int | None = None,
    channels: int | None = None,
    weights: str | os.PathLike[str] | None = None,
    **changes: Unpack[ModelKeywords],
) -> BiT:
    """Create a BiT from a name of `vitreous models`."""
    ...


@overload
def create(
    name: DiTName,
    image_size: int | tuple[int, ...] | None = None,
    num_classes: int | None = None,
    channels: int | None = None,
    weights: str | os.PathLike[str] | None = None,
    **changes: Unpack[ModelKeywords],
) -> DiT:
    """Create a DiT from a name of `vitreous models`."""
    ...


@overload
def create(
    name: str | None = None,
    image_size: int | tuple[int, ...] | None = None,
    num_classes: int | None = None,
    channels: int | None = None,
    weights: str | os.PathLike[str] | None = None,
    **changes: Unpack[ModelKeywords],
) -> VisionModel[ModelConfig]:
    """Create a model by any other name, or from its weights."""
    ...


def create(
    name: str | None = None,
    image_size: int | tuple[int, ...] | None = None,
    num_classes: int | None = None,
    channels: int | None = None,
    weights: str | os.PathLike[str] | None = None,
    **changes: Unpack[ModelKeywords],
) -> VisionModel[ModelConfig]:
    """Create a model with random weights, or with `weights`: `create("ViT-B/16", image_size=384, num_classes=37)`.

    - `name`: a name of `vitreous models`, or one of timm or Hugging Face. Optional if `weights` are given.
    - `image_size`: in pixels, one number or one per axis.
    - `num_classes`: by default that of the name (1000 for most); 0 omits the head.
    - `channels`: of an image. 3 by default, 4 for a DiT's latents.
    - `weights`: a run, a bundle, a file or foreign weights, as for `vitreous.load`. Image size, classes and channels
      default to those of the weights. Positions are resized, channels are adapted, and a head for another number of
      classes is replaced by a zero-initialised one. If the weights include a text encoder (CLIP, SigLIP), the name of
      an image encoder selects that encoder. The logger `vitreous` lists the loaded tensors at level INFO.
    - `changes`: fields of `ViTConfig`, `BiTConfig`, `SwinConfig` or `DiTConfig`. A dict changes fields of a group:
      `attention={"window": 7}`. timm's names are accepted as well: `img_size`, `in_chans`, `drop_rate`,
      `drop_path_rate`, `global_pool` and others.

    Type checkers infer the class from the names listed by `vitreous models`; other names return a `VisionModel`.

    Raises UsageError for an unknown name or field, for one that does not fit the weights, and for an image size that is
    not divisible by the patch size; WeightsError for unsupported weights.
    """
    options = {"image_size": image_size, "num_classes": num_classes, "channels": channels, "weights": weights}
    groups = {key: vars(value) if isinstance(value, ConfigGroup) else value for key, value in changes.items()}
    options, fields = translate_timm_options(
        {key: value for key, value in options.items() if value is not None}, list_paths(groups)
    )
    source = options.pop("weights", None)
    if source is None:
        if name is None:
            raise UsageError(
                "create() needs a name or weights", 'use create("ViT-S/16") or create(weights="runs/pets")'
            )
        return zoo.create_untrained_model(name, **options, **nest_paths(fields))
    pretrained = open_weights(source, reference=None if name is None else config_from_name(name))
    if name is not None and pretrained.config.has_text and not config_from_name(name).has_text:
        pretrained = drop_dense_head(pretrained)
    config = pretrained.config
    if name is not None and config_from_name(name).name() != config.name():
        raise UsageError(f"{os.fspath(source)} is {config.name()}, not {name}", "leave the name out")
    if fixed_fields := sorted(set(fields) - set(CHANGEABLE_FIELDS)):
        hint = (
            suggest_nearest(fixed_fields[0], CHANGEABLE_FIELDS)
            or f"with weights, change only {', '.join(CHANGEABLE_FIELDS)}"
        )
        raise UsageError(f"{fixed_fields[0]} is defined by the weights and cannot be changed", hint)
    model = zoo.build_model(apply_create_options(config, options, fields))
    logger.info(load_pretrained_weights(model, pretrained).text())
    return model


def translate_timm_options(options: dict[str, Any], changes: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Translate timm's option names into the options of `create` and fields of a config. Raises UsageError for an
    option given by two names, and for `pretrained`, which does not select weights."""
    if changes.get("pretrained") is False:
        changes = {name: value for name, value in changes.items() if name != "pretrained"}
    for name in set(changes) & set(TIMM_OPTION_HINTS):
        raise UsageError(f"create() has no option {name}", TIMM_OPTION_HINTS[name])
    if "pretrained" in changes:
        raise UsageError("pretrained=True does not select weights", 'use create(weights="timm:NAME"), or "hf:ORG/NAME"')
    renamed: dict[str, Any] = {}
    for name, value in changes.items():
        ours = "pool" if name == "global_pool" else TIMM_OPTION_NAMES.get(name, name)
        if ours in renamed or ours in options or (ours != name and ours in changes):
            raise UsageError(f"{name} and {ours} are the same option", "use one of them")
        renamed[ours] = TIMM_POOL_NAMES.get(value, value) if name == "global_pool" else value
    option_names = ("image_size", "num_classes", "channels", "weights")
    return {**options, **{n: v for n, v in renamed.items() if n in option_names}}, {
        n: v for n, v in renamed.items() if n not in option_names
    }


def apply_create_options(config: ModelConfig, options: dict[str, Any], changes: dict[str, Any]) -> ModelConfig:
    """Apply the options of `create` and changed fields to the config of weights. Raises UsageError for a field that the
    model lacks, such as classes of a model without a head. Raises it also for an image size that is not divisible by
    the patch size, and for values that the config rejects."""
    if config.has_text:
        if "num_classes" in options:
            raise text_classes_error(config)
        return config.with_options(backbone=apply_create_options(config.encoder, options, changes))
    size = options.get("image_size")
    fields: dict[str, Any] = dict(changes)
    if size is not None:
        fields["image"] = (size,) * len(config.image) if isinstance(size, int) else tuple(size)
    if "num_classes" in options:
        fields["classes"] = options["num_classes"]
    if "channels" in options:
        fields["channels"] = options["channels"]
    if missing := sorted(set(fields) - set(config.option_paths())):
        raise UsageError(f"{config.name()} has no {missing[0]}", f"leave {missing[0]} out")
    return replace_known_fields(config, fields)
