"""Interface between an objective and the training loop.

An objective is a module of this package with two classes: a frozen config, whose `name` identifies it in a `Run`, and a
torch module. In every step the loop calls `prepare` (without gradient), `forward`, and after the optimiser step
`after_step`. The loop does not depend on labels, logits or metrics.

Shapes: B samples of a batch, C channels, n samples, K classes; image and grid are one length per axis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

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
    """Progress of a run at a step: optimiser steps, samples used before this step, and samples of the whole run.

    `values` are the values of the run's `schedules` at this step, by name.
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
    """Properties of a run on which objectives may depend.

    - `seed`, and the names of `classes` or regression `targets`.
    - `multilabel`: whether images may have several labels.
    - `views`: the config of the run's views (augmentation).
    - `repeats`: the number of times that an epoch repeats a sample.
    - `dtype`: the compute precision of the model.
    - `normalisation`: the mean and std of each channel that normalise images, for pixel values in 0 .. 1.
    - `tokens`: the maximum number of patches of an image at native aspect ratio; 0 if all images have the model's size.
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
    """Base class of objective configs. A subclass has a field `name: Literal["…"]`, which identifies the objective."""

    name: str
    labelled: ClassVar[bool] = False  # requires labels
    of_values: ClassVar[bool] = False  # labels are regression targets, not classes
    # required annotations: class maps ("classes"), or objects, with masks if the config's field `masks` is set
    annotated: ClassVar[Literal["", "classes", "objects"]] = ""
    paired: ClassVar[bool] = False  # requires image-text pairs
    generates: ClassVar[bool] = False  # trains generative models, class-conditional if the data have classes
    guards_drift: ClassVar[bool] = False  # features of a run from weights must not become worse (`Run.drift_guard`)
    takes_clips: ClassVar[bool] = False  # supports clips
    takes_own_aspect: ClassVar[bool] = False  # supports images at native aspect ratio: lists of different sizes
    takes_volumes: ClassVar[bool] = False  # supports volumes and signals
    least_batch: ClassVar[int] = 1  # minimum batch size of the loss
    shard_images: ClassVar[int] = 8  # minimum images per shard of a batch, for one CPU core

    @classmethod
    def output_names(cls, classes: tuple[str, ...], targets: tuple[str, ...]) -> tuple[str, ...]:
        """Return the names of the outputs of the model's head: the classes or regression targets of the data, or () for
        objectives that add a separate head."""
        if cls.of_values:
            return targets
        return classes if cls.labelled or cls.generates else ()

    @property
    def can_split_batch(self) -> bool:
        """Return whether a batch can be split into chunks that are computed separately, because the loss is a
        deterministic mean over independent samples."""
        return True

    @property
    def ships_features(self) -> bool:
        """Return whether the deployed model is an encoder that outputs features."""
        return not (self.labelled or self.annotated or self.generates)

    @property
    def draws_in_forward(self) -> bool:
        """Return whether `Objective.forward` draws random numbers outside of the backbone, such as for dropout in a
        head."""
        return False

    def check(self, model: ModelConfig, classes: tuple[str, ...], views: Any) -> None:
        """Raise UsageError for a model, classes or views that the objective does not support."""

    def with_absolute_paths(self, model: ModelConfig, classes: tuple[str, ...]) -> ObjectiveConfig:
        """Return the config for a new run, with absolute paths of the files that it uses, such as a teacher.

        Raises UsageError and WeightsError for missing or incompatible files, before the run writes anything.
        """
        return self

    def fitted(self, labels: np.ndarray) -> ObjectiveConfig:
        """Return the config for a new run, with statistics of the training labels: (n,) int64 class indices, or (n, K)
        float32."""
        return self

    def initialise(self, model: Model) -> None:
        """Initialise a new model in place, before weights are loaded into it."""

    def describe_restoration(self) -> str:
        """Describe the images of `Objective.reconstruct`, for reports; "" if the objective reconstructs no images."""
        return ""

    def build(self, model: Model, setting: ObjectiveSetting) -> Objective:
        """Build the objective of a model whose weights are loaded and whose frozen parameters require no gradient.

        May draw from torch's random generator.
        """
        raise NotImplementedError


def reduce_single_process(values: Tensor) -> Tensor:
    """Return values of any shape unchanged: they are their own mean over a single process."""
    return values


def gather_single_process(samples: Tensor) -> tuple[Tensor, int]:
    """Return the samples (n, ...) of one process, and the index of its first sample, 0."""
    return samples, 0


class ProcessRing(Protocol):
    """The processes of a run in a ring: process `rank` of `world` sends to the next one and receives from the one
    before it."""

    @property
    def rank(self) -> int:
        """The index of this process."""
        ...

    @property
    def world(self) -> int:
        """The number of processes."""
        ...

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the (n, ...) tensors of all processes in order, without gradient; n may differ."""
        ...

    def shift(self, tensor: Tensor, length: int) -> Tensor:
        """Send a tensor (n, ...) to the next process, and return that of the previous process, (length, ...)."""
        ...


