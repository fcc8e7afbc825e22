"""Relative log amplitude of features by depth (Park and Kim, arXiv:2202.06709).

B batch, D width; the last two axes of a grid are (h, w).
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitreous.errors import UsageError
from vitreous.inspection.hooks import ResidualState, visit_residual_states
from vitreous.models.base import VisionModel

LOG_EPSILON = 1e-6  # added to amplitudes before the logarithm, as Park and Kim do


class SpectrumLocation(NamedTuple):
    """The location of a spectrum: `sublayer` the patch embedding (`layer` -1), or the attention or MLP of a block."""

    layer: int
    sublayer: Literal["embedding", "attention", "mlp"]


class FourierSpectra:
    """Mean log amplitudes of a model's residual stream: `add` images batch by batch, then read the results.

    `add` raises UsageError for a model without tokens and for a grid with a side below three.
    """

    def __init__(self, model: VisionModel[Any]) -> None:
        self.model, self.images = model, 0
        self.locations: list[SpectrumLocation] = []
        self.frequency = np.zeros(0)
        self._sums: list[np.ndarray] = []

    def add(self, images: Tensor) -> None:
        """Add a batch of model inputs (B, C, *image)."""
        spectra: list[np.ndarray] = []
        locations: list[SpectrumLocation] = []

        def store_spectrum(state: ResidualState) -> None:
            locations.append(SpectrumLocation(state.layer, state.sublayer))
            spectra.append(compute_log_amplitudes(state.patches).sum(0).cpu().numpy())
            self.frequency = get_diagonal_frequencies(state.grid)

        visit_residual_states(self.model, images, store_spectrum)
        if len({spectrum.shape for spectrum in spectra}) > 1:
            raise UsageError(
                "the stages of this model have grids of different sizes, so their spectra have no common axis",
                "use similarity or distance to compare its blocks",
            )
        self._sums = [a + b for a, b in zip(self._sums, spectra, strict=True)] if self._sums else spectra
        self.locations, self.images = locations, self.images + len(images)

    @property
    def log_amplitude(self) -> np.ndarray:
        """Return the log amplitude ln(|F| + 1e-6) of the diagonal frequencies, DC first: (locations, K), mean over
        images and channels."""
        return np.stack(self._sums) / self.images

    @property
    def relative(self) -> np.ndarray:
        """Return (locations, K): log amplitudes minus the constant term's; lower at high frequencies is smoother."""
        return self.log_amplitude - self.log_amplitude[:, :1]


def compute_log_amplitudes(maps: Tensor) -> Tensor:
    """Compute (B, K) float64 of (B, *grid, D): the mean over channels of ln(|F| + 1e-6) at the frequencies of
    `get_diagonal_frequencies`.

    Equivalent loop on a square grid of side n, with F the unnormalised 2-D transform of a channel:
        out[b, k] = mean(ln(|F[k, k]| + 1e-6) for F in channels), k = 0 .. ceil(n / 2) - 1

    Axes before the last two of the grid are averaged.
    """
    height, width = maps.shape[-3:-1]
    rows, columns = get_diagonal_indices((height, width))
    spectrum = torch.fft.fft2(maps.float(), dim=(-3, -2))[..., rows, columns, :].abs()
    log_amplitudes = (spectrum + LOG_EPSILON).log().double().mean(-1)  # (B, ..., K)
    return log_amplitudes.mean(tuple(range(1, log_amplitudes.ndim - 1))) if log_amplitudes.ndim > 2 else log_amplitudes


def get_diagonal_indices(grid: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return the (K,) row and (K,) column indices of the spectrum's diagonal, below the Nyquist frequency of the
    shorter side.

    Along the longer side, these are the nearest frequencies.
    """
    height, width = grid[-2:]
    min_side = min(height, width)
    steps = torch.arange(math.ceil(min_side / 2))
    return (steps * height / min_side + 0.5).floor().long(), (steps * width / min_side + 0.5).floor().long()


def get_diagonal_frequencies(grid: tuple[int, ...]) -> np.ndarray:
    """Return (K,) frequencies of `get_diagonal_indices` in units of pi per patch: 2 k / n for a shorter side of n
    patches.

    Raises UsageError for a side below three, which only has the constant term.
    """
    min_side = min(grid[-2:])
    if min_side < 3:
        raise UsageError(
            f"a grid of {' x '.join(map(str, grid))} patches has no frequencies", "use a larger --image-size"
        )
    return 2 * np.arange(math.ceil(min_side / 2)) / min_side
