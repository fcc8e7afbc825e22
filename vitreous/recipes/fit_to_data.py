"""Adapt a recipe to a dataset: the loss for its labels, class weights, and messages about settings for small
datasets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vitreous.data.annotations.map_statistics import compute_class_weights
from vitreous.data.split import Data
from vitreous.errors import UsageError
from vitreous.objectives.base import ObjectiveConfig
from vitreous.objectives.dino import DINOConfig
from vitreous.objectives.dinov2 import DINOv2Config
from vitreous.objectives.mae import MAEConfig
from vitreous.objectives.segmentation import SegmentationConfig
from vitreous.objectives.supervised import SupervisedConfig, balanced_class_weights
from vitreous.recipes.options import TrainOptions
from vitreous.recipes.recipe import DatasetInfo
from vitreous.recipes.unlabelled import has_small_settings
from vitreous.training.run import Run

#: number of pixel classes from which the loss is class-weighted: weights raised mIoU with 11 classes, lowered it with 3
MIN_WEIGHTED_CLASSES = 8

#: results of docs/guides/pretraining.md, "Is it worth the time"
SHORT_RUN_RESULT = (
    "half a minute of {} and of fine-tuning gave {} % on 2,000 CIFAR-10 images, a minute from scratch 59.2 %"
)
LABELLED_RESULTS = {
    "dino": "one minute of dino and one of fine-tuning gave 53.1 % on 9,000 CIFAR-10 images, two from scratch 71.8 %",
    "dinov2": SHORT_RUN_RESULT.format("dinov2", 24.1),
    **{name: SHORT_RUN_RESULT.format("mae", 19.8) for name in ("mae", "masked-patches")},
}
FEW_LABELS_RESULT = (
    "with 60 labels of Quick, Draw! a minute of mae and fine-tuning gave 28.2 %, of dino 81.7 %, from scratch 80.1 %"
)
DINOV3_NAMES = ("dinov3", "dinov3-gram", "dinov3-highres")
UNLABELLED_RECIPE_NAMES = ("masked-patches", "mae", "dino", "dinov2", *DINOV3_NAMES)


def fit_objective_to_labels(
    objective: ObjectiveConfig, data: Data, options: TrainOptions, dataset_info: DatasetInfo
) -> ObjectiveConfig:
    """Return the objective with a loss for the labels of the data, and the requested class weights.

    Raises UsageError for a loss that does not support the labels, and for class balancing if the objective uses no
    classes.
    """
    has_classes = objective.labelled and not objective.of_values
    can_balance = has_classes or (objective.generates and data.labelled)  # samples can be balanced by class
    option = "--sampling" if options.sampling == "balanced" and not can_balance else ""
    uses_weights = has_classes or isinstance(objective, SegmentationConfig)
    option = "--class-weights" if options.class_weights == "balanced" and not uses_weights else option
    if option:
        problem = f"{option} balanced needs classes, and {objective.name} does not use them"
        raise UsageError(problem, f"leave {option} out")
    if options.sampling == "repeat-factor" and not (can_balance or objective.annotated):
        problem = f"--sampling repeat-factor needs classes, and {objective.name} does not use them"
        raise UsageError(problem, "leave --sampling out")
    objective = objective.fitted(data.split("train").labels)
    if isinstance(objective, SegmentationConfig) and "objective.class_weights" not in options.settings:
        return replace(objective, class_weights=weigh_pixel_classes(dataset_info, options))
    if not isinstance(objective, SupervisedConfig):
        return objective
    loss: Any = data.label_kind.choose_loss(objective.loss, options.loss, data.name)
    objective = replace(objective, loss=loss)
    if options.class_weights is not None:
        labels, classes = data.split("train").labels, len(data.classes)
        weights = balanced_class_weights(labels, classes) if options.class_weights == "balanced" else ()
        objective = replace(objective, class_weights=weights)
    return objective


def weigh_pixel_classes(dataset_info: DatasetInfo, options: TrainOptions) -> tuple[float, ...]:
    """Return the class weights of the pixel loss from the statistics of the class maps.

    Classes are weighted if `class_weights` is balanced or, by default, from `MIN_WEIGHTED_CLASSES` classes. Returns an
    empty tuple otherwise, and without statistics.
    """
    shares = dataset_info.map_statistics.class_shares if dataset_info.map_statistics else ()
    weighting = options.class_weights or ("balanced" if len(shares) >= MIN_WEIGHTED_CLASSES else "even")
    return compute_class_weights(shares) if weighting == "balanced" else ()


def describe_small_settings(run: Run, info: DatasetInfo, options: TrainOptions) -> str:
    """Return a line about the settings for small images and few photographs that a self-supervised run uses instead of
    the published settings; "" for any other run."""
    if run.recipe not in UNLABELLED_RECIPE_NAMES or not has_small_settings(run.model, info, options):
        return ""
    settings, objective = [f"batch size {run.step_size}", f"learning rate {run.optimizer.lr:g}"], run.objective
    if isinstance(objective, MAEConfig):
        settings.append(f"a decoder of {objective.decoder_depth} blocks of {objective.decoder_width}")
    if isinstance(objective, DINOConfig | DINOv2Config):
        momentum, temperature = run.schedules["momentum"], run.schedules["teacher_temperature"]
        settings.append(f"{objective.prototypes} prototypes")
        settings.append(f"KoLeo {objective.koleo:g}")
        settings.append(f"teacher momentum {momentum.start:g} to {momentum.end:g}")
        settings.append(f"teacher temperature {temperature.end:g}")
    return f"{run.recipe} uses settings tuned for small datasets instead of the published ones: {', '.join(settings)}"


def advise_pretraining(run: Run, info: DatasetInfo, options: TrainOptions) -> str:
    """Return a warning with measured results if pre-training is likely worse than training from scratch in the same
    time: on small labelled datasets, and for `mae` on small unlabelled datasets. Returns "" for any other run."""
    if run.init or run.recipe in DINOV3_NAMES or not describe_small_settings(run, info, options):
        return ""
    if len(run.data.classes) > 1:
        results = LABELLED_RESULTS[run.recipe]
        hint = "leave --recipe out unless most of your images have no labels"
        return (
            f"the images have labels, which {run.recipe} does not use: {results} (docs/guides/pretraining.md); {hint}"
        )
    if run.recipe == "mae":
        return (
            f"mae is slow on small datasets: {FEW_LABELS_RESULT} (docs/guides/pretraining.md); "
            f"use --recipe dino, or train longer"
        )
    return ""
