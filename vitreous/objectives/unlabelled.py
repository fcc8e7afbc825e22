"""Base class of self-supervised objectives, whose features are evaluated by k-NN, with checks of their options; and
KoLeo (arXiv:1806.03198), the regulariser of DINOv2 (arXiv:2304.07193).

Shapes: B images of C channels, V views, N patches, n features, D width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitreous.data.augmentation.augment import Augment
from vitreous.data.augmentation.views import MultiCrop
from vitreous.data.keys import draw_permutation
from vitreous.data.split import Split
from vitreous.errors import UsageError
from vitreous.evaluation.evaluator import Evaluator
from vitreous.evaluation.knn import KNNEvaluator
from vitreous.evaluation.rankme import FeatureEvaluator
from vitreous.models.config import ModelConfig
from vitreous.models.zoo import Model
from vitreous.nn.sizes import format_size, patch_grid
from vitreous.objectives.base import Objective, ObjectiveSetting, TrainingProgress
from vitreous.system.torch_types import vector_norm
from vitreous.tasks.base import Task
from vitreous.tasks.features import FeatureExtraction

MAX_KNN_IMAGES = 5000  # training images for k-NN during a run; `evaluate` uses all of them
COLLAPSE_CHECK_START = 0.05  # share of a run before which targets are not checked
MIN_RANKME = 1.1  # RankMe below which features differ only in their length
# thresholds below which features of any objective have collapsed: their spread (std times sqrt(D)), and RankMe divided
# by its highest value in the run
MIN_FEATURE_SPREAD, MIN_RANKME_SHARE = 0.003, 0.1
# thresholds for objectives that compare views, whose loss depends only on features: spread 0.1 (mean cosine 0.99) or
# half of the initial spread, and half of the highest RankMe or a tenth of the width
# (measured in docs/guides/pretraining.md)
MIN_VIEW_FEATURE_SPREAD, MIN_VIEW_RANKME_SHARE, MIN_VIEW_RANKME_WIDTH_SHARE = 0.1, 0.5, 0.1


class UnlabelledObjective(Objective):
    """Base class of objectives without labels, whose deployed model is `model`, an encoder without a head."""

    #: whether the loss compares views, so features can collapse. Objectives that restore pixels do not collapse, and
    #: MAE's features have a large component in common
    compares_views: ClassVar[bool] = False

    model: Any
    setting: ObjectiveSetting

    @property
    def collapse_hint(self) -> str:
        """Return the settings that prevent collapse of the features, and the reason for it if known."""
        return "lower --lr, or train longer"

    def deployed_model(self) -> Model:
        """Return the encoder."""
        return self.model

    def task(self) -> Task:
        """Return the feature extraction task."""
        return FeatureExtraction()

    def evaluators(self, train: Split) -> list[Evaluator]:
        """Return the evaluator of the rank of the features, and if images have labels of several classes, of k-NN among
        at most `MAX_KNN_IMAGES` training images."""
        classes, multilabel = self.setting.classes, self.setting.multilabel
        if classes and len(train) > MAX_KNN_IMAGES:
            train = train.take(np.sort(draw_permutation(len(train), self.setting.seed, 0)[:MAX_KNN_IMAGES]))
        return [FeatureEvaluator(KNNEvaluator(classes, train, multilabel) if len(classes) > 1 else None)]

    def warnings(self, scalars: Mapping[str, float], progress: TrainingProgress) -> Iterator[tuple[str, str]]:
        """Detect collapse of features: all are equal, along one direction, or along few of the former directions.

        `scalars` may contain the metrics "rankme" and "feature_std", the highest RankMe so far ("highest_rankme", which
        includes the initial encoder) and the std of the initial encoder's features ("first_feature_std").
        """
        width = self.model.config.num_features
        rank, feature_spread = (scalars.get(name, math.inf) for name in ("rankme", "feature_std"))
        highest_rank, initial_spread = scalars.get("highest_rankme", rank), scalars.get("first_feature_std", math.inf)
        feature_spread, initial_spread = feature_spread * math.sqrt(width), initial_spread * math.sqrt(width)
        if feature_spread < (
            min(MIN_VIEW_FEATURE_SPREAD, initial_spread / 2) if self.compares_views else MIN_FEATURE_SPREAD
        ):
            initial_cosine = f", {1 - initial_spread**2:.3f} at the start" if initial_spread < math.inf else ""
            problem = (
                f"all images have nearly the same features (mean cosine {1 - feature_spread**2:.4f}{initial_cosine})"
            )
            yield "same features", f"{problem}: {self.collapse_hint}"
        if rank < MIN_RANKME:
            yield (
                "one direction",
                f"features vary along one direction only (RankMe {rank:.2f} of {width}): {self.collapse_hint}",
            )
        elif rank < (
            min(MIN_VIEW_RANKME_SHARE * highest_rank, MIN_VIEW_RANKME_WIDTH_SHARE * width)
            if self.compares_views
            else MIN_RANKME_SHARE * highest_rank
        ):
            problem = f"features have lost most directions (RankMe {highest_rank:.1f}, now {rank:.1f} of {width})"
            yield "fallen rank", f"{problem}: {self.collapse_hint}"


def check_takes_patches(model: ModelConfig, name: str) -> None:
    """Raise UsageError for a model without patch tokens that can be dropped or masked; `name` is the objective's."""
    if not model.drops_patches:
        raise UsageError(
            f"{name} requires a ViT or hybrid whose blocks all attend to every token",
            "use a plain ViT, for example --model ViT-B/16",
        )


