"""Objective of DINO, self-distillation without labels (arXiv:2104.14294).

A student encodes all views of an image and predicts the outputs of a teacher for the global views. The teacher is the
moving average (EMA) of the student. Outputs are logits over K learned prototypes.

Shapes: B images, V views of which 2 are global, K prototypes, D width.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitreous.data.augmentation.views import NUM_GLOBAL_VIEWS, MultiCrop
from vitreous.data.batch import Batch
from vitreous.errors import UsageError
from vitreous.models.config import ModelConfig
from vitreous.models.zoo import Model
from vitreous.objectives.base import FrozenUpdate, ObjectiveConfig, ObjectiveSetting, TrainingProgress
from vitreous.objectives.heads import DINOHead, HeadOptions, check_head, compute_prototype_logits
from vitreous.objectives.unlabelled import (
    COLLAPSE_CHECK_START,
    UnlabelledObjective,
    check_local_views,
    check_views,
    koleo_loss_of_views,
)

UNIFORM_ENTROPY_SHARE = 0.999  # share of the maximum entropy ln K above which targets are uninformative
ONE_PROTOTYPE_ENTROPY = 0.05  # nats: entropy of the mean target below which all images have the same prototype


@dataclass(frozen=True)
class DINOConfig(HeadOptions, ObjectiveConfig):
    """Options of DINO; the defaults are those of the authors' code.

    - `temperature`: the temperature of the student. The schedule `teacher_temperature` is the teacher's, and the
      schedule `momentum` is the EMA momentum of the teacher.
    - `centre_momentum`: momentum of the centre, the moving mean of the teacher's outputs, which is subtracted from
      them.
    - `frozen`: share of the run, at its start, in which the prototypes are frozen.
    - `koleo`: weight of KoLeo on the global views, DINOv2's loss that spreads features; 0, as in the authors' code,
      disables it. `batch_norm` of the head requires it: the head then ignores the component that all features share,
      which would grow until features collapse.

    Raises UsageError for invalid values.
    """

    guards_drift: ClassVar[bool] = True

    name: Literal["dino"] = "dino"
    temperature: float = 0.1
    centre_momentum: float = 0.9
    frozen: float = 0.01
    koleo: float = 0.0

    @property
    def can_split_batch(self) -> bool:
        """Return False, because the teacher's centre is a mean over all samples."""
        return False

    def __post_init__(self) -> None:
        check_head(self)
        if self.koleo < 0:
            raise UsageError(f"objective.koleo {self.koleo:g} would make features collapse", "use 0 or more")
        if self.temperature <= 0 or not 0 <= self.centre_momentum <= 1:
            values = f"{self.temperature:g} and {self.centre_momentum:g}"
            raise UsageError(f"temperature must be above 0 and centre_momentum from 0 to 1, got {values}")

    def check(self, model: ModelConfig, classes: tuple[str, ...], views: Any) -> None:
        """Raise UsageError for views that are not multi-crop, and for local views whose size is not divisible by the
        patch."""
        check_views(views, MultiCrop, self.name)
        check_local_views(model, views)

    def build(self, model: Model, setting: ObjectiveSetting) -> DINO:
        """Build the objective of an encoder."""
        return DINO(model, self, setting)


