"""Choose the model of a run: from --model, the initial weights, the recipe, or the data."""

from __future__ import annotations

import math
from typing import Any

from vitreous.config import set_dotted_paths
from vitreous.data.decoding.clip import DEFAULT_CLIP_FRAMES
from vitreous.errors import UsageError
from vitreous.models.config import ModelConfig, replace_known_fields
from vitreous.models.names import LARGE_IMAGE_SIZE, MAX_SMALL_IMAGE_SIDE, choose_small_model, config_from_name
from vitreous.nn.sizes import nearest_divisible_size
from vitreous.recipes.names import DEFAULT_RECIPE_NAMES
from vitreous.recipes.options import TrainOptions
from vitreous.recipes.own_aspect import set_square_image
from vitreous.recipes.recipe import MIN_SCRATCH_IMAGES, DatasetInfo, Recipe

#: maximum height and width of a clip in pixels -> its model; clips above MAX_SMALL_IMAGE_SIDE are scaled to
#: LARGE_IMAGE_SIZE
CLIP_MODELS = ((32, "ViViT-64x6/4x2"), (MAX_SMALL_IMAGE_SIDE, "ViViT-128x6/8x2"), (math.inf, "ViViT-S/16x2"))
#: maximum length of a volume along any axis in voxels -> its classification model
VOLUME_MODELS = ((32, "ViT-128x6/4x4x4"), (math.inf, "ViT-192x6/8x8x8"))
MAX_VOLUME_SIDE = 64  # maximum length of a model's input volume along any axis in voxels
SIGNAL_MODEL = "ViT-128x6"  # model for signals; its patch size is derived from the signal length
MAX_SIGNAL_LENGTH = 2**14  # maximum length of a model's input signal
SIGNAL_TOKENS = 128  # approximate number of patches of a signal


def choose_architecture(
    options: TrainOptions,
    dataset_info: DatasetInfo,
    classes: int,
    start: ModelConfig | None = None,
    recipe: Recipe | None = None,
) -> ModelConfig:
    """Choose the model of a run with `classes` outputs. `start` is the model of the initial weights, `recipe` the
    recipe of the options.

    Raises UsageError if --model differs from the initial weights or is not supported by the recipe, or for --patch-size
    if the model has no patches.
    """
    if recipe is not None:
        recipe.require_data_source(dataset_info)
    model = ARCHITECTURE_CHOOSERS.get(dataset_info.template.form, choose_image_architecture)(
        options, dataset_info, classes, start, recipe
    )
    if recipe is not None and recipe.for_models not in ("any", model.recipe_family):
        family_noun = {"bit": "ResNets", "vit": "Vision Transformers", "swin": "Swin Transformers"}[recipe.for_models]
        raise UsageError(
            f"{recipe.name} is for {family_noun}, not {model.name()}",
            f"use --model {recipe.models[0]}, or another recipe",
        )
    if recipe is not None and recipe.image is not None and options.image_size is None and len(dataset_info.size) == 2:
        side = recipe.image(model.name(), dataset_info)
        model = model.with_options(image=nearest_divisible_size((side, side), model.patch))
    if options.native_aspect and len(dataset_info.size) == 2:
        model = set_square_image(model, options) if start is None else model
    model_settings = {
        path.partition(".")[2]: values for path, values in options.settings.items() if path.startswith("model.")
    }
    if start is not None:  # other model options are applied to the run after the weights have been checked
        model_settings = {path: values for path, values in model_settings.items() if path == "image"}
    return set_dotted_paths(model, model_settings, "model.")


def choose_image_architecture(
    options: TrainOptions, dataset_info: DatasetInfo, classes: int, start: ModelConfig | None, recipe: Recipe | None
) -> ModelConfig:
    """Choose the model for images: that of the initial weights, or a new one. Raises UsageError for options that the
    model does not support."""
    return (
        adapt_pretrained_config(options, classes, start, recipe)
        if start is not None
        else choose_scratch_architecture(options, dataset_info, classes, recipe)
    )


def adapt_pretrained_config(
    options: TrainOptions, classes: int, start: ModelConfig, recipe: Recipe | None = None
) -> ModelConfig:
    """Return the model of the initial weights with a head for `classes` outputs.

    If --model or the recipe names a ViTDet of the same size, that ViTDet is returned. Raises UsageError if --model
    differs from the weights.
    """
    for name in (options.model,) if options.model else recipe.models if recipe else ():
        if is_vitdet_variant(variant := config_from_name(name), start):
            start = variant.with_options(channels=start.channels)
            break
    if options.model and config_from_name(options.model).name() != start.name():
        raise UsageError(
            f"--model {options.model} differs from the model of --init {options.init}", "leave --model out"
        )
    image = (options.image_size,) * len(start.image) if options.image_size else start.image
    head: dict[str, Any] = {"head.kind": "linear", "head.representation": None, "head.bias": True}
    if start.values_at(["head.kind"]) == {"head.kind": "cosine"} and classes == start.classes:
        head = start.values_at(head)  # fine-tuning of a zero-shot classifier
    return change_image_fields(start, {"image": image, "classes": classes} | head)


