"""Objective of feature distillation without labels: a student of any family reproduces the pooled features and the
feature map of a frozen teacher of any family, with the losses of AM-RADIO (arXiv:2312.06709) for a single teacher.

Shapes: B images of C channels, D channels of the student's tokens, T channels of the teacher's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitreous.data.augmentation.augment import Augment
from vitreous.data.batch import Batch
from vitreous.errors import UsageError
from vitreous.inspection.hooks import eval_mode, get_patch_grid
from vitreous.models.config import ModelConfig
from vitreous.models.zoo import Model
from vitreous.nn.sizes import nearest_divisible_size
from vitreous.objectives.base import ObjectiveConfig, ObjectiveSetting, TrainingProgress
from vitreous.objectives.prototypes import check_teacher_fits
from vitreous.objectives.teacher import WeightsTeacher, absolute_source, check_teacher_digest
from vitreous.objectives.unlabelled import UnlabelledObjective, check_views
from vitreous.weights.adopt import open_weights

MIN_TEACHER_SIDE = 224  # pixels: smallest input of a teacher whose native input is at least as large


@dataclass(frozen=True)
class FeatureDistillationConfig(ObjectiveConfig):
    """Options of feature distillation.

    - `teacher`: a run, a bundle, or other weights. Its head, if it has one, is not used.
    - `teacher_size`: height and width of the teacher's input in pixels; 0: chosen for the student's images when the run
      begins (`choose_teacher_size`).
    - `pooled_weight`, `patch_weight`: weights of the losses of pooled features and of feature maps.
    - `smooth_l1`: share of the smooth L1 loss in the loss of feature maps; the remainder is the cosine distance.

    Raises UsageError for invalid values.
    """

    name: Literal["feature-distillation"] = "feature-distillation"
    teacher: str = ""
    teacher_size: int = 0
    pooled_weight: float = 1.0
    patch_weight: float = 1.0
    smooth_l1: float = 0.1

    def __post_init__(self) -> None:
        weights = (self.pooled_weight, self.patch_weight)
        if min(weights) < 0 or not sum(weights) or not 0 <= self.smooth_l1 <= 1:
            values = f"{self.pooled_weight:g}, {self.patch_weight:g} and {self.smooth_l1:g}"
            raise UsageError(
                f"pooled_weight and patch_weight must be at least 0, one of them above 0, and smooth_l1 from 0 to 1, "
                f"got {values}"
            )
        if self.teacher_size < 0:
            raise UsageError(f"teacher_size {self.teacher_size} is below 0", "use a size in pixels, or 0")

    def check(self, model: ModelConfig, classes: tuple[str, ...], views: Any) -> None:
        """Raise UsageError for views that are not those of single images."""
        check_views(views, Augment, self.name)

    def with_absolute_paths(self, model: ModelConfig, classes: tuple[str, ...]) -> FeatureDistillationConfig:
        """Return the config with the absolute path of the teacher and the size of its input.

        Raises UsageError without a teacher, for a teacher with other channels or image axes than the student, or for an
        input size that the teacher does not support, WeightsError for an unreadable teacher.
        """
        teacher = FeatureTeacher(self.teacher)
        check_teacher_fits(teacher, model)
        side = self.teacher_size or choose_teacher_size(teacher.model.config, model)[0]
        teacher.model.config.check_image_size((side, side))
        return replace(self, teacher=absolute_source(self.teacher), teacher_size=side)

    def build(self, model: Model, setting: ObjectiveSetting) -> FeatureDistillation:
        """Build the objective of a student. Raises the errors of `with_absolute_paths`."""
        return FeatureDistillation(model, self, setting, FeatureTeacher(self.teacher, setting.dtype))


def choose_teacher_size(teacher: ModelConfig, student: ModelConfig) -> tuple[int, ...]:
    """Choose the size of the teacher's input for a student: the teacher's native size if it has windows or stages, or
    is smaller than 224 pixels; otherwise about the student's image size, but from 224 pixels to the native size."""
    native_size = teacher.image
    if not teacher.drops_patches or max(native_size) < MIN_TEACHER_SIDE:
        return native_size
    side = min(max(*student.image, MIN_TEACHER_SIDE), max(native_size))
    return nearest_divisible_size((side,) * len(native_size), teacher.patch)


class FeatureTeacher(WeightsTeacher):
    """Frozen encoder of any family, which computes pooled features and a feature map. Its weights are float32, and
    autocast computes in `dtype`, because some families mix dtypes in half precision.

    Raises UsageError if no teacher is set, WeightsError if it cannot be read.
    """

    def __init__(self, source: str, dtype: torch.dtype = torch.float32) -> None:
        if not source:
            raise UsageError("no teacher is set", "set its weights with --teacher")
        super().__init__(source, open_weights(source).build_bundle())
        self.autocast_dtype = dtype

    def compute_features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Compute features of images from `to_teacher_input`: (B, C, *teacher image) -> pooled (B, F) and map
        (B, *grid, T), both float32, on the same device."""
        model, dtype = self.get_model_on(images.device), self.autocast_dtype
        model.any_size = True
        with torch.no_grad(), torch.autocast(images.device.type, dtype, enabled=dtype != torch.float32):
            return encode_features(model, images.float())


def encode_features(model: Model, images: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the pooled features (B, F) and the feature map (B, *grid, D) of images (B, C, *image), both float32: the
    patch tokens after the last norm, or the last map of a convolutional network or Swin."""
    tokens = model.features(images)
    patches = tokens[:, getattr(model.config, "prefix", 0) :]
    return model.pool(tokens).float(), torch.unflatten(patches, 1, get_patch_grid(model, images)).float()