def hide_patches(images: Tensor, hidden: Tensor, model: ModelConfig) -> Tensor:
    """Set the pixels of hidden patches to 0, the mean colour, for a model whose convolutional stem would leak them into
    neighbouring tokens: images (B, C, *image) normalised, hidden (B, N) bool -> (B, C, *image).

    If each token depends only on its patch, images are returned unchanged, because callers do not use the tokens of
    hidden patches.
    """
    if model.front == "patches":
        return images
    hidden_grid = torch.unflatten(hidden, 1, patch_grid(tuple(images.shape[2:]), model.patch))[:, None]
    for axis, patch_length in enumerate(model.patch, 2):
        hidden_grid = hidden_grid.repeat_interleave(patch_length, axis)
    return images.masked_fill(hidden_grid, 0.0)


def check_local_views(model: ModelConfig, views: MultiCrop) -> None:
    """Raise UsageError for local views whose size is not divisible by the model's patch."""
    local_size = views.local_image
    if views.locals and any(length % patch for length, patch in zip(local_size, model.patch, strict=True)):
        valid_size = " ".join(
            str(max(1, length // patch) * patch) for length, patch in zip(local_size, model.patch, strict=True)
        )
        raise UsageError(
            f"the size of local views, {format_size(local_size)}, is not divisible by patch size "
            f"{format_size(model.patch)}",
            f"use --views.local-image {valid_size}, or --views.locals 0",
        )


def check_views(views: Any, view_class: type[Augment | MultiCrop], name: str) -> None:
    """Raise UsageError for views of another type than the objective `name` requires."""
    if not isinstance(views, view_class):
        problem = f"{name} requires views of type {view_class.name}, not {views.name}"
        raise UsageError(problem, "leave out --views.name")


KOLEO_EPS = 1e-8  # `eps` of `koleo_loss`
GatherFunction = Callable[[Tensor], tuple[Tensor, int]]


def koleo_loss_of_views(views: Tensor, gather: GatherFunction, is_idle: bool = False) -> Tensor:
    """Sum `koleo_loss` over the V views of B images: features (B, V, D) -> scalar. `is_idle` as in `koleo_loss`."""
    losses = [koleo_loss(view, gather, is_idle) for view in views.unbind(1)]
    return torch.stack(losses).sum()


def koleo_loss(features: Tensor, gather: Callable[[Tensor], tuple[Tensor, int]], is_idle: bool = False) -> Tensor:
    """Compute the KoLeo loss, a scalar: the mean over features x_i (n, D) of -ln(|x_i - x_j + eps| + eps), x_j the
    nearest other feature (arXiv:1806.03198, as in DINOv2's code); 0 for a single feature.

    Features are normalised to length one in float32; eps is 1e-8.

        for i in range(n): j = argmax over j != i of x_i x_j; loss -= log((x_i - x_j + eps).norm() + eps) / n

    Neighbours are searched among the features of all processes. A feature also gets gradients from the features whose
    neighbour it is. Features of an `is_idle` process (`Objective.is_idle`) are excluded.
    """
    normalised = F.normalize(features.float(), dim=-1, eps=KOLEO_EPS)[: 0 if is_idle else len(features)]
    all_features, start = gather(normalised)
    count = len(all_features)
    if count < 2 or is_idle:
        return 0.0 * features.float().sum()
    with torch.no_grad():
        nearest = (all_features @ all_features.T).fill_diagonal_(-2).argmax(1)
    candidates = torch.cat([all_features[:start], normalised, all_features[start + len(normalised) :]])
    loss = -(vector_norm(candidates - candidates[nearest] + KOLEO_EPS, 2, -1) + KOLEO_EPS).log().mean()
    # a process's loss is weighted by its share of the samples, but its part of the total gradient has weight one
    return loss.detach() + (loss - loss.detach()) * (count / len(normalised))
