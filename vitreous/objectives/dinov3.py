"""Objective of DINOv3 (arXiv:2508.10104): DINOv2, whose patch similarities are anchored to those of an earlier teacher
(Gram anchoring), with a weight for local views.

Shapes: B images, V views of which 2 are global, b = 2 B global views, N patches of a view, K prototypes, D width.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from vitreous.data.augmentation.views import NUM_GLOBAL_VIEWS
from vitreous.data.batch import Batch
from vitreous.errors import UsageError
from vitreous.models.config import ModelConfig
from vitreous.models.vit import ViT
from vitreous.models.zoo import Model
from vitreous.nn.sizes import format_size, nearest_divisible_size, patch_grid
from vitreous.objectives.base import ObjectiveSetting, TrainingProgress
from vitreous.objectives.dino import cross_view_entropy
from vitreous.objectives.dinov2 import DINOv2, DINOv2Config
from vitreous.objectives.prototypes import PrototypeTeacher

FEATURE_PRODUCTS = 3  # products of (D, N) and (N, D) matrices that `gram_loss` needs if it avoids (N, N) matrices
PATCH_PRODUCTS = 2  # products of (N, D) and (D, N) matrices that it needs otherwise


@dataclass(frozen=True)
class DINOv3Config(DINOv2Config):
    """Options of DINOv3: those of DINOv2, and:

    - `local_weight`: weight of the terms of local views in DINO's loss. DINOv3 lowers it from 1 to 0.5 when Gram
      anchoring begins.
    - `gram_weight`: weight of the Gram loss (`gram_loss`); 0 disables Gram anchoring.
    - `gram_start`: share of the run after which the Gram loss is added. If it is 0, the Gram teacher is the initial
      encoder, such as the weights of `--init`; otherwise it is the EMA teacher at that step.
    - `gram_refresh`: share of the run after which the EMA teacher replaces the Gram teacher, again and again; 0: never.
    - `gram_refreshes`: maximum number of these replacements.

    The Gram teacher sees the anchor views (`views.anchor_scale`), without masks and changes of colour; with
    `anchor_scale` 0 it sees the student's global views. Raises UsageError for invalid values.
    """

    name: Literal["dinov3"] = "dinov3"  # pyright: ignore[reportIncompatibleVariableOverride]
    local_weight: float = 1.0
    gram_weight: float = 0.0
    gram_start: float = 0.0
    gram_refresh: float = 0.0
    gram_refreshes: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.local_weight < 0 or self.gram_weight < 0 or self.gram_refreshes < 0:
            values = f"{self.local_weight:g}, {self.gram_weight:g} and {self.gram_refreshes}"
            raise UsageError(f"local_weight, gram_weight and gram_refreshes must be at least 0, got {values}")
        if not 0 <= self.gram_start < 1 or not 0 <= self.gram_refresh <= 1:
            values = f"{self.gram_start:g} and {self.gram_refresh:g}"
            raise UsageError(f"gram_start and gram_refresh are shares of the run, from 0 to 1, got {values}")

    def check(self, model: ModelConfig, classes: tuple[str, ...], views: Any) -> None:
        """Raise UsageError for models and views that DINOv2 does not support, and for anchor views whose size is not
        divisible by the model's patch."""
        super().check(model, classes, views)
        if not (self.gram_weight and views.anchor_scale):
            return
        size = views.get_anchor_size(model.image)
        if any(length % patch for length, patch in zip(size, model.patch, strict=True)):
            scale = nearest_divisible_size(size, model.patch)[0] / model.image[0]
            raise UsageError(
                f"the size of anchor views, {format_size(size)}, is not divisible by patch size "
                f"{format_size(model.patch)}",
                f"use --views.anchor-scale {scale:.4g}",
            )

    def build(self, model: Model, setting: ObjectiveSetting) -> DINOv3:
        """Build the objective of an encoder. Raises the errors of `with_absolute_paths`."""
        return DINOv3(model, self, setting, PrototypeTeacher(self.teacher, setting.dtype) if self.teacher else None)

    def count_gram_updates(self, progress: TrainingProgress) -> int:
        """Count the replacements of the Gram teacher by the EMA teacher until the end of a step."""
        since_start = progress.fraction_done - self.gram_start
        if since_start < 0 or not self.gram_weight:
            return 0
        refreshes = math.floor(round(since_start / self.gram_refresh, 6)) if self.gram_refresh else 0
        return min(refreshes, self.gram_refreshes) + (self.gram_start > 0)


