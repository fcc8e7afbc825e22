"""The contract between an objective and the loop that trains it.

An objective is one file: a frozen config, whose `name` is its tag in a `Run`, and a module. The loop calls, for every
step, `prepare` (without gradient), `forward`, and after the weights have moved `after_step`; it knows no label, no
logit and no metric.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from vitreous.data.batch import Batch
from vitreous.data.split import Split
from vitreous.evaluation.evaluator import Evaluator
from vitreous.models.config import ModelConfig
from vitreous.models.zoo import Model
from vitreous.tasks.base import Task


class TrainingProgress(NamedTuple):
    """How far a run is: optimiser steps made, samples of the stream before this step, and samples of the whole run.

    `values`: what the run's `schedules` give at this step, by name.
    """

    step: int = 0
    samples: int = 0
    total: int = 1
    values: Mapping[str, float] = {}

    @property
    def done(self) -> float:
        """The share of the run that is over, 0 to 1."""
        return self.samples / self.total


@dataclass(frozen=True)
class ObjectiveSetting:
    """What of a run an objective may know: its seed, names of classes or of targets, whether images have several
    labels, the config of its views, how often an epoch shows a sample, the precision that the model computes in,
    `normalisation`: the mean and deviation of each channel, of values in 0 .. 1, that images are normalised with, and
    `tokens`: the patches of a picture at its own aspect, at most and on average; 0: all have the model's size."""

    seed: int = 0
    classes: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    multilabel: bool = False
    views: Any = None
    repeats: int = 1
    dtype: torch.dtype = torch.float32
    normalisation: tuple[tuple[float, ...], tuple[float, ...]] = ((0.5,), (0.5,))
    tokens: int = 0


@dataclass(frozen=True)
class ObjectiveConfig:
    """What a run minimises, as numbers. A subclass has a field `name: Literal["…"]`, its tag."""

    name: str
    labelled: ClassVar[bool] = False  # needs data with labels
    of_values: ClassVar[bool] = False  # whose labels are values of targets, not classes
    # needs data of which it is known what is where: the class of each pixel, or objects, with masks if it has a field
    # `masks` that says so
    annotated: ClassVar[Literal["", "classes", "objects"]] = ""
    generates: ClassVar[bool] = False  # makes images, of the classes that the data have, if any
    takes_clips: ClassVar[bool] = False  # learns from clips as from pictures
    takes_own_aspect: ClassVar[bool] = False  # learns from lists of pictures of different sizes
    takes_volumes: ClassVar[bool] = False  # learns from volumes and signals as from pictures
    least_batch: ClassVar[int] = 1  # images of a batch that the loss needs
    shard_images: ClassVar[int] = 8  # images at least that a core of a processor computes by itself

    @classmethod
    def output_names(cls, classes: tuple[str, ...], targets: tuple[str, ...]) -> tuple[str, ...]:
        """Return the names of the outputs of the model's head: those of the data's classes or targets that the
        objective learns; () where it has none of its own."""
        if cls.of_values:
            return targets
        return classes if cls.labelled or cls.generates else ()

    @property
    def splittable(self) -> bool:
        """Whether the loss is a mean over samples that do not see each other, drawn without chance."""
        return True

    @property
    def ships_features(self) -> bool:
        """Whether what is deployed is an encoder, that answers with features."""
        return not (self.labelled or self.annotated or self.generates)

    @property
    def draws_in_forward(self) -> bool:
        """Whether `Objective.forward` draws random numbers outside of the backbone, as dropout in a head does."""
        return False

    def check(self, model: ModelConfig, classes: tuple[str, ...], views: Any) -> None:
        """Raise UsageError for a model, classes or views that the objective cannot have."""

    def located(self, model: ModelConfig, classes: tuple[str, ...]) -> ObjectiveConfig:
        """The config of a new run, with absolute paths of the files that it reads. Raises UsageError and WeightsError
        for files that are not there or do not fit, before anything is written."""
        return self

    def fitted(self, labels: np.ndarray) -> ObjectiveConfig:
        """The config of a new run on training images with these labels, (n,) int64 or (n, K) float32: with what it
        counts in them."""
        return self

    def initialise(self, model: Model) -> None:
        """Change a fresh model in place, before weights are loaded into it."""

    def describe_restoration(self) -> str:
        """What `Objective.reconstruct` shows, in sentences for people; empty where the objective restores nothing."""
        return ""

    def build(self, model: Model, setting: ObjectiveSetting) -> Objective:
        """The objective of a model, whose weights are loaded and whose frozen parameters require no gradient. May draw
        from torch's generator."""
        raise NotImplementedError


