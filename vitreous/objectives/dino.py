"""DINO, self-distillation without labels (arXiv:2104.14294): a student sees all views of an image and predicts the
outputs of a teacher, its moving average, for the global views.

B images, V views of which 2 are global, K prototypes, D width.
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

UNIFORM_ENTROPY_SHARE = 0.999  # share of ln K: entropy from which a teacher is uninformative
ONE_PROTOTYPE_ENTROPY = 0.05  # nats: entropy of the mean target up to which one prototype covers all images


@dataclass(frozen=True)
class DINOConfig(HeadOptions, ObjectiveConfig):
    """DINO; the defaults are those of the authors' code.

    `temperature` is the student's; the schedule `teacher_temperature` is the teacher's. The schedule `momentum` is the
    EMA momentum of the teacher. `centre_momentum` is that of the mean of the teacher's outputs, which is subtracted
    from them. The prototypes are frozen for the first share `frozen` of the run. Raises UsageError for invalid values.

    `koleo` is the weight of KoLeo on the global views (DINOv2's loss that spreads features; 0, as in the authors' code:
    none). `batch_norm` requires it: the head then ignores the component that all features share, which would grow until
    features collapse.
    """

    name: Literal["dino"] = "dino"
    temperature: float = 0.1
    centre_momentum: float = 0.9
    frozen: float = 0.01
    koleo: float = 0.0

    @property
    def can_split_batch(self) -> bool:
        """False: the teacher's centre is that of all samples."""
        return False

    def __post_init__(self) -> None:
        check_head(self)
        if self.koleo < 0:
            raise UsageError(f"objective.koleo is {self.koleo:g}, which would make features collapse", "use 0 or more")
        if self.temperature <= 0 or not 0 <= self.centre_momentum <= 1:
            raise UsageError("temperatures must be above 0, momenta from 0 to 1")

    def check(self, model: ModelConfig, classes: tuple[str, ...], views: Any) -> None:
        """Raise UsageError for a single view, and local views whose size the patch does not divide."""
        check_views(views, MultiCrop, self.name)
        check_local_views(model, views)

    def build(self, model: Model, setting: ObjectiveSetting) -> DINO:
        """Build the objective of an encoder."""
        return DINO(model, self, setting)


class DINO(UnlabelledObjective):
    """Cross-entropy of the student's views with the teacher's, in nats, mean over all pairs of different views.

    Takes {"images": (B, 2, C, *image), "local": (B, V - 2, C, *local image)}. The teacher's parameters are float32
    state, updated from the student's after each step.
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
        #: the sum of the teacher's outputs since the last step, and their number
        self.register_buffer("outputs", torch.zeros(config.prototypes + 1), persistent=False)

    @property
    def collapse_hint(self) -> str:
        """Add KoLeo if it is not used, because only it spreads features; otherwise increase it, or use smaller
        steps."""
        if self.config.koleo:
            return f"raise --objective.koleo (now {self.config.koleo:g}), lower --lr, or use larger batches"
        reason = (
            "the head's batch norm hides the component that all features share"
            if self.config.batch_norm
            else "no loss term prevents it"
        )
        return f"{reason}; use --objective.koleo 0.1, lower --lr, or use larger batches"

    def train(self, mode: bool = True) -> DINO:
        """Set training mode; the teacher has neither dropout nor stochastic depth."""
        super().train(mode)
        self.teacher.eval()
        return self

    def prepare(self, batch: Batch, progress: TrainingProgress) -> Batch:
        """Set the teacher's temperature."""
        self.temperature.fill_(progress.values.get("teacher_temperature", 0.04))
        return batch

    def forward(self, batch: Batch) -> dict[str, Tensor]:
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
        """(B, 2, C, *image) -> (B, 2, K) float32: the teacher's outputs."""
        dtype = images.dtype
        with torch.autocast(images.device.type, dtype, enabled=dtype != torch.float32):
            features = self.teacher(images.flatten(0, 1))
        return self.teacher_head(features.float(), self.reduce, self.is_idle).unflatten(0, images.shape[:2])

    def after_step(self, progress: TrainingProgress) -> None:
        """Update the teacher from the student, and the centre from the teacher's outputs of this step."""
        momentum = progress.values.get("momentum", 0.996)
        update_teacher_ema((self.model, self.head), (self.teacher, self.teacher_head), momentum)
        mean = self.reduce(self.outputs)
        self.centre.lerp_(mean[:-1] / mean[-1], 1 - self.config.centre_momentum)
        self.outputs.zero_()

    def deployed_model(self) -> Model:
        """Return the teacher."""
        return self.teacher

    def warnings(self, scalars: Mapping[str, float], progress: TrainingProgress) -> Iterator[tuple[str, str]]:
        """Detect collapse: of the features, of all targets to the same one, or of targets to uniform ones."""
        yield from super().warnings(scalars, progress)
        yield from detect_target_collapse(scalars, self.config.prototypes, progress)

    def frozen_at_start(self) -> tuple[str, ...]:
        """Return the prototypes."""
        return prototype_names(self, "head")

    def frozen_update(self, progress: TrainingProgress) -> FrozenUpdate | None:
        """Skip the prototypes during the first share of the run; the authors' code sets their gradient to None."""
        return "skip" if progress.fraction_done < self.config.frozen else None

    def flops(self, progress: TrainingProgress) -> float:
        """Three passes of the student over every view, one of the teacher over the global ones; heads included."""
        views, shape = self.setting.views, self.teacher.config
        head = sum(weight.numel() for weight in self.head.parameters() if weight.ndim == 2)
        global_macs, local_macs = (
            shape.computed_macs() + head,
            shape.computed_macs(views.local_image) + head if views.locals else 0,
        )
        return 2 * (4 * NUM_GLOBAL_VIEWS * global_macs + 3 * views.locals * local_macs)


