"""Workloads of the benchmark, and contenders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

import numpy as np

DECODE_LIMIT = "decoding alone"  # the limit for JPEG files
LIMIT_CONTENDERS = ("limit", "peak")  # contenders that only measure the machine
CIFAR_IMAGES, CIFAR_IMAGE_SIZE = 50_000, 32  # images of the task `memory`, and their height and width

#: runs one step and returns its number of images (for a peak: of operations)
BenchmarkStep = Callable[[], float]


@dataclass(frozen=True)
class Workload:
    """A workload of all contenders; `images` is a folder of photographs for tasks that read files."""

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
        """Return a title for people."""
        return f"{self.task}, {self.model} at {self.image_size}, batch {self.batch_size}"


@dataclass(frozen=True)
class Timing:
    """Measurement of a race: number of measured rounds, minimum seconds of a contender per round, and whether
    contenders are profiled afterwards."""

    rounds: int = 5
    seconds: float = 1.0
    profile: bool = False


@dataclass(frozen=True)
class LogitsStep:
    """A step from images to logits that can also measure the error of its outputs.

    `compute_reference_logits` returns PyTorch's float32 outputs for the same images and weights; both return (B, K).
    """

    step: BenchmarkStep
    compute_logits: Callable[[], np.ndarray]
    compute_reference_logits: Callable[[], np.ndarray]

    def __call__(self) -> float:
        """Run one step."""
        return self.step()

    def error(self) -> float | None:
        """Return |outputs - exact| / |exact|; None if exact logits are zero, as for some new heads."""
        exact = self.compute_reference_logits().astype(np.float64)
        length = float(np.linalg.norm(exact))
        return float(np.linalg.norm(self.compute_logits() - exact)) / length if length else None


@dataclass(frozen=True)
class Contender:
    """A library with settings: a builder of steps, and the required package."""

    name: str
    settings: str
    build: Callable[[Workload], BenchmarkStep]
    needs: str = "torch"
    _: KW_ONLY
    is_ours: bool = False

    @property
    def label(self) -> str:
        """Return a label such as `timm, fp32 (default)`."""
        return f"{self.name}, {self.settings}"