def reduce_single_process(values: Tensor) -> Tensor:
    """The mean over one process, of any shape."""
    return values


def gather_single_process(rows: Tensor) -> tuple[Tensor, int]:
    """The rows (n, ...) of one process, and the number of the first."""
    return rows, 0


#: `skip`: as without a gradient, neither moments nor step count change; `zero-lr`: both advance, at learning rate 0
FrozenUpdate = Literal["skip", "zero-lr"]


class Reconstruction(NamedTuple):
    """Images with patches restored: (B, C, *image) float32 normalised, as the encoder `seen` them and `restored`; and
    (B, *grid) bool, the patches of which it was given no pixels, and those that are `predicted`.

    In `restored` patches that are not predicted are those of the image. In `seen` hidden ones are 0.
    """

    seen: Tensor
    restored: Tensor
    hidden: Tensor
    predicted: Tensor


class Objective(nn.Module):
    """What a run minimises: model, mathematics and state.

    Its parameters that require a gradient are moved by the optimiser. Other parameters and persistent buffers are
    state: a checkpoint holds them at their own precision, so they are changed in place (`copy_`, `lerp_`), in
    `after_step`. No device moves, no logging and no process groups in it: `reduce` is the mean over processes, `gather`
    gives the rows (n, ...) of all processes in order, without gradient, and the number of the first of its own.
    """

    config: Any  # the `ObjectiveConfig` that it was built by
    logged: ClassVar[tuple[str, ...]] = ()  # scalars of `forward` beside "loss", logged as train/NAME
    # `forward` reads tensors on the device alone and never waits for them, so that a CUDA graph can repeat it
    capturable: ClassVar[bool] = False
    #: the objective's own parameters that replace tokens before the model's blocks: their learning-rate factor is that
    #: of the patch embedding, and their gradient is clipped with the model's
    input_tokens: ClassVar[tuple[str, ...]] = ()
    idle = False  # the batch is computed for nothing, as others still have samples: statistics leave it out
    reduce: Callable[[Tensor], Tensor] = staticmethod(reduce_single_process)  # set by the session, as `gather`
    gather: Callable[[Tensor], tuple[Tensor, int]] = staticmethod(gather_single_process)

    def prepare(self, batch: Batch, progress: TrainingProgress) -> Batch:
        """A batch on the device, its views normalised float32 -> what `forward` takes: mixing, masks, noise.

        Called without gradient. Chance is a function of the seed and of `batch["positions"]` (B,) int64, the samples'
        places in the run's stream, so that it is the same for any number of processes and after a resumption.
        """
        return batch

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """-> "loss", a float32 scalar, the mean over the samples of the batch; and the scalars of `logged`."""
        raise NotImplementedError

    def after_step(self, progress: TrainingProgress) -> None:
        """Called without gradient when the optimiser has moved the weights: a teacher, a centre follow."""

    def warnings(self, scalars: Mapping[str, float], progress: TrainingProgress) -> Iterator[tuple[str, str]]:
        """What looks wrong in the mean scalars since the last log line: a name, and what it means and what mends it."""
        return iter(())

    def frozen_at_start(self) -> tuple[str, ...]:
        """Return the names of parameters that are frozen at the start of a run."""
        return ()

    def frozen_update(self, progress: TrainingProgress) -> FrozenUpdate | None:
        """Return how the optimiser treats the parameters of `frozen_at_start` at a step; None once they train."""
        return None

    def frozen_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters that never move, which may compute in the run's precision: those of `model` without gradient."""
        model = getattr(self, "model", None)
        return (p for p in model.parameters() if not p.requires_grad) if isinstance(model, nn.Module) else iter(())

    def deployed_model(self) -> Model:
        """What the bundle ships, with a `config`: a classifier, an encoder. Part of this module, not a copy."""
        raise NotImplementedError

    def task(self) -> Task:
        """What the deployed model answers, as the bundle says it."""
        raise NotImplementedError

    def evaluators(self, train: Split) -> list[Evaluator]:
        """What is measured on the validation split, the leading one first; none where there is nothing to measure."""
        return []

    def reconstruct(self, images: Tensor, keys: np.ndarray) -> Reconstruction:
        """(B, C, *image) normalised, (B,) keys that chance is drawn from -> what is hidden of them and restored, where
        the config's `describe_restoration` says that the objective can."""
        raise NotImplementedError

    def flops(self, progress: TrainingProgress) -> float:
        """Floating-point operations of one sample's training step, as carried out: two to a multiply-add."""
        raise NotImplementedError
