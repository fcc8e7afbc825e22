"""Latents: what an autoencoder makes of images, and what a generator learns from in the place of pixels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from vitreous.errors import UsageError


@dataclass(frozen=True)
class Latents:
    """What latents are of: `autoencoder`, a folder or an `hf:` name; (z - `shift`) `scale` has about unit deviation;
    a latent stands for `stride` x `stride` pixels."""

    autoencoder: str
    scale: float
    shift: float = 0.0
    stride: int = 8

    def normalisation(self, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The mean and deviation that `Preprocess` takes for these latents."""
        return (self.shift,) * channels, (1 / self.scale,) * channels


class LatentEncoder(Protocol):
    """An autoencoder that turns images into latents of so many `channels`."""

    channels: int
    latents: Latents

    def encode(self, pixels: np.ndarray, seed: int) -> np.ndarray:
        """(H, W, 3) uint8 -> (h, w, channels) float32: a draw from the posterior, a function of the seed."""
        ...


def latents_from_json(record: Any) -> Latents | None:
    """The latents of a pack's document. Raises UsageError for a record of another form."""
    if record is None:
        return None
    try:
        place, stride = record["autoencoder"], int(record["stride"])
        latents = Latents(str(place), float(record["scale"]), float(record["shift"]), stride)
    except (KeyError, TypeError, ValueError):
        raise UsageError(f"latents are not described by {record}") from None
    if not (latents.scale > 0 and stride > 0):
        raise UsageError(f"latents are not scaled by {latents.scale}, with a stride of {stride}")
    return latents
