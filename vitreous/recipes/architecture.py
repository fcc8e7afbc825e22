"""Choose the model of a run: from --model, the weights, the recipe, or the data."""

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

#: clip height and width in pixels -> the model; larger clips are scaled to LARGE_IMAGE
CLIP_MODELS = ((32, "ViViT-64x6/4x2"), (MAX_SMALL_IMAGE_SIDE, "ViViT-128x6/8x2"), (math.inf, "ViViT-S/16x2"))
#: volume sizes in voxels, up to LARGE_VOLUME -> the classification model
VOLUME_MODELS = ((32, "ViT-128x6/4x4x4"), (math.inf, "ViT-192x6/8x8x8"))
MAX_VOLUME_SIDE = 64  # maximum voxels per side of a model input
SIGNAL_MODEL = "ViT-128x6"  # its patch size is derived from the signal length
MAX_SIGNAL_LENGTH = 2**14  # maximum length of a model's input signal
SIGNAL_TOKENS = 128  # tokens per signal


def choose_architecture(
    options: TrainOptions,
    facts: DatasetInfo,
    classes: int,
    start: ModelConfig | None = None,
    recipe: Recipe | None = None,
) -> ModelConfig:
    """Choose the model of a run; `start` is the model of the weights, `recipe` the recipe of the options.

    Raises UsageError for a --model that differs from the weights or does not suit the recipe, and a --patch-size for a
    model without patches.
    """
    if recipe is not None:
        recipe.require_data_source(facts)
    model = ARCHITECTURE_CHOOSERS.get(facts.template.form, choose_image_architecture)(
        options, facts, classes, start, recipe
    )
    if recipe is not None and recipe.for_models not in ("any", model.recipe_family):
        kind = {"bit": "ResNets", "vit": "Vision Transformers", "swin": "Swin Transformers"}[recipe.for_models]
        raise UsageError(
            f"{recipe.name} is for {kind}, not {model.name()}", f"use --model {recipe.models[0]}, or another recipe"
        )
    if recipe is not None and recipe.image is not None and options.image_size is None and len(facts.size) == 2:
        side = recipe.image(model.name(), facts)
        model = model.with_options(image=nearest_divisible_size((side, side), model.patch))
    if options.native_aspect and len(facts.size) == 2:
        model = set_square_image(model, options) if start is None else model
    of_model = {path.partition(".")[2]: words for path, words in options.settings.items() if path.startswith("model.")}
    if start is not None:  # other model options are applied to the run after the weights have been checked
        of_model = {path: words for path, words in of_model.items() if path == "image"}
    return set_dotted_paths(model, of_model, "model.")


def choose_image_architecture(
    options: TrainOptions, facts: DatasetInfo, classes: int, start: ModelConfig | None, recipe: Recipe | None
) -> ModelConfig:
    """Choose the model for images: that of the weights, or a new one. Raises UsageError like the functions it calls."""
    return (
        adapt_pretrained_config(options, classes, start, recipe)
        if start is not None
        else choose_scratch_architecture(options, facts, classes, recipe)
    )


def adapt_pretrained_config(
    options: TrainOptions, classes: int, start: ModelConfig, recipe: Recipe | None = None
) -> ModelConfig:
    """Return the model of the weights with a head for these classes, or a ViTDet of their size if --model or the recipe
    sets one. Raises UsageError for another --model."""
    for name in (options.model,) if options.model else recipe.models if recipe else ():
        if is_vitdet_variant(named := config_from_name(name), start):
            start = named.with_options(channels=start.channels)
            break
    if options.model and config_from_name(options.model).name() != start.name():
        raise UsageError(
            f"--model {options.model} does not fit the weights of --init {options.init}", "leave --model out"
        )
    image = (options.image_size,) * len(start.image) if options.image_size else start.image
    return replace_known_fields(
        start, {"image": image, "classes": classes, "head.representation": None, "head.bias": True}
    )


