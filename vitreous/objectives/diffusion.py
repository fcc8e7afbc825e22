"""Objective of diffusion models, as in DiT (arXiv:2212.09748, section 3.1), and the base classes that it shares with
flow models (`objectives.flow`).

Shapes: B images of C channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from vitreous.data.augmentation.augment import Augment
from vitreous.data.batch import Batch
from vitreous.data.keys import derive_keys, draw_normal, draw_uniform
from vitreous.data.labels import get_label_kind
from vitreous.data.split import Split
from vitreous.errors import UsageError
from vitreous.evaluation.denoising import DenoisingEvaluator
from vitreous.evaluation.evaluator import Evaluator
from vitreous.generation.noising import GaussianDiffusion, NoisyBatch
from vitreous.generation.process import Betas, Diffusion, Predicts, Process
from vitreous.models.config import ModelConfig
from vitreous.models.dit import DiT
from vitreous.models.zoo import Model
from vitreous.objectives.base import Objective, ObjectiveConfig, ObjectiveSetting, TrainingProgress
from vitreous.objectives.unlabelled import check_views
from vitreous.system.machine import copy_to_device
from vitreous.system.torch_types import from_numpy
from vitreous.tasks.base import Task
from vitreous.tasks.generation import Generation

_NOISE = 0x6E6F697365  # makes the random numbers of noise and times independent of those of augmentation


@dataclass(frozen=True)
class GeneratorConfig(ObjectiveConfig):
    """Base class of the configs of objectives for generative models.

    `label_dropout` is the share of samples that are trained without their class, as classifier-free guidance requires.
    `autoencoder`, a folder or an `hf:` name, is stored with the model to decode generated latents to images.
    """

    generates: ClassVar[bool] = True
    label_dropout: float = 0.1
    autoencoder: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.label_dropout <= 1:
            raise UsageError(f"label_dropout must be from 0 to 1, got {self.label_dropout}")

    def check(self, model: ModelConfig, classes: tuple[str, ...], views: Any) -> None:
        """Raise UsageError for a model that does not generate images, for another number of classes than the data's,
        and for unsupported views."""
        check_views(views, Augment, self.name)
        if not model.generates_images:
            problem = f"{self.name} trains generative models, but {model.name()} does not generate images"
            raise UsageError(problem, "use a DiT, for example --model DiT-128x6/2")
        if model.classes not in (0, len(classes)):
            raise UsageError(
                f"the model has {model.classes} classes, but the data have {len(classes)}",
                "leave out --model.classes, or set it to 0 to train without classes",
            )


@dataclass(frozen=True)
class DiffusionConfig(GeneratorConfig):
    """Diffusion with `steps` time steps; `betas` and `predicts` are those of `generation.process.Diffusion`.

    For a model with learned variance, the loss is the squared error plus the variational bound.
    """

    name: Literal["diffusion"] = "diffusion"
    steps: int = 1000
    betas: Betas = "linear"
    predicts: Predicts = "noise"

    @property
    def process(self) -> Diffusion:
        """Return the noise process. Raises UsageError for invalid values."""
        return Diffusion(self.steps, self.betas, self.predicts)

    def check(self, model: ModelConfig, classes: tuple[str, ...], views: Any) -> None:
        """Raise UsageError for invalid steps, and the errors of `GeneratorConfig.check`."""
        super().check(model, classes, views)
        assert self.process

    def build(self, model: Model, setting: ObjectiveSetting) -> DiffusionObjective:
        """Build the objective of a model."""
        return DiffusionObjective(model, self, setting)


class GeneratorObjective(Objective):
    """Mean squared error of a model's prediction of the noise, velocity or image.

    The input of `forward` is {"images": (B, C, *image), noisy, "time": (B,) float32, the model's time input, "target":
    (B, C, *image) float32}, and for a model with classes "labels": (B,) int64, of which the last index means no class.
    """

    capturable: ClassVar[bool] = True

    process: Process

    def __init__(self, model: Any, config: Any, setting: ObjectiveSetting) -> None:
        """Raise UsageError for multi-label images."""
        super().__init__()
        problem = "class-conditional generation does not support multi-label images"
        get_label_kind(setting.multilabel).require_single_label(problem, "use --model.classes 0")
        self.model: DiT = model
        self.config, self.setting, self.process = config, setting, config.process

    def draw_noise_and_times(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Draw noise (B, C, *image), and two numbers in [0, 1) per sample (B,) float64, for times and for dropping
        classes.

        All are functions of the seed and the positions of the samples.
        """
        keys, images = derive_keys(self.setting.seed, _NOISE, batch["positions"].numpy()), batch["images"]
        noise = copy_to_device(from_numpy(draw_normal(keys, tuple(images.shape[1:]))), images.device)
        times, label_drop_draws = from_numpy(draw_uniform(keys, 2)).unbind(1)
        return noise, times, label_drop_draws

    def assemble_batch(self, batch: Batch, noised: NoisyBatch, label_drop_draws: Tensor) -> Batch:
        """Assemble the input of `forward` from a batch and its noisy images.

        If the model has classes, "labels" are those of the batch; labels for which `label_drop_draws` (B,) is below
        `label_dropout` are replaced by the index that means no class.
        """
        inputs: Batch = noised._asdict() | {name: batch[name] for name in ("positions", "samples")}
        if null_label := self.model.config.classes:
            is_dropped = copy_to_device(label_drop_draws < self.config.label_dropout, batch["labels"].device)
            inputs["labels"] = batch["labels"].masked_fill(is_dropped, null_label)
        return inputs

    def predict(self, batch: Batch) -> Tensor:
        """Compute the model's output for the input of `forward`: (B, C or 2 C, *image) float32."""
        return self.model(batch["images"], batch["time"], batch.get("labels")).float()  # type: ignore[call-arg]

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Compute the loss, a scalar: the mean squared error between prediction and target."""
        output = self.predict(batch)[:, : batch["target"].shape[1]]
        return {"loss": (output - batch["target"]).square().mean()}

    def deployed_model(self) -> Any:
        """Return the trained model."""
        return self.model

    def task(self) -> Task:
        """Return the generation task, class-conditional if the model has classes."""
        classes = self.setting.classes if self.model.config.classes else ()
        return Generation(classes, self.process, self.config.autoencoder)

    def evaluators(self, train: Split) -> list[Evaluator]:
        """Return the evaluator of the denoising error at several times."""
        return [DenoisingEvaluator(self.process, bool(self.model.config.classes))]

    def flops(self, progress: TrainingProgress) -> float:
        """Return the floating-point operations of a sample's training step, which costs three forward passes."""
        return 6 * self.model.config.macs()


