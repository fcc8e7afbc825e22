"""The registry of all recipes by name."""

from __future__ import annotations

import math
from dataclasses import replace

from vitreous.models.names import config_from_name
from vitreous.recipes import (
    augreg,
    contrastive,
    deit,
    dense,
    detect,
    dinov3,
    encoder,
    finetune,
    generate,
    ours,
    pretrain,
    regression,
    swin,
    unlabelled,
    video,
    vit5,
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
        vit5.VIT5_RECIPES,
        regression.REGRESSION_RECIPES,
        swin.SWIN_RECIPES,
        unlabelled.UNLABELLED_RECIPES,
        dinov3.DINOV3_RECIPES,
        (video.VIDEOMAE_RECIPE,),
        encoder.ENCODER_RECIPES[1:],
        contrastive.CONTRASTIVE_RECIPES,
        dense.SEGMENTATION_RECIPES,
        detect.DETECTION_RECIPES,
        generate.GENERATION_RECIPES,
    )
    for recipe in recipes
}


def get_recipe(name: str) -> Recipe:
    """Return a recipe by its name. Raises UsageError, with the most similar name, for an unknown name."""
    return RECIPES[check_recipe_name(name)]


def get_lr_grid(run: Run | str) -> tuple[float, ...]:
    """Return the learning rates of the grid search of a run, or of a recipe by name; the default grid if its
    publication has none."""
    name = run if isinstance(run, str) else run.recipe
    return (get_recipe(name) if name else RECIPES["finetune"]).grid


def get_hold_out_share(run: Run | str) -> float | None:
    """Return the share of the training images that a run, or a recipe by name, holds out for validation; None if its
    publication has none."""
    name = run if isinstance(run, str) else run.recipe
    return get_recipe(name).hold_out if name else None


def count_reference_steps(recipe: Recipe, base: Run) -> int:
    """Count the steps of a recipe on its reference dataset. `base` is its run on the user's data. If the number of
    images determines the epochs, these are the steps on the user's data."""
    has_fixed_steps = recipe.by_steps or base.epochs != build_example_run(recipe.name).epochs
    return (
        base.steps
        if has_fixed_steps
        else math.ceil(base.epochs * REFERENCE_DATASETS[recipe.data][0].images / base.step_size)
    )


def build_example_run(name: str, model: str | None = None) -> Run:
    """Build a recipe's run on its reference dataset, with its default model or `model`. For a clip model the dataset is
    Kinetics-400."""
    recipe = get_recipe(name)
    is_clip_model = model is not None and config_from_name(model).has_time_axis
    dataset_info, classes = REFERENCE_DATASETS["Kinetics-400" if is_clip_model else recipe.data]
    classes = classes if recipe.objective.labelled or recipe.objective.generates else 0
    options = TrainOptions(recipe.data, recipe=name, model=model)
    explicit_recipe = None if name in DEFAULT_RECIPE_NAMES else recipe
    return replace(
        recipe.make(choose_architecture(options, dataset_info, classes, recipe=explicit_recipe), dataset_info, options),
        recipe=name,
    )
