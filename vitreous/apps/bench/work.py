"""The workloads of the benchmark, and its contenders: libraries with settings whose throughput is measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

import numpy as np

DECODE_LIMIT = "decoding alone"  # settings of the contender that measures the limit for JPEG files
LIMIT_CONTENDERS = ("limit", "peak")  # contenders that only measure the machine
CIFAR_IMAGES, CIFAR_IMAGE_SIZE = 50_000, 32  # images of the task `memory`, and their height and width

#: runs one step and returns its number of units: images, or the operations of a peak
BenchmarkStep = Callable[[], float]


@dataclass(frozen=True)
class Workload:
    """The task, model, sizes and device that all contenders of a race share. `images` is a folder of photographs for
    tasks that read files."""

    task: str
    model: str
    image_size: int
    batch_size: int
    _: KW_ONLY
    device: str = "cpu"
    images: str | None = None

    @property
    def uses_compile(self) -> bool:
        """Return whether a long `vitreous train` run would compile the model's blocks on this device."""
        return self.device.startswith("cuda")

    @property
    def loads_ahead(self) -> bool:
        """Return whether contenders may prefetch batches in worker processes, as in the loader tasks."""
        return self.task in ("loader", "memory")

    def title(self) -> str:
        """Return the title of the race: task, model, image size, batch size."""
        return f"{self.task}, {self.model} at {self.image_size}, batch {self.batch_size}"


@dataclass(frozen=True)
class Timing:
    """Settings of a race: number of measured rounds, minimum seconds of a contender per round, and whether contenders
    are profiled afterwards."""

    rounds: int = 5
    seconds: float = 1.0
    profile: bool = False


@dataclass(frozen=True)
class LogitsStep:
    """A step from images to logits whose logits can be compared with a reference.

    `compute_logits` and `compute_reference_logits` both return (B, K); the reference is PyTorch's float32 logits for
    the same images and weights.
    """

    step: BenchmarkStep
    compute_logits: Callable[[], np.ndarray]
    compute_reference_logits: Callable[[], np.ndarray]

    def __call__(self) -> float:
        """Run one step."""
        return self.step()

    def error(self) -> float | None:
        """Return the relative L2 error of the logits, |logits - reference| / |reference|; None if all reference logits
        are 0, as for heads that are initialised to 0."""
        reference = self.compute_reference_logits().astype(np.float64)
        norm = float(np.linalg.norm(reference))
        return float(np.linalg.norm(self.compute_logits() - reference)) / norm if norm else None


@dataclass(frozen=True)
class Contender:
    """A library with settings whose throughput is measured: `build` builds its step, `needs` is the required
    package."""

    name: str
    settings: str
    build: Callable[[Workload], BenchmarkStep]
    needs: str = "torch"
    _: KW_ONLY
    is_ours: bool = False

    @property
    def label(self) -> str:
        """Return a label such as `timm, default (fp32)`."""
        return f"{self.name}, {self.settings}"
