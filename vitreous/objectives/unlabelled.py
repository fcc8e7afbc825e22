"""What objectives that need no labels have in common: they ship features, and neighbours judge these."""

from __future__ import annotations

from typing import Any

import numpy as np

from vitreous.data.keys import permutation
from vitreous.data.split import Split
from vitreous.errors import UsageError
from vitreous.evaluation.evaluator import Evaluator
from vitreous.evaluation.knn import KNNEvaluator
from vitreous.models.config import ModelConfig
from vitreous.models.zoo import Model
from vitreous.objectives.base import Objective, Setting
from vitreous.weights.tasks import Features, Task

NEIGHBOURS = 5000  # training images that validation images are compared with as a run goes; `evaluate` takes them all


class Unlabelled(Objective):
    """An objective whose deployed model is `model`, an encoder without a head."""

    model: Any
    setting: Setting

    def deployed(self) -> Model:
        """The encoder."""
        return self.model

    def task(self) -> Task:
        """Features."""
        return Features()

    def evaluators(self, train: Split) -> list[Evaluator]:
        """Nearest neighbours of the features among `NEIGHBOURS` training images, where images have labels."""
        if not self.setting.classes:
            return []
        if len(train) > NEIGHBOURS:
            train = train.take(np.sort(permutation(len(train), self.setting.seed, 0)[:NEIGHBOURS]))
        return [KNNEvaluator(self.setting.classes, train)]


def check_takes_patches(model: ModelConfig, name: str) -> None:
    """Raise UsageError for a model that does not cut the image itself into patches, each of which may be left out."""
    if not (model.drops_patches and model.front == "patches"):
        raise UsageError(
            f"{name} is for ViTs that read patches of pixels, all of which every block sees",
            "name a plain ViT, as --model ViT-B/16",
        )


def check_views(views: Any, kind: type, name: str) -> None:
    """Raise UsageError for views of another kind than the objective compares."""
    if not isinstance(views, kind):
        raise UsageError(f"{name} takes views of the kind {kind.name}, not {views.name}", "leave --views.name out")
