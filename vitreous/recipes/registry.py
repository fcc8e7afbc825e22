"""Every recipe by name: one dict, complete at import."""

from __future__ import annotations

import math
from dataclasses import replace

from vitreous.models.names import configure
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
from vitreous.recipes.architecture import architecture
from vitreous.recipes.names import OWN, known
from vitreous.recipes.options import TrainOptions
from vitreous.recipes.recipe import SETS, Recipe
from vitreous.training.run import Run

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipes in (
        ours.OURS,
        (encoder.ENCODERS[0],),
        pretrain.PRETRAINING,
        finetune.FINETUNING,
        augreg.PRETRAINING,
        finetune.AUGREG_FINETUNING,
        augreg.PLAIN,
        deit.DEITS,
        regression.REGRESSION,
        swin.SWINS,
        unlabelled.UNLABELLED,
        (video.VIDEOMAE,),
        encoder.ENCODERS[1:],
        dense.DENSE,
        detect.DETECT,
        generate.GENERATE,
    )
    for recipe in recipes
}


def find(name: str) -> Recipe:
    """The recipe of that name. Raises UsageError with the nearest."""
    return RECIPES[known(name)]


def grid_of(run: Run | str) -> tuple[float, ...]:
    """The learning rates that a run, or a recipe by name, chooses from: .001 .003 .01 .03 where its table has none."""
    name = run if isinstance(run, str) else run.recipe
    return (find(name) if name else RECIPES["finetune"]).grid


def hold_out_of(run: Run | str) -> float | None:
    """The share of the training images on which a run, or a recipe by name, chooses; None where its table has none."""
    name = run if isinstance(run, str) else run.recipe
    return find(name).hold_out if name else None


def own_length(recipe: Recipe, base: Run) -> int:
    """Steps of the recipe on the data that it was written for, or, where the number of images decides its epochs, on
    these; `base` is its run on any."""
    decided = recipe.by_steps or base.epochs != example(recipe.name).epochs
    return base.steps if decided else math.ceil(base.epochs * SETS[recipe.data][0].images / base.step_size)


def example(name: str, model: str | None = None) -> Run:
    """Return a recipe's run, with its first model or another, on the data that it was written for; on clips where the
    other is a model of clips."""
    recipe = find(name)
    is_of_clips = model is not None and configure(model).has_time_axis
    facts, classes = SETS["Kinetics-400" if is_of_clips else recipe.data]
    classes = classes if recipe.objective.labelled or recipe.objective.generates else 0
    options = TrainOptions(recipe.data, recipe=name, model=model)
    named = None if name in OWN else recipe
    return replace(recipe.make(architecture(options, facts, classes, recipe=named), facts, options), recipe=name)