class DINO(UnlabelledObjective):
    """Cross-entropy between the student's views and the teacher's global views, in nats, as the mean over all pairs of
    different views.

    The input is {"images": (B, 2, C, *image), "local": (B, V - 2, C, *local image)}. The teacher's parameters are
    float32 state, updated from the student's after each step.
    """

    capturable: ClassVar[bool] = True

    compares_views: ClassVar[bool] = True
    logged: ClassVar[tuple[str, ...]] = ("teacher_entropy", "prototype_entropy", "feature_std")
    centre: Tensor
    temperature: Tensor
    outputs: Tensor

    def __init__(
        self, model: Model, config: DINOConfig = DINOConfig(), setting: ObjectiveSetting = ObjectiveSetting()
    ) -> None:
        super().__init__()
        self.config, self.setting = config, setting
        self.model, self.head = model, DINOHead(model.config.num_features, config)
        self.teacher: Model = copy.deepcopy(model).requires_grad_(False)
        self.teacher_head = copy.deepcopy(self.head).requires_grad_(False)
        self.model.any_size = self.teacher.any_size = True
        self.register_buffer("centre", torch.zeros(config.prototypes))
        self.register_buffer("temperature", torch.tensor(0.04), persistent=False)
        # the sum of the teacher's outputs since the last step (K entries), and their number
        self.register_buffer("outputs", torch.zeros(config.prototypes + 1), persistent=False)

    @property
    def collapse_hint(self) -> str:
        """Return the settings that prevent collapse of the features, with the reason for it.

        KoLeo is the only term that spreads features. If it is used, the hint is to increase it, or to use smaller
        steps.
        """
        if self.config.koleo:
            return f"raise --objective.koleo (now {self.config.koleo:g}), lower --lr, or use larger batches"
        reason = (
            "the head's batch norm hides the component that all features share"
            if self.config.batch_norm
            else "no loss term prevents it"
        )
        return f"{reason}; use --objective.koleo 0.1, lower --lr, or use larger batches"

    def train(self, mode: bool = True) -> DINO:
        """Set training mode; the teacher stays in evaluation mode, without dropout and stochastic depth."""
        super().train(mode)
        self.teacher.eval()
        return self

    def prepare(self, batch: Batch, progress: TrainingProgress) -> Batch:
        """Set the teacher's temperature for this step; the batch is unchanged."""
        self.temperature.fill_(progress.values.get("teacher_temperature", 0.04))
        return batch

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Compute the loss and the metrics of `compute_target_metrics`, as scalars, and accumulate the teacher's
        outputs."""
        images = batch["images"]
        with torch.no_grad():
            teacher_logits = self.compute_teacher_outputs(images)
            accumulate_outputs(self.outputs, teacher_logits.flatten(0, 1), self.is_idle)
            targets = ((teacher_logits - self.centre) / self.temperature).softmax(-1)
        features = [self.model(batch[name].flatten(0, 1)) for name in ("images", "local") if batch[name].shape[1]]
        logits = compute_prototype_logits(self.head, features, len(images), self.reduce, self.is_idle)
        loss = cross_view_entropy(targets, logits / self.config.temperature)
        if self.config.koleo:
            loss = loss + self.config.koleo * koleo_loss_of_views(
                features[0].unflatten(0, (len(images), NUM_GLOBAL_VIEWS)), self.gather, self.is_idle
            )
        return {"loss": loss, **compute_target_metrics(targets, features[0])}

    def compute_teacher_outputs(self, images: Tensor) -> Tensor:
        """Compute the teacher's prototype logits for the global views: (B, 2, C, *image) -> (B, 2, K) float32."""
        dtype = images.dtype
        with torch.autocast(images.device.type, dtype, enabled=dtype != torch.float32):
            features = self.teacher(images.flatten(0, 1))
        return self.teacher_head(features.float(), self.reduce, self.is_idle).unflatten(0, images.shape[:2])

    def after_step(self, progress: TrainingProgress) -> None:
        """Update the teacher from the student, and the centre from the teacher's outputs in this step."""
        momentum = progress.values.get("momentum", 0.996)
        update_teacher_ema((self.model, self.head), (self.teacher, self.teacher_head), momentum)
        mean = self.reduce(self.outputs)
        self.centre.lerp_(mean[:-1] / mean[-1], 1 - self.config.centre_momentum)
        self.outputs.zero_()

    def deployed_model(self) -> Model:
        """Return the teacher."""
        return self.teacher

    def warnings(self, scalars: Mapping[str, float], progress: TrainingProgress) -> Iterator[tuple[str, str]]:
        """Detect collapse: of the features, of all targets to the same prototype, or of targets to a uniform
        distribution."""
        yield from super().warnings(scalars, progress)
        yield from detect_target_collapse(scalars, self.config.prototypes, progress)

    def frozen_at_start(self) -> tuple[str, ...]:
        """Return the names of the prototypes."""
        return prototype_names(self, "head")

    def frozen_update(self, progress: TrainingProgress) -> FrozenUpdate | None:
        """Return "skip" during the first share `frozen` of the run, because the authors' code sets the gradient of the
        prototypes to None."""
        return "skip" if progress.fraction_done < self.config.frozen else None

    def flops(self, progress: TrainingProgress) -> float:
        """Return the floating-point operations of three passes of the student over every view, and one pass of the
        teacher over the global views; heads included."""
        views, config = self.setting.views, self.teacher.config
        head_macs = sum(weight.numel() for weight in self.head.parameters() if weight.ndim == 2)
        global_macs = config.computed_macs() + head_macs
        local_macs = config.computed_macs(views.local_image) + head_macs if views.locals else 0
        return 2 * (4 * NUM_GLOBAL_VIEWS * global_macs + 3 * views.locals * local_macs)


def prototype_names(objective: nn.Module, *heads: str) -> tuple[str, ...]:
    """Return the parameter names of the prototypes of these heads of an objective, and of their lengths if they are
    trainable."""
    names = [f"{head}.{name}" for head in heads for name in ("prototypes.weight", "lengths")]
    parameters = dict(objective.named_parameters())
    return tuple(name for name in names if name in parameters)


