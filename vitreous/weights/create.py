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
from vitreous.weights.adopt import load_pretrained_weights, open_weights

if TYPE_CHECKING:
    from vitreous.keywords import BiTName, DiTName, ModelKeywords, SwinName, ViTName
    from vitreous.models.bit import BiT
    from vitreous.models.dit import DiT
    from vitreous.models.swin import Swin
    from vitreous.models.vit import ViT

#: what timm and others call an option -> its name here
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
#: options of timm that are methods here
TIMM_OPTION_HINTS = {
    "features_only": "use model.features_at(images, strides), or model.forward_intermediates(images)",
    "out_indices": "use model.forward_intermediates(images, indices)",
    "pretrained_cfg": "preprocessing is of weights: vitreous.load(RUN).card.preprocess",
    "pretrained_cfg_overlay": "preprocessing is of weights: vitreous.load(RUN).card.preprocess",
    "scriptable": "use torch.export or vitreous.export",
    "exportable": "every model is: use torch.export or vitreous.export",
}
TIMM_POOL_NAMES = {"token": "class", "avg": "mean", "map": "attention"}  # timm's `global_pool`
#: fields by which weights may go on otherwise than they were trained; others say what the weights are
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
    """A ViT, by the names of such models."""
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
    """A Swin, by the names of such models."""
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
    """A BiT, by the names of such models."""
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
    """A DiT, by the names of such models."""
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
    """A model by another name, or by its weights."""
    ...


def create(
    name: str | None = None,
    image_size: int | tuple[int, ...] | None = None,
    num_classes: int | None = None,
    channels: int | None = None,
    weights: str | os.PathLike[str] | None = None,
    **changes: Unpack[ModelKeywords],
) -> VisionModel[ModelConfig]:
    """Build a model: `create("ViT-B/16", image_size=384, num_classes=37)`, freshly initialised, or with `weights`.

    `image_size` in pixels, one number or one per axis; `num_classes` as the name has it (1000 for most), 0 leaves the
    head out; `channels` of an image: 3, or 4 of a DiT's latents; `changes` are fields of `ViTConfig`, `BiTConfig`,
    `SwinConfig` or `DiTConfig`; a dict changes the fields of a group that it names: `attention={"window": 7}`. timm's
    `img_size`, `in_chans`, `drop_rate`, `drop_path_rate`, `global_pool` and the like mean the same here.

    Type checkers know the class by the names that `vitreous models` lists; other names are of a `VisionModel`.

    `weights`: a run, a bundle, a file or foreign weights, as `vitreous.load` takes them. Then `name` may be left out;
    size, classes and channels are those of the weights where they are not given, positions are resized, channels are
    changed, and a head for another number of classes is new, and 0. The logger `vitreous` tells, at level INFO, what
    became of the tensors. Raises UsageError for an unknown name or field, for one that does not fit the weights, and
    for a size that the patch does not divide; WeightsError for weights that are not read.
    """
    given = {"image_size": image_size, "num_classes": num_classes, "channels": channels, "weights": weights}
    groups = {key: vars(value) if isinstance(value, ConfigGroup) else value for key, value in changes.items()}
    given, fields = translate_timm_options(
        {key: value for key, value in given.items() if value is not None}, list_paths(groups)
    )
    source = given.pop("weights", None)
    if source is None:
        if name is None:
            raise UsageError("create() needs a name or weights", 'create("ViT-S/16"), or create(weights="runs/pets")')
        return zoo.create_untrained_model(name, **given, **nest_paths(fields))
    opened = open_weights(source)
    config = opened.config
    if name is not None and config_from_name(name).name() != config.name():
        raise UsageError(f"{os.fspath(source)} is {config.name()}, not {name}", "leave the name out")
    if wrong := sorted(set(fields) - set(CHANGEABLE_FIELDS)):
        hint = suggest_nearest(wrong[0], CHANGEABLE_FIELDS) or f"with weights there are {', '.join(CHANGEABLE_FIELDS)}"
        raise UsageError(f"{wrong[0]} is as the weights have it: it cannot be given beside them", hint)
    model = zoo.build_model(apply_create_options(config, given, fields))
    logger.info(load_pretrained_weights(model, opened).text())
    return model


def translate_timm_options(given: dict[str, Any], changes: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options by their names here: those of `create`, and fields of a config. Raises UsageError for one that is given
    by two names, and for `pretrained`, which names no weights."""
    if changes.get("pretrained") is False:
        changes = {name: value for name, value in changes.items() if name != "pretrained"}
    for name in set(changes) & set(TIMM_OPTION_HINTS):
        raise UsageError(f"create() has no option {name}", TIMM_OPTION_HINTS[name])
    if "pretrained" in changes:
        raise UsageError("pretrained=True names no weights", 'name them: create(weights="timm:NAME"), or "hf:ORG/NAME"')
    renamed: dict[str, Any] = {}
    for name, value in changes.items():
        ours = "pool" if name == "global_pool" else TIMM_OPTION_NAMES.get(name, name)
        if ours in renamed or ours in given or (ours != name and ours in changes):
            raise UsageError(f"{name} and {ours} say the same thing", "use one of them")
        renamed[ours] = TIMM_POOL_NAMES.get(value, value) if name == "global_pool" else value
    own = ("image_size", "num_classes", "channels", "weights")
    return {**given, **{n: v for n, v in renamed.items() if n in own}}, {
        n: v for n, v in renamed.items() if n not in own
    }


def apply_create_options(config: ModelConfig, given: dict[str, Any], changes: dict[str, Any]) -> ModelConfig:
    """The config of weights with another size, classes and channels. Raises UsageError for a size that the patch does
    not divide, for classes of a model that gives none, and as configs do."""
    size = given.get("image_size")
    fields: dict[str, Any] = dict(changes)
    if size is not None:
        fields["image"] = (size,) * len(config.image) if isinstance(size, int) else tuple(size)
    if "num_classes" in given:
        fields["classes"] = given["num_classes"]
    if "channels" in given:
        fields["channels"] = given["channels"]
    if missing := sorted(set(fields) - set(config.option_paths())):
        raise UsageError(f"{config.name()} has no {missing[0]}", "leave it out")
    return replace_known_fields(config, fields)
