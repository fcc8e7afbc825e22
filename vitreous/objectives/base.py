"""The interface between an objective and the training loop.

An objective is one file: a frozen config, whose `name` is its tag in a `Run`, and a module. For every step the loop
calls `prepare` (without gradient), `forward`, and after the optimiser step `after_step`. The loop does not depend on
labels, logits or metrics.
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
    """Progress of a run: optimiser steps, samples of the stream before this step, and samples of the whole run.

    `values`: values of the run's `schedules` at this step, by name.
    """

    step: int = 0
    samples: int = 0
    total: int = 1
    values: Mapping[str, float] = {}

    @property
    def fraction_done(self) -> float:
        """Return the completed share of the run, 0 to 1."""
        return self.samples / self.total


@dataclass(frozen=True)
class ObjectiveSetting:
    """Properties of a run that objectives may depend on.

    - the seed, the names of classes or of targets, and whether images have several labels
    - the config of its views, the number of times an epoch repeats a sample, and the model's compute precision
    - `normalisation`: the mean and std of each channel that normalise images, for values in 0 .. 1
    - `tokens`: the maximum and mean number of patches of an image at native aspect ratio; 0: all have the model's size
    """

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
    """Config of an objective. A subclass has a field `name: Literal["…"]`, its tag."""

    name: str
    labelled: ClassVar[bool] = False  # requires labels
    of_values: ClassVar[bool] = False  # labels are regression targets, not classes
    # requires annotations: the class of each pixel, or objects, with masks if its field `masks` is set
    annotated: ClassVar[Literal["", "classes", "objects"]] = ""
    generates: ClassVar[bool] = False  # generates images, by class if the data have classes
    takes_clips: ClassVar[bool] = False  # supports clips
    takes_own_aspect: ClassVar[bool] = False  # supports lists of images of different sizes
    takes_volumes: ClassVar[bool] = False  # supports volumes and signals
    least_batch: ClassVar[int] = 1  # minimum batch size of the loss
    shard_images: ClassVar[int] = 8  # minimum images per shard of a batch, for one CPU core

    @classmethod
    def output_names(cls, classes: tuple[str, ...], targets: tuple[str, ...]) -> tuple[str, ...]:
        """Return the names of the head's outputs, those of the data's classes or targets; () for objectives with
        separate heads."""
        if cls.of_values:
            return targets
        return classes if cls.labelled or cls.generates else ()

    @property
    def can_split_batch(self) -> bool:
        """Return whether a batch can be split into chunks that are computed separately: the loss is a deterministic
        mean over independent samples."""
        return True

    @property
    def ships_features(self) -> bool:
        """Return whether the deployed model is an encoder that outputs features."""
        return not (self.labelled or self.annotated or self.generates)

    @property
    def draws_in_forward(self) -> bool:
        """Return whether `Objective.forward` draws random numbers outside of the backbone, such as dropout in a
        head."""
        return False

    def check(self, model: ModelConfig, classes: tuple[str, ...], views: Any) -> None:
        """Raise UsageError for a model, classes or views that the objective does not support."""

    def with_absolute_paths(self, model: ModelConfig, classes: tuple[str, ...]) -> ObjectiveConfig:
        """Return the config of a new run, with absolute paths of the files that it uses.

        Raises UsageError and WeightsError for missing or incompatible files, before anything is written.
        """
        return self

    def fitted(self, labels: np.ndarray) -> ObjectiveConfig:
        """Return the config of a new run on training images with these labels, (n,) int64 or (n, K) float32, with
        statistics of the labels."""
        return self

    def initialise(self, model: Model) -> None:
        """Initialise a fresh model in place, before weights are loaded into it."""

    def describe_restoration(self) -> str:
        """Description of the images of `Objective.reconstruct`, for reports; empty if the objective restores
        nothing."""
        return ""

    def build(self, model: Model, setting: ObjectiveSetting) -> Objective:
        """Build the objective of a model, whose weights are loaded and whose frozen parameters require no gradient. May
        draw from torch's generator."""
        raise NotImplementedError


def reduce_single_process(values: Tensor) -> Tensor:
    """Return the mean over one process, of any shape: the values unchanged."""
    return values


def gather_single_process(samples: Tensor) -> tuple[Tensor, int]:
    """Return the samples (n, ...) of one process, and the index of the first, 0."""
    return samples, 0


