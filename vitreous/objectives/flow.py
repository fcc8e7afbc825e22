"""Objective of rectified flow models, which follow straight lines from noise to images (arXiv:2209.03003,
arXiv:2401.08740).

Shapes: B images of C channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vitreous.data.batch import Batch
from vitreous.errors import UsageError
from vitreous.generation.noising import RectifiedFlow
from vitreous.generation.process import Flow
from vitreous.models.zoo import Model
from vitreous.objectives.base import ObjectiveSetting, TrainingProgress
from vitreous.objectives.diffusion import GeneratorConfig, GeneratorObjective
from vitreous.system.torch_types import ndtri


@dataclass(frozen=True)
class FlowConfig(GeneratorConfig):
    """Prediction of the velocity along a straight line from noise to an image.

    `times` is the distribution of times: uniform in 0 to 1 (`uniform`), or the logistic function of a standard normal
    number (`logit-normal`, arXiv:2403.03206, section 3.1), which concentrates in the middle. `scale`: the model's time
    input ranges from 0 to this value. Raises UsageError for invalid values.
    """

    name: Literal["flow"] = "flow"
    times: Literal["uniform", "logit-normal"] = "uniform"
    scale: float = 1000.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale <= 0:
            raise UsageError(f"scale must be above 0, got {self.scale}")

    @property
    def process(self) -> Flow:
        """Return the noise process."""
        return Flow(self.scale)

    def build(self, model: Model, setting: ObjectiveSetting) -> FlowObjective:
        """Build the objective of a model."""
        return FlowObjective(model, self, setting)


class FlowObjective(GeneratorObjective):
    """Mean squared error of the predicted velocity, which is image minus noise."""

    def prepare(self, batch: Batch, progress: TrainingProgress) -> Batch:
        """Draw a time, noise, and whether the class is dropped for each sample, and interpolate between image and
        noise."""
        noise, times, label_drop_draws = self.draw_noise_and_times(batch)
        if self.config.times == "logit-normal":
            times = ndtri(times.clamp(min=1e-9)).sigmoid()
        return self.assemble_batch(
            batch, RectifiedFlow(self.config.process).make_noisy_batch(batch["images"], noise, times), label_drop_draws
        )
