"""Latents: autoencoder codes of images, on which latent diffusion models train instead of pixels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from vitreous.errors import UsageError


@dataclass(frozen=True)
class Latents:
    """Description of stored latents: `autoencoder` is a folder or an `hf:` name; (z - `shift`) `scale` has about unit
    std; one latent covers `stride` x `stride` pixels."""

    autoencoder: str
    scale: float
    shift: float = 0.0
    stride: int = 8

    def normalisation(self, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return the mean and std of `Preprocess` for these latents."""
        return (self.shift,) * channels, (1 / self.scale,) * channels


class LatentEncoder(Protocol):
    """An autoencoder that encodes images as latents with `channels` channels."""

    channels: int
    latents: Latents

    def encode(self, pixels: np.ndarray, seed: int) -> np.ndarray:
        """Encode (H, W, 3) uint8 as (h, w, channels) float32: a sample of the posterior, determined by the seed."""
        ...


def latents_from_json(record: Any) -> Latents | None:
    """Parse the latents in a pack's document. Raises UsageError for an invalid record."""
    if record is None:
        return None
    try:
        autoencoder, stride = record["autoencoder"], int(record["stride"])
        latents = Latents(str(autoencoder), float(record["scale"]), float(record["shift"]), stride)
    except (KeyError, TypeError, ValueError):
        raise UsageError(f"invalid description of latents: {record}") from None
    if not (latents.scale > 0 and stride > 0):
        raise UsageError(f"invalid latents: scale {latents.scale}, stride {stride}")
    return latents
