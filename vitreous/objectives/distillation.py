"""Knowledge distillation: supervised training with labels and a teacher (DeiT, arXiv:2012.12877, section 3.2).

B images, K classes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from vitreous.data.batch import Batch
from vitreous.errors import UsageError
from vitreous.models.config import ModelConfig
from vitreous.models.vit import ViT
from vitreous.models.zoo import Model
from vitreous.nn.grid import gather_tokens
from vitreous.nn.pool import DistilledHeads
from vitreous.objectives.base import ObjectiveSetting, TrainingProgress
from vitreous.objectives.supervised import SupervisedConfig, SupervisedObjective, cross_entropy
from vitreous.objectives.teacher import Teacher, absolute_source, check_teacher_digest, open_teacher
from vitreous.system.machine import copy_to_device


@dataclass(frozen=True)
class DistillationConfig(SupervisedConfig):
    """The loss of labels, and the loss relative to a `teacher` on the same images.

    The teacher is a run, a bundle, other weights or an ONNX file. `teacher_mean` and `teacher_std` are its mean and std
    if it does not contain them. A model with a distillation token (`deit_small_distilled_patch16_224`) has a head for
    each loss; another model uses a single head for both.

    `kind` hard: cross-entropy with the teacher's most likely class; soft: the divergence of probabilities at
    `temperature`, times its square. The divergence is divided by the number of images (`batchmean`), or as in DeiT's
    code by that of images times classes (`official`). `alpha` is the weight of the teacher's loss. Raises UsageError
    for invalid values.
    """

    name: Literal["distillation"] = "distillation"  # type: ignore[assignment]
    teacher: str = ""
    kind: Literal["hard", "soft"] = "hard"
    alpha: float = 0.5
    temperature: float = 1.0
    reduction: Literal["batchmean", "official"] = "batchmean"
    teacher_mean: tuple[float, ...] = ()
    teacher_std: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.alpha <= 1 or self.temperature <= 0:
            raise UsageError("alpha must be from 0 to 1, temperature above 0")
        if len(self.teacher_mean) != len(self.teacher_std) or any(std <= 0 for std in self.teacher_std):
            raise UsageError("teacher_mean and teacher_std must have one number per channel, std above 0")

    def with_absolute_paths(self, model: ModelConfig, classes: tuple[str, ...]) -> DistillationConfig:
        """Return the config with the teacher's absolute path. Raises UsageError without a teacher, or for a teacher
        with other classes or channels; WeightsError for an unreadable one."""
        match_teacher_classes(self.open_teacher(), self.teacher, model, classes)
        return replace(self, teacher=absolute_source(self.teacher))

    def open_teacher(self, dtype: torch.dtype = torch.float32) -> Teacher:
        """Open the teacher. Raises UsageError if it is missing, WeightsError if it cannot be read."""
        return open_teacher(self.teacher, dtype, (self.teacher_mean, self.teacher_std) if self.teacher_mean else None)

    def build(self, model: Model, setting: ObjectiveSetting) -> DistillationObjective:
        """Build the objective of a student. Raises UsageError and WeightsError as `located`."""
        return DistillationObjective(model, self, setting, self.open_teacher(setting.dtype))


class DistillationObjective(SupervisedObjective):
    """(1 - alpha) times the loss of the labels, and alpha times the loss relative to the teacher.

    Takes the input of `SupervisedObjective`, and "teacher_logits" (B, K) float32: the teacher's logits for the same
    mixed images. The teacher is not stored in checkpoints: its name is in the run's config, its digest in the
    checkpoint. Raises UsageError for a teacher with other classes or channels.
    """

    digest: Tensor

    def __init__(self, model: Model, config: DistillationConfig, setting: ObjectiveSetting, teacher: Teacher) -> None:
        super().__init__(model, config, setting)
        self.distillation, self.teacher = config, teacher
        self.order = match_teacher_classes(teacher, config.teacher, model.config, setting.classes)
        self.register_buffer("digest", teacher.digest.clone())  # checkpoints store the digest of the initial teacher

    def prepare(self, batch: Batch, progress: TrainingProgress) -> Batch:
        """Mix and resize as `SupervisedObjective`, and add the teacher's logits for the result."""
        batch = super().prepare(batch, progress)
        return {**batch, "teacher_logits": self.compute_teacher_logits(batch["images"])}

    def compute_teacher_logits(self, images: Tensor) -> Tensor:
        """(B, C, *image), the student's input, float32 -> (B, K) float32: the teacher's logits, in the order of the
        student's classes. Raises WeightsError if a resumed run finds another teacher."""
        check_teacher_digest(self.teacher, self.digest)
        logits = self.teacher.logits(self.teacher.to_teacher_input(images, self.setting.normalisation))
        return logits.index_select(1, copy_to_device(torch.tensor(self.order), logits.device))

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        config, (logits, taught) = self.distillation, self.compute_logits(batch)
        base = cross_entropy(logits, batch["labels"], config.loss, config.smoothing, self.class_weights)
        teacher_logits, temperature = batch["teacher_logits"], config.temperature
        if config.kind == "hard":
            distilled = F.cross_entropy(taught, teacher_logits.argmax(1))
        else:
            targets = (teacher_logits / temperature).log_softmax(1)
            learned = (taught / temperature).log_softmax(1)
            distilled = F.kl_div(learned, targets, reduction="batchmean", log_target=True) * temperature**2
            if config.reduction == "official":
                distilled = distilled / teacher_logits.shape[1]
        return {"loss": (1 - config.alpha) * base + config.alpha * distilled}

    def compute_logits(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """-> (B, K) float32 logits for the labels, and for the teacher: from two heads, or from one."""
        head = getattr(self.model, "head", None)
        if not isinstance(head, DistilledHeads):
            keep = batch.get("keep")
            logits = self.model(batch["images"]) if keep is None else self.model.forward_patches(batch["images"], keep)
            return logits.float(), logits.float()
        model, keep = cast(ViT, self.model), batch.get("keep")
        grid = model.project(batch["images"])
        tokens = model.add_positions(grid)
        tokens = tokens if keep is None else gather_tokens(tokens, keep)
        label, teacher = model.pool(
            model.encode(tokens, model.make_token_positions(grid, keep), all_tokens=False)
        ).chunk(2, -1)
        return head.label(label).float(), head.teacher(teacher).float()

    def flops(self, progress: TrainingProgress) -> float:
        """Return the student's operations, and one pass of the teacher."""
        return super().flops(progress) + self.teacher.flops()


def match_teacher_classes(teacher: Teacher, source: str, model: ModelConfig, classes: tuple[str, ...]) -> list[int]:
    """Return the order of the teacher's logits, as `find_class_order`. Raises UsageError for other channels or classes
    than the student's."""
    if teacher.channels != model.channels:
        message = f"the teacher {source} takes {teacher.channels} channels, the student {model.channels}"
        raise UsageError(message, "use another teacher")
    return find_class_order(classes, teacher.classes, source)


def find_class_order(classes: tuple[str, ...], teacher_classes: tuple[str, ...], source: str) -> list[int]:
    """Return the indices of the teacher's logits, of its `teacher_classes` classes, in the order of `classes`: by name
    if it has names, else unchanged. Raises UsageError for other classes, or another number of them."""
    if set(teacher_classes) == set(classes):
        return [teacher_classes.index(name) for name in classes]
    if teacher_classes and len(teacher_classes) == len(classes) and all(name.isdecimal() for name in teacher_classes):
        return list(range(len(classes)))
    if not teacher_classes:
        raise UsageError(f"the teacher {source} outputs features, not classes", "use a classifier")
    unknown_class = next((name for name in classes if name not in teacher_classes), classes[0] if classes else "")
    raise UsageError(
        (
            f"the teacher {source} has {len(teacher_classes)} classes, and "
            f"{unknown_class!r} of the data is not one of them"
        ),
        "fine-tune it on these data first",
    )
