"""Which model a run trains: as named, as the weights have it, as the recipe has it, or as suits the pictures."""

from __future__ import annotations

import math
from typing import Any

from vitreous.config import set_paths
from vitreous.data.decoding.clip import FRAMES
from vitreous.errors import UsageError
from vitreous.models.config import ModelConfig, replace_fields
from vitreous.models.names import LARGE_IMAGE, SMALL, configure, model_for_small_images
from vitreous.nn.sizes import nearby
from vitreous.recipes.names import OWN
from vitreous.recipes.options import TrainOptions
from vitreous.recipes.own_aspect import with_square
from vitreous.recipes.recipe import FEW, DatasetInfo, Recipe

#: sides of clips in pixels -> the model; larger ones are scaled to LARGE_IMAGE
CLIPS = ((32, "ViViT-64x6/4x2"), (SMALL, "ViViT-128x6/8x2"), (math.inf, "ViViT-S/16x2"))
#: sides of volumes in voxels, up to LARGE_VOLUME -> the model that learns their classes
VOLUMES = ((32, "ViT-128x6/4x4x4"), (math.inf, "ViT-192x6/8x8x8"))
LARGE_VOLUME = 64  # voxels along a side of what a model sees at a time
SIGNALS = "ViT-128x6"  # its patch follows from the length
LARGE_SIGNAL = 2**14  # numbers of a signal that a model sees
TOKENS = 128  # of a signal


def architecture(
    options: TrainOptions,
    facts: DatasetInfo,
    classes: int,
    start: ModelConfig | None = None,
    recipe: Recipe | None = None,
) -> ModelConfig:
    """The model of a run; `start` is that of the weights, `recipe` the one that was named.

    Raises UsageError for a --model that is not that of the weights or not of the recipe's kind, and a --patch-size for
    what has none of its own.
    """
    if recipe is not None:
        recipe.check_data(facts)
    model = BUILDERS.get(facts.template.form, for_images)(options, facts, classes, start, recipe)
    if recipe is not None and recipe.for_models not in ("any", model.recipe_family):
        kind = {"bit": "ResNets", "vit": "Vision Transformers", "swin": "Swin Transformers"}[recipe.for_models]
        raise UsageError(
            f"{recipe.name} is for {kind}, not {model.name()}", f"use --model {recipe.models[0]}, or another recipe"
        )
    if recipe is not None and recipe.image is not None and options.image_size is None and len(facts.size) == 2:
        side = recipe.image(model.name(), facts)
        model = model.with_options(image=nearby((side, side), model.patch))
    if options.native_aspect and len(facts.size) == 2:
        model = with_square(model, options) if start is None else model
    of_model = {path.partition(".")[2]: words for path, words in options.settings.items() if path.startswith("model.")}
    if start is not None:  # whatever else is set is set in the run, once the weights are known to fit
        of_model = {path: words for path, words in of_model.items() if path == "image"}
    return set_paths(model, of_model, "model.")


def for_images(
    options: TrainOptions, facts: DatasetInfo, classes: int, start: ModelConfig | None, recipe: Recipe | None
) -> ModelConfig:
    """The model to train on samples of two axes: that of the weights, or a fresh one. Raises UsageError as these."""
    return started(options, classes, start, recipe) if start is not None else fresh(options, facts, classes, recipe)


def started(options: TrainOptions, classes: int, start: ModelConfig, recipe: Recipe | None = None) -> ModelConfig:
    """The model of the weights with a head for these classes; a ViTDet of their sizes, where --model or the recipe
    names one. Raises UsageError for another --model."""
    for name in (options.model,) if options.model else recipe.models if recipe else ():
        if on_windows(named := configure(name), start):
            start = named.with_options(channels=start.channels)
            break
    if options.model and configure(options.model).name() != start.name():
        raise UsageError(
            f"--model {options.model} does not fit the weights of --init {options.init}", "leave --model out"
        )
    image = (options.image_size,) * len(start.image) if options.image_size else start.image
    return replace_fields(start, {"image": image, "classes": classes, "head.representation": None, "head.bias": True})


def on_windows(model: ModelConfig, start: ModelConfig) -> bool:
    """Whether a model is a ViTDet that takes the weights of a plain ViT."""
    if not model.position_grid or start.recipe_family != model.recipe_family or start.position_grid:
        return False
    paths = ("width", "depth", "heads", "mlp.hidden")
    return model.values_at(paths) == start.values_at(paths)


def for_arrays(
    options: TrainOptions, facts: DatasetInfo, classes: int, start: ModelConfig | None, recipe: Recipe | None
) -> ModelConfig:
    """The model to train on volumes or signals: a ViT whose patches have three axes or one, on images of the size of
    the first of them, of at most `LARGE_VOLUME` voxels a side, or `LARGE_SIGNAL` numbers. Raises UsageError for a
    recipe and for a model that are for pictures."""
    axes, kind = len(facts.size), facts.template.noun
    if recipe is not None and recipe.solid is None and recipe.name not in OWN:
        hint = "use --recipe segment" if recipe.objective.annotated else "leave --recipe out"
        raise UsageError(f"{recipe.name} is for pictures, and the data are {kind}", hint)
    if start is not None:
        return started(options, classes, start)
    largest = LARGE_VOLUME if axes == 3 else LARGE_SIGNAL
    sides = (options.image_size,) * axes if options.image_size else tuple(min(largest, side) for side in facts.size)
    usual = recipe.solid if recipe and recipe.solid else usual_for(sides)
    model = configure(options.model or usual)
    if not model.any_axes:
        raise UsageError(f"{model.name()} is for pictures, and the data are {kind}", f"use --model {usual}")
    own = model.patch if len(model.patch) == axes else model.patch[:1] * axes
    if not (options.model or options.patch_size or (recipe and recipe.solid)):
        own = tuple(min(pair) for pair in zip(own, sides, strict=True))  # thin volumes
    patch = (options.patch_size,) * axes if options.patch_size else own
    changes = {"image": nearby(sides, patch), "patch": patch, "classes": classes, "channels": facts.channels}
    return replace_fields(model, changes | {"pool": "mean", "class_token": False, "head.bias": True})


