"""The loss for the labels of a dataset: its kind, and the weights of the classes."""

from __future__ import annotations

from dataclasses import replace

from vitreous.data.annotations.map_statistics import balance_classes
from vitreous.data.split import Data
from vitreous.errors import UsageError
from vitreous.objectives.base import ObjectiveConfig
from vitreous.objectives.segmentation import SegmentationConfig
from vitreous.objectives.supervised import SupervisedConfig, balanced
from vitreous.recipes.options import TrainOptions
from vitreous.recipes.recipe import DatasetInfo

MIN_WEIGHED = 8  # classes of pixels; weights raised mIoU with 11 classes and lowered it with 3


def fit_to_labels(objective: ObjectiveConfig, data: Data, options: TrainOptions, facts: DatasetInfo) -> ObjectiveConfig:
    """The objective with a loss for the labels that images have, and the class weights that were asked for.

    Raises UsageError for a loss that cannot have such labels, and for balance where no labels are learned from.
    """
    drawn = objective.labelled or (objective.generates and data.labelled)  # images may be drawn by their class
    word = "--sampling" if options.sampling == "balanced" and not drawn else ""
    weighted = objective.labelled or isinstance(objective, SegmentationConfig)
    word = "--class-weights" if options.class_weights == "balanced" and not weighted else word
    if word:
        raise UsageError(f"{word} balanced reads labels, and {objective.name} learns without them", "leave it out")
    if options.sampling == "repeat-factor" and not (drawn or objective.annotated):
        problem = f"--sampling repeat-factor reads labels, and {objective.name} learns without them"
        raise UsageError(problem, "leave it out")
    objective = objective.fitted(data.split("train").labels)
    if isinstance(objective, SegmentationConfig) and "objective.class_weights" not in options.settings:
        return replace(objective, class_weights=weigh_pixels(facts, options))
    if not isinstance(objective, SupervisedConfig):
        return objective
    if data.multilabel and objective.loss == "softmax":
        if options.loss == "softmax":
            raise UsageError(
                f"images of {data.name} have several labels, and a softmax gives one", "use --loss sigmoid"
            )
        objective = replace(objective, loss="sigmoid")
    if options.class_weights is not None:
        labels, classes = data.split("train").labels, len(data.classes)
        weights = balanced(labels, classes) if options.class_weights == "balanced" else ()
        objective = replace(objective, class_weights=weights)
    return objective


def weigh_pixels(facts: DatasetInfo, options: TrainOptions) -> tuple[float, ...]:
    """The weight of each class in the loss of pixels, by the statistics of class maps: for `MIN_WEIGHED` classes or
    more, or where the options ask for balance; else, and without statistics, none."""
    shares = facts.maps.shares if facts.maps else ()
    chosen = options.class_weights or ("balanced" if len(shares) >= MIN_WEIGHED else "even")
    return balance_classes(shares) if chosen == "balanced" else ()