def previous_progress(progress: TrainingProgress) -> TrainingProgress:
    """Return the progress one step earlier; for step 0, that of step 0."""
    if not progress.step:
        return progress
    samples = progress.samples - progress.samples // progress.step
    return progress._replace(step=progress.step - 1, samples=samples)


class DINOv3(DINOv2):
    """DINOv2's losses, with `local_weight` for the terms of local views, plus `gram_weight` times the Gram loss.

    The input is that of `DINOv2`, and "anchors" (B, 2, C, *anchor size) in steps with the Gram loss. The Gram teacher
    is an encoder in float32, a part of the objective's state.
    """

    logged: ClassVar[tuple[str, ...]] = (*DINOv2.logged, "gram")
    config: DINOv3Config

    def __init__(
        self,
        model: Model,
        config: DINOv3Config = DINOv3Config(),
        setting: ObjectiveSetting = ObjectiveSetting(),
        frozen: PrototypeTeacher | None = None,
    ) -> None:
        super().__init__(model, config, setting, frozen)
        if config.gram_weight:
            self.gram_teacher: ViT = copy.deepcopy(self.model).requires_grad_(False)

    def train(self, mode: bool = True) -> DINOv3:
        """Set training mode; both teachers stay in evaluation mode, without dropout and stochastic depth."""
        super().train(mode)
        if self.config.gram_weight:
            self.gram_teacher.eval()
        return self

    def uses_gram_loss(self, progress: TrainingProgress) -> bool:
        """Return whether the loss of a step contains the Gram loss: from step 0 if `gram_start` is 0, otherwise from
        the step after that at whose end the EMA teacher became the Gram teacher."""
        if not (self.config.gram_weight and self.config.gram_start):
            return bool(self.config.gram_weight)
        return progress.step > 0 and self.config.count_gram_updates(previous_progress(progress)) > 0

    def prepare(self, batch: Batch, progress: TrainingProgress) -> Batch:
        """Draw the masks, set the teacher's temperature, and set the images of the Gram teacher in steps with the Gram
        loss."""
        batch = super().prepare(batch, progress)
        if self.uses_gram_loss(progress):
            return {"anchors": batch["images"], **batch}
        return {name: entry for name, entry in batch.items() if name != "anchors"}

    def compute_view_loss(self, targets: Tensor, logits: Tensor) -> Tensor:
        """Compute DINO's loss, a scalar, with `local_weight` w for local views: targets (B, 2, K), logits (B, V, K).

        It is g G + w l L (DINOv3's `ssl_meta_arch.py`):

        - G is the mean over the 2 pairs of global views, L that over the 2 (V - 2) pairs of a global and a local view.
        - g = 1 / (V - 1) and l = 1 - g are their shares of all pairs.
        """
        loss, num_views, weight = super().compute_view_loss(targets, logits), logits.shape[1], self.config.local_weight
        if weight == 1 or num_views == NUM_GLOBAL_VIEWS:
            return loss
        global_loss = cross_view_entropy(targets, logits[:, :NUM_GLOBAL_VIEWS])
        return weight * loss + (1 - weight) * global_loss / (num_views - 1)

    def compute_patch_losses(self, batch: Batch, patches: Tensor) -> dict[str, tuple[float, Tensor]]:
        """Compute the Gram loss of the student's patch tokens of the global views (b, N, D), masked ones included; 0 in
        steps without it."""
        if "anchors" not in batch:
            return {"gram": (0.0, patches.new_zeros((), dtype=torch.float32))}
        with torch.no_grad():
            targets = self.compute_gram_targets(batch["anchors"].flatten(0, 1), tuple(batch["images"].shape[3:]))
        return {"gram": (self.config.gram_weight, gram_loss(patches, targets))}

    def compute_gram_targets(self, images: Tensor, image: tuple[int, ...]) -> Tensor:
        """Compute the Gram teacher's patch tokens, resized to the student's grid: anchor views (b, C, *anchor size) ->
        (b, N, D) float32. `image` is the size of the student's global views."""
        model, patch, dtype = self.gram_teacher, self.model.config.patch, images.dtype
        with torch.autocast(images.device.type, dtype, enabled=dtype != torch.float32):
            patches = model.features(images)[:, model.config.prefix :]
        return resize_patch_maps(patches, patch_grid(tuple(images.shape[2:]), patch), patch_grid(image, patch))

    def after_step(self, progress: TrainingProgress) -> None:
        """Update the teacher and the centres, and replace the Gram teacher if its time has come."""
        super().after_step(progress)
        count = self.config.count_gram_updates(progress)
        before = self.config.count_gram_updates(previous_progress(progress)) if progress.step else 0
        if count > before:
            self.gram_teacher.load_state_dict(self.teacher.state_dict())

    def flops(self, progress: TrainingProgress) -> float:
        """Return the floating-point operations of DINOv2, and of the Gram teacher's pass over the anchor views in steps
        with it."""
        flops, views = super().flops(progress), self.setting.views
        if not self.uses_gram_loss(progress):
            return flops
        config = cast(ModelConfig, self.gram_teacher.config)
        size = views.get_anchor_size(config.image) if views.anchor_scale else config.image
        return flops + 2 * NUM_GLOBAL_VIEWS * config.computed_macs(size)