def usual_for(sides: tuple[int, ...]) -> str:
    """The model for volumes of (depth, height, width), and for signals of (length,), of about `TOKENS` patches."""
    if len(sides) == 1:
        return f"{SIGNALS}/{max(4, 2 ** math.ceil(math.log2(max(1, sides[0] / TOKENS))))}"
    return next(name for side, name in VOLUMES if max(sides) <= side)


def for_clips(
    options: TrainOptions, facts: DatasetInfo, classes: int, start: ModelConfig | None, recipe: Recipe | None
) -> ModelConfig:
    """The model to train on clips: the recipe's, or a video model, on frames of the size of the first clip, or, where
    that is above SMALL, of LARGE_IMAGE, or of SMALL for a recipe that has none for larger ones. Weights of pictures
    start that of --model, or else their own with a time axis, tubelets of two frames and joint attention. Raises
    UsageError for a model that is not of the usual one's family, and for one that is for pictures."""
    if start is not None and len(start.image) == 3:
        model = started(options, classes, start)
        return replace_fields(model, {"image": (options.frames or start.image[0], *model.image[1:])})
    named = (recipe.mixed if facts.stills else recipe.clips) if recipe else None
    own = recipe is not None and recipe.of_clips
    larger = (SMALL, SMALL) if named and not own else LARGE_IMAGE
    native = facts.size[1:] if max(facts.size[1:]) <= SMALL else larger
    usual = named or next(name for side, name in CLIPS if max(facts.size[1:]) <= side)
    if recipe is not None and own and native is LARGE_IMAGE:
        usual = recipe.models[0]
    changes: dict[str, Any] = {"pool": "mean", "class_token": False} if native is not LARGE_IMAGE else {}
    if start is not None:
        native, changes = start.image, {"head.representation": None} | read_from(start)
    if start is None or options.model:
        model = configure(options.model or usual)
    else:
        model = start.of_clips(frames=2)
        if model is None:
            raise UsageError(f"{start.name()} has no model of clips", "name one with --model, or other weights")
    if len(model.image) != 3:
        raise UsageError(f"{model.name()} is for pictures, and the data are clips", f"use --model {usual}")
    if type(configure(usual)) is not type(model):
        purpose = f"the recipe {recipe.name}" if recipe else "learning classes of clips"
        raise UsageError(f"{model.name()} is no model for {purpose}", f"use --model {usual}")
    patch = (model.patch[0], *(options.patch_size,) * 2) if options.patch_size else model.patch
    sides = (options.image_size,) * 2 if options.image_size else nearby(native, patch[1:])
    published = own and start is None and native is LARGE_IMAGE
    frames = options.frames or (model.image[0] if published else nearby((FRAMES,), patch[:1])[0])
    changes |= {"image": (frames, *sides), "patch": patch, "classes": classes, "head.bias": True}
    return replace_fields(model, changes | {"channels": start.channels if start else facts.channels})


def read_from(start: ModelConfig) -> dict[str, Any]:
    """What weights of pictures answer from, which a model of clips that starts from them answers from, too."""
    return {name: getattr(start, name) for name in ("class_token", "pool", "registers") if name in start.option_names()}


def fresh(options: TrainOptions, facts: DatasetInfo, classes: int, recipe: Recipe | None) -> ModelConfig:
    """The model to train from scratch. Where the recipe names no model, or one for small images, these are taken as
    they are. Raises UsageError for --patch-size where the model has no patches."""
    own = recipe is None or not recipe.models or recipe.small is not None
    native = facts.size if own and max(facts.size) <= SMALL else None
    usual = recipe.models[0] if recipe and recipe.models else "ViT-Ti/16"
    usual = recipe.few if recipe and recipe.few and facts.images < FEW else usual
    small = (recipe and recipe.small) or (model_for_small_images(native) if native else "")
    name = options.model or (usual if native is None else small)
    model = configure(name)
    if options.patch_size and model.front != "patches":
        raise UsageError(f"{name} has no patches to choose a size for", "leave --patch-size out")
    patch = (options.patch_size,) * 2 if options.patch_size else model.patch
    image = (options.image_size,) * 2 if options.image_size else nearby(native or LARGE_IMAGE, patch)
    size = {"patch_size": patch} if options.patch_size else {}  # a Swin's: its `patch` is a token of the last stage
    changes = size | {"image": image, "patch": patch, "classes": classes, "channels": facts.channels, "head.bias": True}
    # small data: mean pooling learns faster than a class token
    if native is not None and model.pool == "class":
        changes |= {"pool": "mean", "class_token": False}
    return replace_fields(model, changes)


#: what samples are decoded to (`Preprocess.form`) -> their model, where it is not that of `for_images`
BUILDERS = {"clips": for_clips, "arrays": for_arrays}