def prototype_names(objective: nn.Module, *heads: str) -> tuple[str, ...]:
    """Return the names of the prototypes of an objective's heads and, if trainable, of their lengths."""
    names = [f"{head}.{name}" for head in heads for name in ("prototypes.weight", "lengths")]
    parameters = dict(objective.named_parameters())
    return tuple(name for name in names if name in parameters)


def accumulate_outputs(outputs: Tensor, new_outputs: Tensor, idle: bool) -> None:
    """Add the sum and the number of (n, K) outputs to (K + 1,) `outputs`; nothing if the batch is `idle`."""
    if not idle:
        outputs += torch.cat([new_outputs.sum(0), new_outputs.new_full((1,), len(new_outputs))])


def cross_view_entropy(targets: Tensor, logits: Tensor) -> Tensor:
    """(B, 2, K) probabilities q, (B, V, K) logits s -> a scalar: the mean over pairs i, v != i of -sum_k q_ik log p_vk.

        for i in range(2): for v in range(V): if v != i: loss -= (q[:, i] * log_softmax(s[:, v])).sum(-1).mean()
        loss /= 2 (V - 1)

    As each q_i sums to one, a term is log sum exp(s_v) - q_i s_v, and the s_v can be summed first.
    """
    views, evidence = logits.shape[1], logits.logsumexp(-1)
    other_logits = logits.sum(1, keepdim=True) - logits[:, :NUM_GLOBAL_VIEWS]
    matched = (targets * other_logits).sum(-1)
    return (evidence.sum(1, keepdim=True) - evidence[:, :NUM_GLOBAL_VIEWS] - matched).mean() / (views - 1)


def compute_target_metrics(targets: Tensor, features: Tensor) -> dict[str, Tensor]:
    """(..., K) probabilities, (n, D) features -> scalars: the mean entropy of the targets and the entropy of their
    mean, in nats, 0 to ln K; and the std over the images of features of length one, 0 to 1 / sqrt(D)."""
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
    """Return warnings of a collapse of the targets, after the start of the run."""
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
    """Update teacher <- momentum teacher + (1 - momentum) student, for each parameter, in float32.

    Buffers, such as the statistics of a batch norm, are copied from the student. A sharded student (FSDP2) is gathered
    one parameter at a time.
    """
    pairs = zip(nn.ModuleList(student).parameters(), nn.ModuleList(teacher).parameters(), strict=True)
    for weight, teacher_tensor in pairs:
        gather: Callable[[], Tensor] | None = getattr(weight, "full_tensor", None)
        gathered = weight if gather is None else gather()
        teacher_tensor.lerp_(gathered.detach().to(teacher_tensor.dtype), 1 - momentum)
    for buffer, teacher_tensor in zip(nn.ModuleList(student).buffers(), nn.ModuleList(teacher).buffers(), strict=True):
        teacher_tensor.copy_(buffer)
