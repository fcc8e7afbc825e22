"""What computes answers, whoever asks: pixels in, logits out, as numpy arrays.

A batch is cut into parts of one fixed size, the last one filled up with black pictures, so an image's answer is the same to the
last bit whatever comes beside it. B images, K classes, D numbers that the head reads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from vitreous.evaluation.engine import Engine, How, Pictures
    from vitreous.weights.bundle import Bundle

PART = 8  # images that are computed together


class Runtime(Protocol):
    """A model that answers; `load` finds the one for a run, a bundle or an exported file."""

    def logits(self, pixels: np.ndarray) -> np.ndarray:
        """(B, C, *image) pixels as `Preprocess.array` makes them -> (B, K) float32."""
        ...

    def features(self, pixels: np.ndarray) -> np.ndarray:
        """(B, C, *image) pixels -> (B, D) float32, what the head reads. Raises UsageError where the file answers only in logits."""
        ...


class TorchRuntime:
    """A bundle, computed by its engine."""

    def __init__(self, bundle: Bundle, how: How | None = None, pictures: Pictures | None = None) -> None:
        from vitreous.evaluation.engine import make_engine

        self.bundle, self.how = bundle, how
        self.engine = make_engine(bundle.model, bundle.preprocess, how, pictures)

    @cached_property
    def before_head(self) -> Engine:
        """The engine of the model without its head."""
        from vitreous.evaluation.engine import make_engine
        from vitreous.evaluation.features import headless

        return make_engine(headless(self.bundle.model), self.bundle.preprocess, self.how)

    def logits(self, pixels: np.ndarray) -> np.ndarray:
        """(B, C, *image) pixels -> (B, K) float32."""
        return in_parts(partial(compute, self.engine), pixels, PART)

    def features(self, pixels: np.ndarray) -> np.ndarray:
        """(B, C, *image) pixels -> (B, D) float32, what the head reads."""
        return in_parts(partial(compute, self.before_head), pixels, PART)


def compute(engine: Engine, pixels: np.ndarray) -> np.ndarray:
    """What an engine says of pixels, as numpy arrays."""
    import torch

    return engine(torch.from_numpy(pixels)).numpy()


def in_parts(compute: Callable[[np.ndarray], np.ndarray], pixels: np.ndarray, size: int) -> np.ndarray:
    """Compute parts of exactly `size` images and join them; what fills the last part up is cut off again."""
    count = len(pixels)
    lacking = -count % size
    whole = np.concatenate([pixels, np.zeros((lacking, *pixels.shape[1:]), pixels.dtype)]) if lacking else pixels
    return np.concatenate([compute(whole[start : start + size]) for start in range(0, len(whole), size)])[:count]
