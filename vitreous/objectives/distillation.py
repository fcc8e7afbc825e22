"""Objective of knowledge distillation: supervised training with labels and a teacher (DeiT, arXiv:2012.12877, section
3.2).

Shapes: B images of C channels, K classes, k patches that patch dropout keeps.
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

    A model with a distillation token (`deit_small_distilled_patch16_224`) has a separate head for each loss; another
    model uses a single head for both.

    - `teacher`: a run, a bundle, other weights or an ONNX file.
    - `teacher_mean`, `teacher_std`: normalisation of the teacher's input, for files that do not contain it.
    - `kind`: `hard` is the cross-entropy with the teacher's most likely class; `soft` is the KL divergence of
      probabilities at `temperature`, times `temperature` squared.
    - `reduction`: the divergence is divided by the number of images (`batchmean`), or by that of images times classes,
      as in DeiT's code (`official`).
    - `alpha`: weight of the teacher's loss, from 0 to 1.

    Raises UsageError for invalid values.
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
            values = f"{self.alpha:g} and {self.temperature:g}"
            raise UsageError(f"alpha must be from 0 to 1 and temperature above 0, got {values}")
        if len(self.teacher_mean) != len(self.teacher_std) or any(std <= 0 for std in self.teacher_std):
            values = f"{self.teacher_mean} and {self.teacher_std}"
            raise UsageError(
                f"teacher_mean and teacher_std must have one number per channel, std above 0, got {values}"
            )

    def with_absolute_paths(self, model: ModelConfig, classes: tuple[str, ...]) -> DistillationConfig:
        """Return the config with the absolute path of the teacher.

        Raises UsageError without a teacher, or for a teacher with other classes or channels than the student,
        WeightsError for an unreadable teacher.
        """
        match_teacher_classes(self.open_teacher(), self.teacher, model, classes)
        return replace(self, teacher=absolute_source(self.teacher))

    def open_teacher(self, dtype: torch.dtype = torch.float32) -> Teacher:
        """Open the teacher. Raises UsageError if no teacher is set, WeightsError if it cannot be read."""
        return open_teacher(self.teacher, dtype, (self.teacher_mean, self.teacher_std) if self.teacher_mean else None)

    def build(self, model: Model, setting: ObjectiveSetting) -> DistillationObjective:
        """Build the objective of a student. Raises the errors of `with_absolute_paths`."""
        return DistillationObjective(model, self, setting, self.open_teacher(setting.dtype))


class DistillationObjective(SupervisedObjective):
    """(1 - alpha) times the loss of the labels, plus alpha times the loss relative to the teacher.

    The input is that of `SupervisedObjective`, and "teacher_logits" (B, K) float32: the teacher's logits for the same
    mixed images. Checkpoints do not contain the teacher: the run's config contains its name, a checkpoint its digest.
    Raises UsageError for a teacher with other classes or channels than the student.
    """

    digest: Tensor

    def __init__(self, model: Model, config: DistillationConfig, setting: ObjectiveSetting, teacher: Teacher) -> None:
        super().__init__(model, config, setting)
        self.distillation, self.teacher = config, teacher
        self.class_order = match_teacher_classes(teacher, config.teacher, model.config, setting.classes)
        self.register_buffer("digest", teacher.digest.clone())  # stored in checkpoints, to detect another teacher

    def prepare(self, batch: Batch, progress: TrainingProgress) -> Batch:
        """Mix and resize images as `SupervisedObjective.prepare` does, and add the teacher's logits for the result."""
        batch = super().prepare(batch, progress)
        return {**batch, "teacher_logits": self.compute_teacher_logits(batch["images"])}

    def compute_teacher_logits(self, images: Tensor) -> Tensor:
        """Compute the teacher's logits, in the order of the student's classes, for the student's input: (B, C, *image)
        float32 -> (B, K) float32.

        Raises WeightsError if the teacher of a resumed run has changed.
        """
        check_teacher_digest(self.teacher, self.digest)
        logits = self.teacher.logits(self.teacher.to_teacher_input(images, self.setting.normalisation))
        return logits.index_select(1, copy_to_device(torch.tensor(self.class_order), logits.device))

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Compute the loss, a scalar: the weighted sum of the loss of the labels and the loss relative to the
        teacher."""
        config, (logits, distilled_logits) = self.distillation, self.compute_logits(batch)
        label_loss = cross_entropy(logits, batch["labels"], config.loss, config.smoothing, self.class_weights)
        teacher_logits, temperature = batch["teacher_logits"], config.temperature
        if config.kind == "hard":
            teacher_loss = F.cross_entropy(distilled_logits, teacher_logits.argmax(1))
        else:
            target_log_probs = (teacher_logits / temperature).log_softmax(1)
            log_probs = (distilled_logits / temperature).log_softmax(1)
            divergence = F.kl_div(log_probs, target_log_probs, reduction="batchmean", log_target=True)
            teacher_loss = divergence * temperature**2
            if config.reduction == "official":
                teacher_loss = teacher_loss / teacher_logits.shape[1]
        return {"loss": (1 - config.alpha) * label_loss + config.alpha * teacher_loss}

    def compute_logits(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Compute the student's logits (B, K) float32 for the loss of labels and for the loss relative to the teacher.

        They are those of two heads, or twice those of a single head.
        """
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
        """Return the floating-point operations of the student, and of one pass of the teacher."""
        return super().flops(progress) + self.teacher.flops()


def match_teacher_classes(teacher: Teacher, source: str, model: ModelConfig, classes: tuple[str, ...]) -> list[int]:
    """Return the order of the teacher's logits (`find_class_order`). Raises UsageError if its channels or classes
    differ from the student's."""
    if teacher.channels != model.channels:
        message = f"the teacher {source} requires {teacher.channels} channels, but the student has {model.channels}"
        raise UsageError(message, "use another teacher")
    return find_class_order(classes, teacher.classes, source)


def find_class_order(classes: tuple[str, ...], teacher_classes: tuple[str, ...], source: str) -> list[int]:
    """Return the indices of the teacher's logits that sort them in the order of `classes`: by name if the teacher has
    class names, else unchanged.

    Raises UsageError if the classes, or their number, differ.
    """
    if set(teacher_classes) == set(classes):
        return [teacher_classes.index(name) for name in classes]
    if teacher_classes and len(teacher_classes) == len(classes) and all(name.isdecimal() for name in teacher_classes):
        return list(range(len(classes)))
    if not teacher_classes:
        raise UsageError(f"the teacher {source} outputs features, not classes", "use a classifier")
    unknown_class = next((name for name in classes if name not in teacher_classes), classes[0] if classes else "")
    raise UsageError(
        (
            f"the class {unknown_class!r} of the data is not among the {len(teacher_classes)} classes of the teacher "
            f"{source}"
        ),
        "fine-tune the teacher on these data first",
    )