def accumulate_outputs(outputs: Tensor, new_outputs: Tensor, is_idle: bool) -> None:
    """Add the sum and the number of `new_outputs` (n, K) to `outputs` (K + 1,) in place, unless the process is
    `is_idle` (`Objective.is_idle`)."""
    if not is_idle:
        outputs += torch.cat([new_outputs.sum(0), new_outputs.new_full((1,), len(new_outputs))])


def cross_view_entropy(targets: Tensor, logits: Tensor) -> Tensor:
    """Compute the cross-entropy between global views and all other views of an image, a scalar: targets q (B, 2, K),
    logits s (B, V, K).

    It is the mean over all pairs of a global view i and another view v of -sum_k q_ik log softmax(s_v)_k:

        for i in range(2): for v in range(V): if v != i: loss -= (q[:, i] * log_softmax(s[:, v])).sum(-1).mean()
        loss /= 2 (V - 1)

    As each q_i sums to one, a term is log sum exp(s_v) - q_i s_v, so the s_v can be summed first.
    """
    num_views, log_norms = logits.shape[1], logits.logsumexp(-1)
    other_logits = logits.sum(1, keepdim=True) - logits[:, :NUM_GLOBAL_VIEWS]
    products = (targets * other_logits).sum(-1)
    return (log_norms.sum(1, keepdim=True) - log_norms[:, :NUM_GLOBAL_VIEWS] - products).mean() / (num_views - 1)


def compute_target_metrics(targets: Tensor, features: Tensor) -> dict[str, Tensor]:
    """Compute metrics of targets (..., K) and features (n, D), as scalars.

    - "teacher_entropy": mean entropy of the targets, in nats, 0 to ln K.
    - "prototype_entropy": entropy of the mean target, in nats, 0 to ln K.
    - "feature_std": std over the images of features of length one, 0 to 1 / sqrt(D).
    """
    probabilities = targets.flatten(0, -2)
    mean = probabilities.mean(0)
    return {
        "teacher_entropy": -(probabilities * probabilities.clamp_min(1e-12).log()).sum(-1).mean(),
        "prototype_entropy": -(mean * mean.clamp_min(1e-12).log()).sum(),
        "feature_std": F.normalize(features.detach().float(), dim=-1).std(0, correction=0).mean(),
    }


def detect_target_collapse(
    scalars: Mapping[str, float], prototypes: int, progress: TrainingProgress
) -> Iterator[tuple[str, str]]:
    """Yield warnings of a collapse of the targets, after the start of the run."""
    if progress.fraction_done < COLLAPSE_CHECK_START or "teacher_entropy" not in scalars:
        return
    if scalars["teacher_entropy"] > UNIFORM_ENTROPY_SHARE * math.log(prototypes):
        yield (
            "uniform teacher",
            (
                "the teacher's outputs are uniform for every image, so there is nothing to learn: lower its "
                "temperature (--schedules.teacher_temperature.end 0.04), or --objective.prototypes"
            ),
        )
    if scalars["prototype_entropy"] < ONE_PROTOTYPE_ENTROPY:
        yield (
            "one prototype",
            (
                "the teacher assigns one prototype to every image, so there is nothing to learn: raise its temperature "
                "(--schedules.teacher_temperature.end 0.07), lower --lr, or use larger batches"
            ),
        )


def update_teacher_ema(student: tuple[nn.Module, ...], teacher: tuple[nn.Module, ...], momentum: float) -> None:
    """Update each parameter of the teacher in place, in float32: teacher <- momentum teacher + (1 - momentum) student.

    Frozen parameters of the student, which LoRA may store in half precision, are skipped: those of the teacher are
    their float32 originals. Buffers, such as the statistics of a batch norm, are copied from the student. A sharded
    student (FSDP2) is gathered one parameter at a time.
    """
    pairs = zip(nn.ModuleList(student).parameters(), nn.ModuleList(teacher).parameters(), strict=True)
    for weight, teacher_tensor in pairs:
        if not weight.requires_grad:
            continue
        gather: Callable[[], Tensor] | None = getattr(weight, "full_tensor", None)
        gathered = weight if gather is None else gather()
        teacher_tensor.lerp_(gathered.detach().to(teacher_tensor.dtype), 1 - momentum)
    for buffer, teacher_tensor in zip(nn.ModuleList(student).buffers(), nn.ModuleList(teacher).buffers(), strict=True):
        teacher_tensor.copy_(buffer)
