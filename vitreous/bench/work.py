"""What is measured: pieces of work, and who does them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

DECODING = "decoding alone"  # the limit of who reads JPEG files
CIFAR, SIDE = 50_000, 32  # pictures of the task `memory`, and their side

#: does one unit of the work and returns how many images (for a peak: how many operations) that was
Turn = Callable[[], float]


@dataclass(frozen=True)
class Work:
    """One piece of work that contenders do in turn. `images` is a folder of photographs, for the tasks that read
    files."""

    task: str
    model: str
    image_size: int
    batch_size: int
    device: str = "cpu"
    images: str | None = None

    @property
    def stocks(self) -> bool:
        """Whether contenders have processes that go on working when they are not asked."""
        return self.task in ("loader", "memory")

    def title(self) -> str:
        """For people."""
        return f"{self.task}, {self.model} at {self.image_size}, batch {self.batch_size}"


@dataclass(frozen=True)
class Answering:
    """A turn of images to logits that can also say how exact its answers are: beside `exact`, what PyTorch says in
    float32 of the same images by the same weights. Both are (B, K), made when they are asked for."""

    turn: Turn
    answers: Callable[[], np.ndarray]
    exact: Callable[[], np.ndarray]

    def __call__(self) -> float:
        """One turn."""
        return self.turn()

    def error(self) -> float | None:
        """The length of the difference to the length of the exact logits; None where those are zero, as some heads are
        at first."""
        exact = self.exact().astype(np.float64)
        length = float(np.linalg.norm(exact))
        return float(np.linalg.norm(self.answers() - exact)) / length if length else None


@dataclass(frozen=True)
class Contender:
    """Who does it, with which settings: a builder, and the package that it needs."""

    name: str
    settings: str
    build: Callable[[Work], Turn]
    needs: str = "torch"
    ours: bool = False

    @property
    def label(self) -> str:
        """`timm, fp32 (default)`."""
        return f"{self.name}, {self.settings}"
