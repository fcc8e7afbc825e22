"""Latents: autoencoder codes of images, on which latent diffusion models train instead of pixels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from vitreous.errors import UsageError


@dataclass(frozen=True)
class Latents:
    """Description of stored latents.

    `autoencoder` is a folder or an `hf:` name. For latents z, (z - `shift`) * `scale` has about unit standard
    deviation. One latent vector covers `stride` x `stride` pixels.
    """

    autoencoder: str
    scale: float
    shift: float = 0.0
    stride: int = 8

    def normalisation(self, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return the channel means and standard deviations with which a `Preprocess` normalises these latents."""
        return (self.shift,) * channels, (1 / self.scale,) * channels


class LatentEncoder(Protocol):
    """An autoencoder that encodes images as latents with `channels` channels."""

    channels: int
    latents: Latents

    def encode(self, pixels: np.ndarray, seed: int) -> np.ndarray:
        """Encode an image (H, W, 3) uint8 as latents (h, w, channels) float32, drawn from the posterior with a seed."""
        ...


def latents_from_json(record: Any) -> Latents | None:
    """Parse the description of latents in a `pack.json`; None if there is none. Raises UsageError for invalid
    values."""
    if record is None:
        return None
    try:
        autoencoder, stride = record["autoencoder"], int(record["stride"])
        latents = Latents(str(autoencoder), float(record["scale"]), float(record["shift"]), stride)
    except (KeyError, TypeError, ValueError):
        raise UsageError(f"invalid description of latents: {record}") from None
    if not (latents.scale > 0 and stride > 0):
        raise UsageError(f"scale and stride of latents must be above 0, got scale {latents.scale}, stride {stride}")
    return latents