def change_image_fields(model: ModelConfig, changes: dict[str, Any]) -> ModelConfig:
    """Return a copy of a config with the `changes` of known fields. Of a model with a text encoder, the image encoder's
    size, patch and channels change; its head and pooling define the embedding."""
    if not model.has_text:
        return replace_known_fields(model, changes)
    input_changes = {name: changes[name] for name in ("image", "patch", "channels") if name in changes}
    return model.with_options(backbone=replace_known_fields(model.backbone, input_changes))


def is_vitdet_variant(model: ModelConfig, start: ModelConfig) -> bool:
    """Return whether `model` is a ViTDet that can load the weights of `start`, a plain ViT."""
    if not model.position_grid or start.recipe_family != model.recipe_family or start.position_grid:
        return False
    paths = ("width", "depth", "heads", "mlp.hidden")
    return model.values_at(paths) == start.values_at(paths)


def choose_array_architecture(
    options: TrainOptions, dataset_info: DatasetInfo, classes: int, start: ModelConfig | None, recipe: Recipe | None
) -> ModelConfig:
    """Choose the model for volumes or signals: a ViT with 3-D or 1-D patches.

    Its input size is that of the first sample, at most `MAX_VOLUME_SIDE` voxels along each axis or `MAX_SIGNAL_LENGTH`
    values. Raises UsageError for recipes and models for images.
    """
    axes, noun = len(dataset_info.size), dataset_info.template.noun
    if recipe is not None and recipe.solid is None and recipe.name not in DEFAULT_RECIPE_NAMES:
        hint = "use --recipe segment" if recipe.objective.annotated else "leave --recipe out"
        if recipe.task == "regression":
            hint = f"use classes as labels: regression of {noun} is not supported"
        raise UsageError(f"{recipe.name} is for images, but the data are {noun}", hint)
    if start is not None:
        return adapt_pretrained_config(options, classes, start)
    max_length = MAX_VOLUME_SIDE if axes == 3 else MAX_SIGNAL_LENGTH
    image_size = (
        (options.image_size,) * axes
        if options.image_size
        else tuple(min(max_length, length) for length in dataset_info.size)
    )
    default_name = recipe.solid if recipe and recipe.solid else default_array_model(image_size)
    model = config_from_name(options.model or default_name)
    if not model.any_axes:
        raise UsageError(f"{model.name()} is for images, but the data are {noun}", f"use --model {default_name}")
    default_patch = model.patch if len(model.patch) == axes else model.patch[:1] * axes
    if not (options.model or options.patch_size or (recipe and recipe.solid)):
        # volumes may be thinner than a patch
        default_patch = tuple(min(lengths) for lengths in zip(default_patch, image_size, strict=True))
    patch = (options.patch_size,) * axes if options.patch_size else default_patch
    changes = {
        "image": nearest_divisible_size(image_size, patch),
        "patch": patch,
        "classes": classes,
        "channels": dataset_info.channels,
    }
    return replace_known_fields(model, changes | {"pool": "mean", "class_token": False, "head.bias": True})


def default_array_model(image_size: tuple[int, ...]) -> str:
    """Return the name of the default model for volumes of the size (depth, height, width), or for signals of the size
    (length,)."""
    if len(image_size) == 1:
        return f"{SIGNAL_MODEL}/{max(4, 2 ** math.ceil(math.log2(max(1, image_size[0] / SIGNAL_TOKENS))))}"
    return next(name for max_side, name in VOLUME_MODELS if max(image_size) <= max_side)


