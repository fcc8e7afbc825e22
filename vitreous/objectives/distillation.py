"""Learning from labels and from a teacher (DeiT, arXiv:2012.12877, section 3.2).

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
    """The loss of labels, and that of what a `teacher` says of the same images: a run, a bundle, other weights or an
    ONNX file, whose mean and deviation are `teacher_mean` and `teacher_std` where it does not tell them.

    A model with a distillation token (`deit_small_distilled_patch16_224`) has a head for each of them; another model
    learns both with its one head. `kind` hard: cross-entropy with the class that the teacher finds likeliest; soft: the
    divergence of probabilities at `temperature`, times its square. The divergence is divided by the number of images
    (`batchmean`), or as DeiT's code has it by that of images times classes (`official`). `alpha` is the teacher's part.
    Raises UsageError for numbers that cannot be.
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
            raise UsageError("alpha is from 0 to 1, a temperature above 0")
        if len(self.teacher_mean) != len(self.teacher_std) or any(std <= 0 for std in self.teacher_std):
            raise UsageError("teacher_mean and teacher_std have one number a channel each, deviations above 0")

    def located(self, model: ModelConfig, classes: tuple[str, ...]) -> DistillationConfig:
        """The config with the teacher's absolute path. Raises UsageError where no teacher is named, or one of other
        classes or channels; WeightsError for one that cannot be read."""
        match_teacher_classes(self.opened(), self.teacher, model, classes)
        return replace(self, teacher=absolute_source(self.teacher))

    def opened(self, dtype: torch.dtype = torch.float32) -> Teacher:
        """The teacher. Raises UsageError for none, WeightsError for one that cannot be read."""
        return open_teacher(self.teacher, dtype, (self.teacher_mean, self.teacher_std) if self.teacher_mean else None)

    def build(self, model: Model, setting: ObjectiveSetting) -> DistillationObjective:
        """The objective of a student. Raises UsageError and WeightsError as `located`."""
        return DistillationObjective(model, self, setting, self.opened(setting.dtype))


class DistillationObjective(SupervisedObjective):
    """(1 - alpha) times the loss of the labels, and alpha times that of the teacher's answers.

    Takes what `SupervisedObjective` takes, and "answers" (B, K) float32: the teacher's logits for the very images,
    mixed as they are. The teacher is no part of the checkpoint: its name is in the run's config, its digest in the
    checkpoint. Raises UsageError for a teacher of other classes or channels.
    """

    digest: Tensor

    def __init__(self, model: Model, config: DistillationConfig, setting: ObjectiveSetting, teacher: Teacher) -> None:
        super().__init__(model, config, setting)
        self.distillation, self.teacher = config, teacher
        self.order = match_teacher_classes(teacher, config.teacher, model.config, setting.classes)
        self.register_buffer("digest", teacher.digest.clone())  # a checkpoint has that of the teacher it began with

    def prepare(self, batch: Batch, progress: TrainingProgress) -> Batch:
        """Mix and resize as `SupervisedObjective`, and ask the teacher about the result."""
        batch = super().prepare(batch, progress)
        return {**batch, "answers": self.ask(batch["images"])}

    def ask(self, images: Tensor) -> Tensor:
        """(B, C, *image) as the student gets them, float32 -> (B, K) float32: the teacher's logits, in the order of the
        student's classes. Raises WeightsError where a resumed run finds another teacher."""
        check_teacher_digest(self.teacher, self.digest)
        logits = self.teacher.logits(self.teacher.read(images, self.setting.normalisation))
        return logits.index_select(1, copy_to_device(torch.tensor(self.order), logits.device))

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        config, (logits, taught) = self.distillation, self.answer(batch)
        base = cross_entropy(logits, batch["labels"], config.loss, config.smoothing, self.class_weights)
        answers, temperature = batch["answers"], config.temperature
        if config.kind == "hard":
            distilled = F.cross_entropy(taught, answers.argmax(1))
        else:
            targets = (answers / temperature).log_softmax(1)
            learned = (taught / temperature).log_softmax(1)
            distilled = F.kl_div(learned, targets, reduction="batchmean", log_target=True) * temperature**2
            if config.reduction == "official":
                distilled = distilled / answers.shape[1]
        return {"loss": (1 - config.alpha) * base + config.alpha * distilled}

    def answer(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """-> (B, K) float32 logits for the labels, and for the teacher: two heads, or one."""
        head = getattr(self.model, "head", None)
        if not isinstance(head, DistilledHeads):
            keep = batch.get("keep")
            logits = self.model(batch["images"]) if keep is None else self.model.forward_patches(batch["images"], keep)
            return logits.float(), logits.float()
        model, keep = cast(ViT, self.model), batch.get("keep")
        grid = model.project(batch["images"])
        tokens = model.place(grid)
        tokens = tokens if keep is None else gather_tokens(tokens, keep)
        label, teacher = model.pool(model.encode(tokens, model.places(grid, keep), whole=False)).chunk(2, -1)
        return head.label(label).float(), head.teacher(teacher).float()

    def flops(self, progress: TrainingProgress) -> float:
        """The student's, and one pass of the teacher."""
        return super().flops(progress) + self.teacher.flops()


def match_teacher_classes(teacher: Teacher, source: str, model: ModelConfig, classes: tuple[str, ...]) -> list[int]:
    """The order of the teacher's logits, as `find_class_order`. Raises UsageError for other channels than the
    student's, and other classes."""
    if teacher.channels != model.channels:
        message = f"the teacher {source} reads {teacher.channels} channels, the student {model.channels}"
        raise UsageError(message, "name another teacher")
    return find_class_order(classes, teacher.classes, source)


def find_class_order(classes: tuple[str, ...], own: tuple[str, ...], source: str) -> list[int]:
    """The teacher's logits, of its `own` classes, in the order of `classes`: by their names where it has these, else
    as they come. Raises
    UsageError where it has other classes, or another number of them."""
    if set(own) == set(classes):
        return [own.index(name) for name in classes]
    if own and len(own) == len(classes) and all(name.isdecimal() for name in own):
        return list(range(len(classes)))
    if not own:
        raise UsageError(f"the teacher {source} has features, no classes", "name a model that classifies")
    strange = next((name for name in classes if name not in own), classes[0] if classes else "")
    raise UsageError(
        f"the teacher {source} has {len(own)} classes, and {strange!r} of the data is none of them",
        "fine-tune it on these data first",
    )