def is_vitdet_variant(model: ModelConfig, start: ModelConfig) -> bool:
    """Return whether a model is a ViTDet that can load the weights of a plain ViT."""
    if not model.position_grid or start.recipe_family != model.recipe_family or start.position_grid:
        return False
    paths = ("width", "depth", "heads", "mlp.hidden")
    return model.values_at(paths) == start.values_at(paths)


def choose_array_architecture(
    options: TrainOptions, facts: DatasetInfo, classes: int, start: ModelConfig | None, recipe: Recipe | None
) -> ModelConfig:
    """Choose the model for volumes or signals: a ViT with 3-D or 1-D patches. Its image size is that of the first
    sample, at most `MAX_VOLUME_SIDE` voxels per side or `MAX_SIGNAL_LENGTH` values. Raises UsageError for recipes and
    models for images."""
    axes, kind = len(facts.size), facts.template.noun
    if recipe is not None and recipe.solid is None and recipe.name not in DEFAULT_RECIPE_NAMES:
        hint = "use --recipe segment" if recipe.objective.annotated else "leave --recipe out"
        raise UsageError(f"{recipe.name} is for images, but the data are {kind}", hint)
    if start is not None:
        return adapt_pretrained_config(options, classes, start)
    largest = MAX_VOLUME_SIDE if axes == 3 else MAX_SIGNAL_LENGTH
    sides = (options.image_size,) * axes if options.image_size else tuple(min(largest, side) for side in facts.size)
    usual = recipe.solid if recipe and recipe.solid else default_array_model(sides)
    model = config_from_name(options.model or usual)
    if not model.any_axes:
        raise UsageError(f"{model.name()} is for images, but the data are {kind}", f"use --model {usual}")
    own = model.patch if len(model.patch) == axes else model.patch[:1] * axes
    if not (options.model or options.patch_size or (recipe and recipe.solid)):
        own = tuple(min(pair) for pair in zip(own, sides, strict=True))  # thin volumes
    patch = (options.patch_size,) * axes if options.patch_size else own
    changes = {
        "image": nearest_divisible_size(sides, patch),
        "patch": patch,
        "classes": classes,
        "channels": facts.channels,
    }
    return replace_known_fields(model, changes | {"pool": "mean", "class_token": False, "head.bias": True})


def default_array_model(sides: tuple[int, ...]) -> str:
    """Return the model for volumes (depth, height, width) or signals (length,), with about `SIGNAL_TOKENS` patches."""
    if len(sides) == 1:
        return f"{SIGNAL_MODEL}/{max(4, 2 ** math.ceil(math.log2(max(1, sides[0] / SIGNAL_TOKENS))))}"
    return next(name for side, name in VOLUME_MODELS if max(sides) <= side)