def standardise_positions(features: Tensor) -> Tensor:
    """Standardise features (..., T) to mean 0 and variance 1 over the channels of each position, so that losses of all
    teachers have the same scale, as in data2vec (arXiv:2202.03555)."""
    return F.layer_norm(features, features.shape[-1:])


def map_loss(student: Tensor, teacher: Tensor, smooth_l1: float) -> Tensor:
    """Compute the loss between maps (B, *grid, T), a scalar: the mean over positions of (1 - w) times the cosine
    distance plus w times the smooth L1 loss, w = `smooth_l1` (as in AM-RADIO)."""
    distance = (1 - F.cosine_similarity(student, teacher, -1)).mean()
    return (1 - smooth_l1) * distance + smooth_l1 * F.smooth_l1_loss(student, teacher)


class FeatureDistillation(UnlabelledObjective):
    """The cosine distance of the pooled features times `pooled_weight`, plus the loss of the maps (`map_loss`) times
    `patch_weight`, between the student, projected linearly if its width differs, and the teacher.

    The input is {"images": (B, C, *image), "teacher_pooled": (B, F), "teacher_map": (B, *grid, T)}. The student's map
    is resized to the teacher's grid. Checkpoints do not contain the teacher: the run's config contains its name, a
    checkpoint its digest.
    """

    logged: ClassVar[tuple[str, ...]] = ("pooled", "patches")
    digest: Tensor

    def __init__(
        self, model: Model, config: FeatureDistillationConfig, setting: ObjectiveSetting, teacher: FeatureTeacher
    ) -> None:
        super().__init__()
        self.config, self.setting, self.teacher = config, setting, teacher
        check_teacher_fits(teacher, model.config)
        side = config.teacher_size or choose_teacher_size(teacher.model.config, model.config)[0]
        teacher.size = (side, side)
        self.model = model
        self.register_buffer("digest", teacher.digest.clone())
        widths = measure_feature_widths(model, model.config.image), measure_feature_widths(teacher.model, teacher.size)
        (pooled_width, map_width), (teacher_pooled_width, teacher_map_width) = widths
        self.pooled_projection = build_projection(pooled_width, teacher_pooled_width)
        self.map_projection = build_projection(map_width, teacher_map_width)

    def prepare(self, batch: Batch, progress: TrainingProgress) -> Batch:
        """Compute the teacher's features of the images. Raises WeightsError if the teacher of a resumed run has
        changed."""
        check_teacher_digest(self.teacher, self.digest)
        images = self.teacher.to_teacher_input(batch["images"], self.setting.normalisation)
        pooled, feature_map = self.teacher.compute_features(images)
        return {**batch, "teacher_pooled": pooled, "teacher_map": standardise_positions(feature_map)}

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Compute the loss and its two terms, scalars."""
        config, pooled_target, map_target = self.config, batch["teacher_pooled"], batch["teacher_map"]
        pooled, feature_map = encode_features(self.model, batch["images"])
        pooled = self.pooled_projection(pooled.to(batch["images"].dtype)).float()
        feature_map = self.map_projection(feature_map.to(batch["images"].dtype)).float()
        grid = map_target.shape[1:-1]
        if feature_map.shape[1:-1] != grid:
            resized = F.interpolate(feature_map.movedim(-1, 1), tuple(grid), mode="bilinear", antialias=True)
            feature_map = resized.movedim(1, -1)
        losses = {
            "pooled": (1 - F.cosine_similarity(pooled, pooled_target, -1)).mean(),
            "patches": map_loss(feature_map, map_target, config.smooth_l1),
        }
        loss = config.pooled_weight * losses["pooled"] + config.patch_weight * losses["patches"]
        return {"loss": loss, **{name: value.detach() for name, value in losses.items()}}

    def flops(self, progress: TrainingProgress) -> float:
        """Return the floating-point operations of three passes of the student and one of the teacher, without
        projections."""
        return 6 * self.model.config.computed_macs() + 2 * self.teacher.model.config.macs(self.teacher.size)


def measure_feature_widths(model: Model, size: tuple[int, ...]) -> tuple[int, int]:
    """Return the number of channels of a model's pooled features and of its feature map, measured with two images of
    the size `size`, because norms over groups of channels need more than one value."""
    parameter = model.first_parameter()
    images = parameter.new_zeros(2, model.config.channels, *size)
    with eval_mode(model):
        model.any_size = True
        pooled, feature_map = encode_features(model, images)
    return pooled.shape[-1], feature_map.shape[-1]


def build_projection(width: int, target_width: int) -> nn.Module:
    """Build a linear layer (..., width) -> (..., target_width); the identity if they are equal."""
    return nn.Identity() if width == target_width else nn.Linear(width, target_width)