class SingleProcessRing:
    """The ring of a run with one process."""

    rank, world = 0, 1

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensor (n, ...) in a list."""
        return [tensor]

    def shift(self, tensor: Tensor, length: int) -> Tensor:
        """Return the tensor (length, ...), which this process sends to itself."""
        return tensor


SINGLE_PROCESS_RING = SingleProcessRing()


#: how the optimiser treats frozen parameters. `skip`: no gradient, so neither moments nor step count change; `zero-lr`:
#: both change, with learning rate 0
FrozenUpdate = Literal["skip", "zero-lr"]


class Reconstruction(NamedTuple):
    """Images with restored patches, for reports.

    - `encoder_input`, (B, C, *image) float32 normalised: the images with hidden patches 0.
    - `restored`, (B, C, *image) float32 normalised: the images with predicted patches replaced by the prediction.
    - `hidden`, (B, *grid) bool: the patches hidden from the encoder.
    - `predicted`, (B, *grid) bool: the predicted patches.
    """

    encoder_input: Tensor
    restored: Tensor
    hidden: Tensor
    predicted: Tensor


class Objective(nn.Module):
    """Base class of objectives: model, loss and state.

    The optimiser trains the parameters that require a gradient. Other parameters and persistent buffers are state,
    which checkpoints store in its dtype; `after_step` must therefore change it in place (`copy_`, `lerp_`). An
    objective does not move between devices, log, or use process groups. Three attributes give it access to other
    processes: `reduce` returns the mean of a tensor over processes; `gather` returns the samples (n, ...) of all
    processes in order, without gradient, and the index of this process's first sample; `ring` passes tensors from
    process to process.
    """

    config: Any  # the `ObjectiveConfig` that built it
    logged: ClassVar[tuple[str, ...]] = ()  # scalars of `forward` in addition to "loss", logged as train/NAME
    # whether a CUDA graph can repeat `forward`: it uses only device tensors and never synchronises
    capturable: ClassVar[bool] = False
    #: parameters of the objective that replace tokens before the model's blocks, such as a mask token: they have the
    #: learning rate factor of the patch embedding, and their gradient is clipped with the model's
    input_tokens: ClassVar[tuple[str, ...]] = ()
    is_idle = False  # this process has no samples left in this step: statistics exclude its batch
    reduce: Callable[[Tensor], Tensor] = staticmethod(reduce_single_process)  # the training session sets all three
    gather: Callable[[Tensor], tuple[Tensor, int]] = staticmethod(gather_single_process)
    ring: ProcessRing = SINGLE_PROCESS_RING

    def prepare(self, batch: Batch, progress: TrainingProgress) -> Batch:
        """Convert a batch on the device, with normalised float32 views, to the input of `forward`, for example by
        mixing images or drawing masks or noise.

        Called without gradient. Random numbers depend on the seed and on `batch["positions"]` (B,) int64, the positions
        of the samples in the run's stream of training samples. They are therefore independent of the number of
        processes and of resumptions.
        """
        return batch

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Compute "loss", a float32 scalar that is the mean over the samples of the batch, and the scalars named in
        `logged`."""
        raise NotImplementedError

    def after_step(self, progress: TrainingProgress) -> None:
        """Update state such as a teacher or a centre after the optimiser step. Called without gradient."""

    def warnings(self, scalars: Mapping[str, float], progress: TrainingProgress) -> Iterator[tuple[str, str]]:
        """Detect problems in `scalars`, the mean scalars since the last log line; yield a name and a message with cause
        and fix for each."""
        return iter(())

    def frozen_at_start(self) -> tuple[str, ...]:
        """Return the names of parameters that are frozen at the start of a run."""
        return ()

    def frozen_update(self, progress: TrainingProgress) -> FrozenUpdate | None:
        """Return how the optimiser treats the parameters of `frozen_at_start` at a step; None after they became
        trainable."""
        return None

    def frozen_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that are never trained and may therefore be cast to the run's precision: those of
        `model` without gradient."""
        model = getattr(self, "model", None)
        return (p for p in model.parameters() if not p.requires_grad) if isinstance(model, nn.Module) else iter(())

    def deployed_model(self) -> Model:
        """Return the model that the bundle contains, such as a classifier or an encoder: a submodule with a `config`,
        not a copy."""
        raise NotImplementedError

    def task(self) -> Task:
        """Return the task of the deployed model, which the bundle stores."""
        raise NotImplementedError

    def evaluators(self, train: Split) -> list[Evaluator]:
        """Return the evaluators of the validation split, the main evaluator first; [] if there is nothing to
        evaluate."""
        return []

    def reconstruct(self, images: Tensor, keys: np.ndarray) -> Reconstruction:
        """Restore hidden patches of images (B, C, *image), normalised, with (B,) random keys, for configs whose
        `describe_restoration` is not empty."""
        raise NotImplementedError

    def flops(self, progress: TrainingProgress) -> float:
        """Return the floating-point operations of one sample's training step: two per multiply-add."""
        raise NotImplementedError