def choose_clip_architecture(
    options: TrainOptions, dataset_info: DatasetInfo, classes: int, start: ModelConfig | None, recipe: Recipe | None
) -> ModelConfig:
    """Choose the model for clips: that of the recipe, or a video model.

    Frames have the size of the first clip if it is at most `MAX_SMALL_IMAGE_SIDE`. Larger frames have
    `LARGE_IMAGE_SIZE`, or `MAX_SMALL_IMAGE_SIDE` if the recipe has no model for larger frames. Image weights initialise
    --model, or their model with an additional time axis, tubelets of two frames and joint attention. Raises UsageError
    for a model of another family than the default, and for an image model.
    """
    if start is not None and len(start.image) == 3:
        model = adapt_pretrained_config(options, classes, start)
        return replace_known_fields(model, {"image": (options.frames or start.image[0], *model.image[1:])})
    recipe_model = (recipe.mixed if dataset_info.has_stills else recipe.clips) if recipe else None
    is_video_recipe = recipe is not None and recipe.is_for_clips
    default_size = (
        (MAX_SMALL_IMAGE_SIDE, MAX_SMALL_IMAGE_SIDE) if recipe_model and not is_video_recipe else LARGE_IMAGE_SIZE
    )
    native_size = dataset_info.size[1:] if max(dataset_info.size[1:]) <= MAX_SMALL_IMAGE_SIDE else default_size
    default_name = recipe_model or next(
        name for max_side, name in CLIP_MODELS if max(dataset_info.size[1:]) <= max_side
    )
    if recipe is not None and is_video_recipe and native_size is LARGE_IMAGE_SIZE:
        default_name = recipe.models[0]
    changes: dict[str, Any] = {"pool": "mean", "class_token": False} if native_size is not LARGE_IMAGE_SIZE else {}
    if start is not None:
        native_size, changes = start.image, {"head.representation": None} | copy_pooling_fields(start)
    if start is None or options.model:
        model = config_from_name(options.model or default_name)
    else:
        model = start.of_clips(frames=2)
        if model is None:
            raise UsageError(f"{start.name()} cannot initialise a video model", "set --model, or use other weights")
    if len(model.image) != 3:
        raise UsageError(f"{model.name()} is for images, but the data are clips", f"use --model {default_name}")
    if type(config_from_name(default_name)) is not type(model):
        purpose = f"the recipe {recipe.name}" if recipe else "classification of clips"
        raise UsageError(f"{model.name()} does not support {purpose}", f"use --model {default_name}")
    patch = (model.patch[0], *(options.patch_size,) * 2) if options.patch_size else model.patch
    frame_size = (options.image_size,) * 2 if options.image_size else nearest_divisible_size(native_size, patch[1:])
    is_published_size = is_video_recipe and start is None and native_size is LARGE_IMAGE_SIZE
    frames = options.frames or (
        model.image[0] if is_published_size else nearest_divisible_size((DEFAULT_CLIP_FRAMES,), patch[:1])[0]
    )
    changes |= {"image": (frames, *frame_size), "patch": patch, "classes": classes, "head.bias": True}
    return replace_known_fields(model, changes | {"channels": start.channels if start else dataset_info.channels})


def copy_pooling_fields(start: ModelConfig) -> dict[str, Any]:
    """Return the class token, pooling and registers of an image model, which a clip model initialised from it keeps."""
    return {name: getattr(start, name) for name in ("class_token", "pool", "registers") if name in start.option_names()}


def choose_scratch_architecture(
    options: TrainOptions, dataset_info: DatasetInfo, classes: int, recipe: Recipe | None
) -> ModelConfig:
    """Choose the model to train from scratch.

    The image size of small images is kept if the recipe names no model, has one for small images, or does not enlarge
    images. Raises UsageError for --patch-size if the model has no patches.
    """
    keeps_image_size = recipe is None or not recipe.models or recipe.small is not None
    native_size = dataset_info.size if keeps_image_size and max(dataset_info.size) <= MAX_SMALL_IMAGE_SIDE else None
    default_name = recipe.models[0] if recipe and recipe.models else "ViT-Ti/16"
    default_name = recipe.few if recipe and recipe.few and dataset_info.images < MIN_SCRATCH_IMAGES else default_name
    small_model = (recipe and recipe.small) or (choose_small_model(native_size) if native_size else "")
    name = options.model or (default_name if native_size is None else small_model)
    model = config_from_name(name)
    if options.patch_size and model.front != "patches":
        raise UsageError(f"--patch-size is for models with patches, and {name} has none", "leave --patch-size out")
    patch = (options.patch_size,) * 2 if options.patch_size else model.patch
    target = native_size or LARGE_IMAGE_SIZE
    if recipe and not recipe.enlarges and max(dataset_info.size) < min(target):
        target = (max(dataset_info.size),) * 2
    image = (options.image_size,) * 2 if options.image_size else nearest_divisible_size(target, patch)
    # `patch` of a Swin is the extent of a token of its last stage
    patch_changes = {"patch_size": patch} if options.patch_size else {}
    changes = patch_changes | {
        "image": image,
        "patch": patch,
        "classes": classes,
        "channels": dataset_info.channels,
        "head.bias": True,
    }
    # on small datasets, mean pooling learns faster than a class token
    if native_size is not None and model.pool == "class":
        changes |= {"pool": "mean", "class_token": False}
    return change_image_fields(model, changes)


#: sample format (`Preprocess.form`) -> function that chooses its model; other formats: `choose_image_architecture`
ARCHITECTURE_CHOOSERS = {"clips": choose_clip_architecture, "arrays": choose_array_architecture}