class DiffusionObjective(GeneratorObjective):
    """L_simple (arXiv:2006.11239, Eq. 14), and for a model with learned variance a term of the variational bound that
    trains only the variance (arXiv:2102.09672).

    The input also contains "step": (B,) int64, and for the bound "clean" and "noisy": (B, C, *image) float32.
    """

    logged = ("error", "bound")

    def __init__(self, model: Any, config: DiffusionConfig, setting: ObjectiveSetting = ObjectiveSetting()) -> None:
        super().__init__(model, config, setting)
        self.gaussian = GaussianDiffusion(config.process)

    def prepare(self, batch: Batch, progress: TrainingProgress) -> Batch:
        """Draw a time step, noise, and whether the class is dropped for each sample, and add the noise."""
        noise, times, label_drop_draws = self.draw_noise_and_times(batch)
        images, step = batch["images"], (times * self.gaussian.process.steps).long()
        noised = self.gaussian.make_noisy_batch(images, noise, step)
        bound_inputs = {"clean": images, "noisy": noised.images} if self.model.config.learned_variance else {}
        step = copy_to_device(step, images.device)
        return self.assemble_batch(batch, noised, label_drop_draws) | {"step": step, **bound_inputs}

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Compute the loss and its terms, the squared error and the variational bound (0 without learned variance), as
        scalars."""
        output = self.predict(batch)
        error = (output[:, : batch["target"].shape[1]] - batch["target"]).square().mean()
        if not self.model.config.learned_variance:
            return {"loss": error, "error": error.detach(), "bound": torch.zeros_like(error).detach()}
        bound = self.gaussian.variational_bound(output, batch["clean"], batch["noisy"], batch["step"]).mean()
        return {"loss": error + bound, "error": error.detach(), "bound": bound.detach()}