def gram_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Compute the mean squared difference of the patch similarities, a scalar: patch tokens of the student and of the
    Gram teacher, both (b, N, D) (arXiv:2508.10104, Eq. 2, as in DINOv3's code).

    Tokens are normalised to length one, in float32. Similarities are those within an image.

        X, Y = normalize(student), normalize(teacher); loss = (X X^T - Y Y^T).square().mean()

    If an image has more patches than about 1.5 D, no (N, N) matrix is computed. With E = X - Y and F = X + Y:

        X X^T - Y Y^T = (E F^T + F E^T) / 2; its squared norm = (<E^T E, F^T F> + <E^T F, F^T E>) / 2

    Unlike |X^T X|^2 + |Y^T Y|^2 - 2 |X^T Y|^2, which is equal, this loses no digits if student and teacher are similar.
    """
    student, teacher = F.normalize(student.float(), dim=-1), F.normalize(teacher.float(), dim=-1)
    patches, width = student.shape[1:]
    if PATCH_PRODUCTS * patches <= FEATURE_PRODUCTS * width:
        return (student @ student.mT - teacher @ teacher.mT).square().mean()
    difference, total = student - teacher, student + teacher
    cross = difference.mT @ total
    products = (difference.mT @ difference) * (total.mT @ total) + cross * cross.mT
    return products.sum((1, 2)).mean() / (2 * patches**2)


def resize_patch_maps(patches: Tensor, old_grid: tuple[int, ...], grid: tuple[int, ...]) -> Tensor:
    """Resize patch tokens of a grid to another grid, bicubic without antialiasing, as DINOv3's code does with the
    tokens of its Gram teacher: (b, N, D) -> (b, N', D) float32."""
    if old_grid == grid:
        return patches.float()
    maps = torch.unflatten(patches.float(), 1, old_grid).permute(0, 3, 1, 2)
    resized = F.interpolate(maps, grid, mode="bicubic", antialias=False, align_corners=False)
    return resized.flatten(2).mT