def choose_clip_architecture(
    options: TrainOptions, facts: DatasetInfo, classes: int, start: ModelConfig | None, recipe: Recipe | None
) -> ModelConfig:
    """Choose the model for clips: the recipe's or a video model. Frames have the size of the first clip. If that
    exceeds SMALL, they have LARGE_IMAGE, or SMALL for a recipe without a model for larger frames. Image weights
    initialise --model, or their model extended by a time axis, tubelets of two frames and joint attention. Raises
    UsageError for a model of another family than the default, and for an image model."""
    if start is not None and len(start.image) == 3:
        model = adapt_pretrained_config(options, classes, start)
        return replace_known_fields(model, {"image": (options.frames or start.image[0], *model.image[1:])})
    named = (recipe.mixed if facts.stills else recipe.clips) if recipe else None
    own = recipe is not None and recipe.of_clips
    larger = (MAX_SMALL_IMAGE_SIDE, MAX_SMALL_IMAGE_SIDE) if named and not own else LARGE_IMAGE_SIZE
    native = facts.size[1:] if max(facts.size[1:]) <= MAX_SMALL_IMAGE_SIDE else larger
    usual = named or next(name for side, name in CLIP_MODELS if max(facts.size[1:]) <= side)
    if recipe is not None and own and native is LARGE_IMAGE_SIZE:
        usual = recipe.models[0]
    changes: dict[str, Any] = {"pool": "mean", "class_token": False} if native is not LARGE_IMAGE_SIZE else {}
    if start is not None:
        native, changes = start.image, {"head.representation": None} | copy_pooling_fields(start)
    if start is None or options.model:
        model = config_from_name(options.model or usual)
    else:
        model = start.of_clips(frames=2)
        if model is None:
            raise UsageError(f"{start.name()} has no video counterpart", "set --model, or use other weights")
    if len(model.image) != 3:
        raise UsageError(f"{model.name()} is for images, but the data are clips", f"use --model {usual}")
    if type(config_from_name(usual)) is not type(model):
        purpose = f"the recipe {recipe.name}" if recipe else "classification of clips"
        raise UsageError(f"{model.name()} does not support {purpose}", f"use --model {usual}")
    patch = (model.patch[0], *(options.patch_size,) * 2) if options.patch_size else model.patch
    sides = (options.image_size,) * 2 if options.image_size else nearest_divisible_size(native, patch[1:])
    published = own and start is None and native is LARGE_IMAGE_SIZE
    frames = options.frames or (
        model.image[0] if published else nearest_divisible_size((DEFAULT_CLIP_FRAMES,), patch[:1])[0]
    )
    changes |= {"image": (frames, *sides), "patch": patch, "classes": classes, "head.bias": True}
    return replace_known_fields(model, changes | {"channels": start.channels if start else facts.channels})


def copy_pooling_fields(start: ModelConfig) -> dict[str, Any]:
    """Return the pooling fields of an image model, which a clip model initialised from it keeps."""
    return {name: getattr(start, name) for name in ("class_token", "pool", "registers") if name in start.option_names()}


def choose_scratch_architecture(
    options: TrainOptions, facts: DatasetInfo, classes: int, recipe: Recipe | None
) -> ModelConfig:
    """Choose the model to train from scratch. The image size is kept if the recipe has no model or one for small images,
    or if the recipe does not enlarge images. Raises UsageError for --patch-size if the model has no patches."""
    own = recipe is None or not recipe.models or recipe.small is not None
    native = facts.size if own and max(facts.size) <= MAX_SMALL_IMAGE_SIDE else None
    usual = recipe.models[0] if recipe and recipe.models else "ViT-Ti/16"
    usual = recipe.few if recipe and recipe.few and facts.images < MIN_SCRATCH_IMAGES else usual
    small = (recipe and recipe.small) or (choose_small_model(native) if native else "")
    name = options.model or (usual if native is None else small)
    model = config_from_name(name)
    if options.patch_size and model.front != "patches":
        raise UsageError(f"{name} has no patches to choose a size for", "leave --patch-size out")
    patch = (options.patch_size,) * 2 if options.patch_size else model.patch
    target = native or LARGE_IMAGE_SIZE
    if recipe and not recipe.enlarges and max(facts.size) < min(target):
        target = (max(facts.size),) * 2
    image = (options.image_size,) * 2 if options.image_size else nearest_divisible_size(target, patch)
    size = {"patch_size": patch} if options.patch_size else {}  # `patch` of a Swin is a token of its last stage
    changes = size | {"image": image, "patch": patch, "classes": classes, "channels": facts.channels, "head.bias": True}
    # on small datasets, mean pooling learns faster than a class token
    if native is not None and model.pool == "class":
        changes |= {"pool": "mean", "class_token": False}
    return replace_known_fields(model, changes)


#: sample format (`Preprocess.form`) -> its architecture function, if it is not `choose_image_architecture`
ARCHITECTURE_CHOOSERS = {"clips": choose_clip_architecture, "arrays": choose_array_architecture}
