"""The recipe for image regression, such as an age, a count or a yield."""

from __future__ import annotations

from dataclasses import replace

from vitreous.data.augmentation.augment import Augment
from vitreous.models.config import ModelConfig
from vitreous.models.names import MAX_SMALL_IMAGE_SIDE
from vitreous.objectives.regression import RegressionConfig
from vitreous.recipes.options import TrainOptions
from vitreous.recipes.ours import (
    PATCH_STEM_LENGTH,
    PHOTO_FINETUNE_LENGTH,
    PHOTO_SCRATCH_LENGTH,
    make_adamw_photo_run,
    make_small_run,
)
from vitreous.recipes.recipe import DatasetInfo, Recipe
from vitreous.training.run import Run

SCRATCH_INITIAL_STD = 0.02  # of linear layers, from scratch with AdamW: timm's and DeiT's


def make_regression_run(model: ModelConfig, dataset_info: DatasetInfo, options: TrainOptions) -> Run:
    """Image regression, from scratch or from weights.

    vitreous train DATA --recipe NAME

    Optimiser and length are those of `small` (images up to 64 pixels, from scratch), `photos` (larger images, from
    scratch) or `finetune` (with --init). The full image is resized to the model's image size. Crops and colour changes
    are not used, because a crop changes a count, and brightness may be the target. Half of the images are flipped; use
    --views.flip 0 for targets that depend on left and right. From scratch, images smaller than 224 pixels keep their
    size, and linear layers of photo models start from a truncated normal distribution (standard deviation 0.02).
    """
    objective = RegressionConfig()
    is_small = not dataset_info.template.is_browsable or max(model.image[-2:]) <= MAX_SMALL_IMAGE_SIDE
    if is_small and not options.init:
        run = make_small_run(model, dataset_info, options)
    else:
        run = make_adamw_photo_run(model, dataset_info, is_finetuned=options.init is not None)
        objective = RegressionConfig(initial_std=None if options.init else SCRATCH_INITIAL_STD)
    return replace(run, preprocess=replace(run.preprocess, fit="squash"), views=Augment(flip=0.5), objective=objective)


REGRESSION_RECIPES = (
    Recipe(
        "regression",
        make_regression_run,
        "image regression, from scratch or from weights",
        "tuned here",
        objective=RegressionConfig,
        lengths=(
            ("images up to 64 pixels", PATCH_STEM_LENGTH),
            ("photographs", PHOTO_SCRATCH_LENGTH),
            ("from weights", PHOTO_FINETUNE_LENGTH),
        ),
        data="photographs",
        floor=64,
        enlarges=False,
    ),
)
