"""Two test objectives with recipes, which show the code that a new method needs.

`tiny-dino` needs no labels; it has a teacher with a momentum schedule, a centre, and views of several sizes.
`tiny-pixels` predicts a value for every pixel. `register_toys` adds both to the tables.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitreous.data.augmentation.augment import Augment
from vitreous.data.augmentation.views import MultiCrop
from vitreous.evaluation.knn import KNNEvaluator
from vitreous.objectives.base import Objective, ObjectiveConfig, ObjectiveSetting, TrainingProgress
from vitreous.objectives.table import OBJECTIVES
from vitreous.recipes import names, registry
from vitreous.recipes.recipe import Recipe, base_run_fields
from vitreous.tasks.features import FeatureExtraction
from vitreous.training.run import OptimizerConfig, RampConfig, Run


@dataclass(frozen=True)
class TinyDINOConfig(ObjectiveConfig):
    """Self-distillation between views with a centred teacher (arXiv:2104.14294, Algorithm 1)."""

    can_split_batch = False
    name: Literal["tiny-dino"] = "tiny-dino"
    out: int = 16

    def build(self, model: nn.Module, setting: ObjectiveSetting) -> TinyDINO:
        return TinyDINO(model, self, setting)


class TinyDINO(Objective):
    logged = ("entropy",)

    def __init__(self, model: nn.Module, config: TinyDINOConfig, setting: ObjectiveSetting) -> None:
        super().__init__()
        self.model, self.head, self.setting = model, nn.Linear(model.config.width, config.out), setting
        self.teacher, self.teacher_head = (copy.deepcopy(module).requires_grad_(False) for module in (model, self.head))
        self.register_buffer("centre", torch.zeros(config.out))
        self.register_buffer("seen", torch.zeros(config.out + 1), persistent=False)  # sum and count of outputs

    def forward(self, batch):
        large, local = (batch[name].transpose(0, 1) for name in ("images", "local"))
        with torch.no_grad(), torch.autocast(large.device.type, large.dtype, enabled=large.dtype != torch.float32):
            outputs = self.teacher_head(self.teacher(large.flatten(0, 1))).float()
            self.seen += torch.cat([outputs.sum(0), outputs.new_tensor([float(len(outputs))])])
            targets = ((outputs - self.centre) / 0.04).softmax(-1).unflatten(0, large.shape[:2])
        logits = [self.head(self.model(view)).float().log_softmax(-1) for view in (*large, *local)]
        pairs = [-(t * s).sum(-1).mean() for i, t in enumerate(targets) for j, s in enumerate(logits) if i != j]
        entropy = -(targets * targets.clamp_min(1e-9).log()).sum(-1).mean()
        return {"loss": torch.stack(pairs).mean(), "entropy": entropy}

    def after_step(self, progress: TrainingProgress) -> None:
        momentum = progress.values["momentum"]
        for student, follower in ((self.model, self.teacher), (self.head, self.teacher_head)):
            for weight, average in zip(student.parameters(), follower.parameters(), strict=True):
                average.lerp_(weight.float(), 1 - momentum)
        mean = self.reduce(self.seen)
        self.centre.lerp_(mean[:-1] / mean[-1], 0.1)
        self.seen.zero_()

    def deployed_model(self) -> nn.Module:
        return self.teacher

    def task(self) -> FeatureExtraction:
        return FeatureExtraction()

    def evaluators(self, train):
        return [KNNEvaluator(self.setting.classes, train)] if self.setting.classes else []

    def flops(self, progress: TrainingProgress) -> float:
        return (2 * 8 + 2 * 6 * 2) * self.model.config.computed_macs()


def tiny_dino(model, facts, options) -> Run:
    """Train on unlabelled images."""
    views = MultiCrop(locals=2, local_image=(8, 8))
    run = Run(
        **base_run_fields(model, facts), objective=TinyDINOConfig(), views=views, optimizer=OptimizerConfig(lr=1e-3)
    )
    return replace(
        run, schedules={"momentum": RampConfig(0.9, 1.0), "weight_decay": RampConfig(0.04, 0.4)}, batch_size=8, epochs=3
    )


@dataclass(frozen=True)
class TinyPixelsConfig(ObjectiveConfig):
    """Predict the brightness of every pixel from noisy images."""

    name: Literal["tiny-pixels"] = "tiny-pixels"
    noise: float = 0.5

    def build(self, model: nn.Module, setting: ObjectiveSetting) -> TinyPixels:
        return TinyPixels(model, self, setting)


class TinyPixels(Objective):
    logged = ("worst",)

    def __init__(self, model: nn.Module, config: TinyPixelsConfig, setting: ObjectiveSetting) -> None:
        super().__init__()
        self.model, self.config, self.setting = model, config, setting
        self.head = nn.Linear(model.config.width, model.config.patch[0] * model.config.patch[1])

    def prepare(self, batch, progress: TrainingProgress):
        images = batch["images"]
        noise = torch.stack([self.draw(images[0], int(position)) for position in batch["positions"]])
        return batch | {"images": images + self.config.noise * noise.to(images), "brightness": images.mean(1)}

    def draw(self, image: Tensor, position: int) -> Tensor:
        return torch.randn(image.shape, generator=torch.Generator().manual_seed(self.setting.seed * 2**32 + position))

    def forward(self, batch):
        model, images = self.model, batch["images"]
        tokens = model.project(images)
        patches = model.encode(model.add_positions(tokens))[:, model.config.prefix :]
        cells = self.head(patches).float().unflatten(-1, model.config.patch).unflatten(1, tokens.shape[1:-1])
        pixels = cells.permute(0, 1, 3, 2, 4).flatten(1, 2).flatten(2, 3)  # (B, h, w, p, q) -> (B, h p, w q)
        errors = F.mse_loss(pixels, batch["brightness"].float(), reduction="none").flatten(1).mean(1)
        return {"loss": errors.mean(), "worst": errors.max().detach()}

    def deployed_model(self) -> nn.Module:
        return self.model

    def task(self) -> FeatureExtraction:
        return FeatureExtraction()

    def flops(self, progress: TrainingProgress) -> float:
        return 6 * self.model.config.computed_macs()


def tiny_pixels(model, facts, options) -> Run:
    """Train on pixels."""
    run = Run(**base_run_fields(model, facts), objective=TinyPixelsConfig(), views=Augment(flip=0.5), ema=0.9)
    return replace(run, optimizer=OptimizerConfig(lr=3e-3), batch_size=8, epochs=3)


def register_toys(patch: Callable[[Any, str, Any], None] = setattr) -> None:
    """Add both objectives to the tables; `patch` is `setattr` or a monkeypatch's."""
    recipes = [
        Recipe("tiny-dino", tiny_dino, "views", "tests", lr_scaling="fixed", objective=TinyDINOConfig),
        Recipe("tiny-pixels", tiny_pixels, "pixels", "tests", lr_scaling="fixed", objective=TinyPixelsConfig),
    ]
    patch(names, "RECIPE_NAMES", (*names.RECIPE_NAMES, *(recipe.name for recipe in recipes)))
    for recipe in recipes:
        registry.RECIPES[recipe.name], OBJECTIVES[recipe.name] = recipe, recipe.objective


def unregister_toys() -> None:
    """Remove both objectives from the tables."""
    for name in ("tiny-dino", "tiny-pixels"):
        registry.RECIPES.pop(name, None)
        OBJECTIVES.pop(name, None)
