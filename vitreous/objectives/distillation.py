"""Learning from labels and from a teacher (DeiT, arXiv:2012.12877, section 3.2).

B images, K classes.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from vitreous.data.batch import Batch
from vitreous.errors import UsageError
from vitreous.models.cost import macs
from vitreous.models.vit import ViT
from vitreous.models.zoo import Model
from vitreous.nn.grid import take
from vitreous.nn.pool import Heads
from vitreous.objectives.base import Progress, Setting
from vitreous.objectives.supervised import Supervised, SupervisedConfig, cross_entropy
from vitreous.weights.adopt import open_weights
from vitreous.weights.bundle import Bundle


@dataclass(frozen=True)
class DistillationConfig(SupervisedConfig):
    """The loss of labels, and that of what a `teacher` says of the same images: a run, a bundle, or other weights.

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

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.alpha <= 1 or self.temperature <= 0:
            raise UsageError("alpha is from 0 to 1, a temperature above 0")

    def build(self, model: Model, setting: Setting) -> Distillation:
        """The objective of a student. Raises UsageError where no teacher is named, or one of other classes or channels;
        WeightsError for one that cannot be read."""
        if not self.teacher:
            raise UsageError("no teacher to learn from", "name its weights with --objective.teacher")
        return Distillation(model, self, setting, open_weights(self.teacher).bundle())


class Distillation(Supervised):
    """(1 - alpha) times the loss of the labels, and alpha times that of the teacher's answers.

    Takes what `Supervised` takes, and "answers" (B, K) float32: the teacher's logits for the very images, mixed as they
    are. Raises UsageError for a teacher of other classes or channels.
    """

    def __init__(self, model: Model, config: DistillationConfig, setting: Setting, teacher: Bundle) -> None:
        super().__init__(model, config, setting)
        self.distillation = config
        self.order = class_order(setting.classes, teacher, config.teacher)
        channels = teacher.preprocess.channels
        if channels != model.config.channels:
            message = f"the teacher {config.teacher} reads {channels} channels, the student {model.config.channels}"
            raise UsageError(message, "name another teacher")
        self.teacher: Model = copy.deepcopy(teacher.model).requires_grad_(False).eval()
        self.teacher.any_size = True  # type: ignore[assignment]
        self.input = (teacher.preprocess.mean, teacher.preprocess.std)

    def train(self, mode: bool = True) -> Distillation:
        """The teacher has neither dropout nor stochastic depth."""
        super().train(mode)
        self.teacher.eval()
        return self

    def frozen_parameters(self):
        """Those of the model, and the whole teacher."""
        yield from super().frozen_parameters()
        yield from self.teacher.parameters()

    def prepare(self, batch: Batch, progress: Progress) -> Batch:
        """Mix and resize as `Supervised`, and ask the teacher about the result."""
        batch = super().prepare(batch, progress)
        return {**batch, "answers": self.ask(batch["images"])}

    def ask(self, images: Tensor) -> Tensor:
        """(B, C, *image) as the student gets them, float32 -> (B, K) float32: the teacher's logits, in the order of the
        student's classes."""
        own, its = (
            torch.tensor(numbers, device=images.device).view(2, -1, *(1,) * (images.ndim - 2))
            for numbers in (self.setting.normalisation, self.input)
        )
        images = (images * own[1] + own[0] - its[0]) / its[1]
        parameter = next(self.teacher.parameters())
        return self.teacher(images.to(parameter.dtype)).float()[:, self.order]

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
        if not isinstance(head, Heads):
            keep = batch.get("keep")
            logits = self.model(batch["images"]) if keep is None else self.model.forward_patches(batch["images"], keep)
            return logits.float(), logits.float()
        model, keep = cast(ViT, self.model), batch.get("keep")
        grid = model.project(batch["images"])
        tokens = model.place(grid)
        tokens = tokens if keep is None else take(tokens, keep)
        label, teacher = model.pool(model.encode(tokens, model.places(grid, keep), whole=False)).chunk(2, -1)
        return head.label(label).float(), head.teacher(teacher).float()

    def flops(self, progress: Progress) -> float:
        """The student's, and one pass of the teacher."""
        return super().flops(progress) + 2 * macs(self.teacher.config, self.model.config.image)


def class_order(classes: tuple[str, ...], teacher: Bundle, source: str) -> list[int]:
    """The teacher's logits in the order of `classes`: by their names where it has these, else as they come. Raises
    UsageError where it has other classes, or another number of them."""
    own = getattr(teacher.task, "classes", ())
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