#: `skip`: no gradient, so neither moments nor step count change; `zero-lr`: both advance, at learning rate 0
FrozenUpdate = Literal["skip", "zero-lr"]


class Reconstruction(NamedTuple):
    """Images with restored patches, for reports.

    (B, C, *image) float32 normalised: the encoder's input, `encoder_input`, with hidden patches 0, and `restored`, in
    which patches that are not predicted are those of the image. (B, *grid) bool: the patches hidden from the encoder,
    and the `predicted` ones.
    """

    encoder_input: Tensor
    restored: Tensor
    hidden: Tensor
    predicted: Tensor


class Objective(nn.Module):
    """Base class of objectives: model, loss and state.

    The optimiser trains the parameters that require a gradient. Other parameters and persistent buffers are state:
    checkpoints store them in their dtype, so they are changed in place (`copy_`, `lerp_`), in `after_step`. An
    objective does not move between devices, log, or use process groups. `reduce` is the mean over processes; `gather`
    returns the samples (n, ...) of all processes in order, without gradient, and the index of this process's first.
    """

    config: Any  # the `ObjectiveConfig` that built it
    logged: ClassVar[tuple[str, ...]] = ()  # scalars of `forward` in addition to "loss", logged as train/NAME
    # `forward` uses only device tensors and never synchronises, so that a CUDA graph can repeat it
    capturable: ClassVar[bool] = False
    #: the objective's own parameters that replace tokens before the model's blocks: their learning-rate factor is that
    #: of the patch embedding, and their gradient is clipped with the model's
    input_tokens: ClassVar[tuple[str, ...]] = ()
    is_idle = False  # this process has no samples left and only computes along: excluded from statistics
    reduce: Callable[[Tensor], Tensor] = staticmethod(reduce_single_process)  # set by the session, as `gather`
    gather: Callable[[Tensor], tuple[Tensor, int]] = staticmethod(gather_single_process)

    def prepare(self, batch: Batch, progress: TrainingProgress) -> Batch:
        """Convert a batch on the device, its views normalised float32, to the input of `forward`: mixing, masks, noise.

        Called without gradient. Random numbers depend on the seed and on `batch["positions"]` (B,) int64, the samples'
        positions in the run's stream. They are therefore independent of the number of processes and of resumptions.
        """
        return batch

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """-> "loss", a float32 scalar, the mean over the samples of the batch; and the scalars of `logged`."""
        raise NotImplementedError

    def after_step(self, progress: TrainingProgress) -> None:
        """Update a teacher or a centre after the optimiser step. Called without gradient."""

    def warnings(self, scalars: Mapping[str, float], progress: TrainingProgress) -> Iterator[tuple[str, str]]:
        """Return problems in the mean scalars since the last log line: a name, and a message with cause and fix."""
        return iter(())

    def frozen_at_start(self) -> tuple[str, ...]:
        """Return the names of parameters that are frozen at the start of a run."""
        return ()

    def frozen_update(self, progress: TrainingProgress) -> FrozenUpdate | None:
        """Return how the optimiser treats the parameters of `frozen_at_start` at a step; None once they are
        trainable."""
        return None

    def frozen_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters that are never trained, which may use the run's precision: those of `model` without gradient."""
        model = getattr(self, "model", None)
        return (p for p in model.parameters() if not p.requires_grad) if isinstance(model, nn.Module) else iter(())

    def deployed_model(self) -> Model:
        """Return the model that the bundle contains, with a `config`: a classifier, an encoder. A submodule, not a
        copy."""
        raise NotImplementedError

    def task(self) -> Task:
        """Return the task of the deployed model, as stored in the bundle."""
        raise NotImplementedError

    def evaluators(self, train: Split) -> list[Evaluator]:
        """Return the evaluators of the validation split, the main one first; () if there is nothing to evaluate."""
        return []

    def reconstruct(self, images: Tensor, keys: np.ndarray) -> Reconstruction:
        """(B, C, *image) normalised, (B,) random keys -> hidden and restored patches, if the config's
        `describe_restoration` is not empty."""
        raise NotImplementedError

    def flops(self, progress: TrainingProgress) -> float:
        """Floating-point operations performed in one sample's training step: two per multiply-add."""
        raise NotImplementedError
