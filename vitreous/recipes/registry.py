"""Every recipe by name: one dict, complete at import."""

from __future__ import annotations

import math
from dataclasses import replace

from vitreous.models.names import config_from_name
from vitreous.recipes import (
    augreg,
    deit,
    dense,
    detect,
    encoder,
    finetune,
    generate,
    ours,
    pretrain,
    regression,
    swin,
    unlabelled,
    video,
)
from vitreous.recipes.architecture import choose_architecture
from vitreous.recipes.names import DEFAULT_RECIPE_NAMES, check_recipe_name
from vitreous.recipes.options import TrainOptions
from vitreous.recipes.recipe import REFERENCE_DATASETS, Recipe
from vitreous.training.run import Run

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipes in (
        ours.DEFAULT_RECIPES,
        (encoder.ENCODER_RECIPES[0],),
        pretrain.PRETRAIN_RECIPES,
        finetune.FINETUNE_RECIPES,
        augreg.AUGREG_RECIPES,
        finetune.AUGREG_FINETUNE_RECIPES,
        augreg.PLAIN_VIT_RECIPES,
        deit.DEIT_RECIPES,
        regression.REGRESSION_RECIPES,
        swin.SWIN_RECIPES,
        unlabelled.UNLABELLED_RECIPES,
        (video.VIDEOMAE_RECIPE,),
        encoder.ENCODER_RECIPES[1:],
        dense.SEGMENTATION_RECIPES,
        detect.DETECTION_RECIPES,
        generate.GENERATION_RECIPES,
    )
    for recipe in recipes
}


def get_recipe(name: str) -> Recipe:
    """Return the recipe of that name. Raises UsageError with the nearest name."""
    return RECIPES[check_recipe_name(name)]


def get_lr_grid(run: Run | str) -> tuple[float, ...]:
    """Return the learning rate grid of a run, or of a recipe by name: .001 .003 .01 .03 if its table has none."""
    name = run if isinstance(run, str) else run.recipe
    return (get_recipe(name) if name else RECIPES["finetune"]).grid


def get_hold_out_share(run: Run | str) -> float | None:
    """Return the held-out share of the training images of a run, or of a recipe by name; None if its table has none."""
    name = run if isinstance(run, str) else run.recipe
    return get_recipe(name).hold_out if name else None


def count_reference_steps(recipe: Recipe, base: Run) -> int:
    """Count the steps of the recipe on its reference data, or, if the number of images determines its epochs, on these
    data; `base` is its run on any data."""
    has_fixed_steps = recipe.by_steps or base.epochs != build_example_run(recipe.name).epochs
    return (
        base.steps
        if has_fixed_steps
        else math.ceil(base.epochs * REFERENCE_DATASETS[recipe.data][0].images / base.step_size)
    )


def build_example_run(name: str, model: str | None = None) -> Run:
    """Return a recipe's run, with its first model or another, on its reference data; on clips if the model is a clip
    model."""
    recipe = get_recipe(name)
    is_of_clips = model is not None and config_from_name(model).has_time_axis
    dataset_info, classes = REFERENCE_DATASETS["Kinetics-400" if is_of_clips else recipe.data]
    classes = classes if recipe.objective.labelled or recipe.objective.generates else 0
    options = TrainOptions(recipe.data, recipe=name, model=model)
    explicit_recipe = None if name in DEFAULT_RECIPE_NAMES else recipe
    return replace(
        recipe.make(choose_architecture(options, dataset_info, classes, recipe=explicit_recipe), dataset_info, options),
        recipe=name,
    )
