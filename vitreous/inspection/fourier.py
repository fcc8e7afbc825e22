"""Fourier analysis of features by depth: relative log amplitudes (Park and Kim, arXiv:2202.06709).

Shapes: B batch, C channels, D width, K frequencies; the last two axes of a grid are (h, w).
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

LOG_EPSILON = 1e-6  # added to amplitudes before the logarithm, as in the paper


class SpectrumLocation(NamedTuple):
    """The point in the model at which a spectrum is computed: after the patch embedding (`layer` -1), or after the
    attention or MLP (`sublayer`) of a block."""

    layer: int
    sublayer: Literal["embedding", "attention", "mlp"]


class FourierSpectra:
    """Mean log amplitudes of a model's residual stream: call `add` for each batch of images, then read the properties.

    `frequency` (K,) are the frequencies in units of pi per patch, `locations` the points in the model. `add` raises
    UsageError for a model without tokens, and for a grid with a side below three.
    """

    def __init__(self, model: VisionModel[Any]) -> None:
        self.model, self.images = model, 0
        self.locations: list[SpectrumLocation] = []
        self.frequency = np.zeros(0)
        self._sums: list[np.ndarray] = []

    def add(self, images: Tensor) -> None:
        """Add the spectra of a batch of images (B, C, *image) to the means over images."""
        spectra: list[np.ndarray] = []
        locations: list[SpectrumLocation] = []

        def store_spectrum(state: ResidualState) -> None:
            """Append the spectrum after a sublayer and its location."""
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
        """Return the log amplitudes ln(|F| + 1e-6) of the diagonal frequencies, the constant term first:
        (locations, K), the mean over images and channels."""
        return np.stack(self._sums) / self.images

    @property
    def relative(self) -> np.ndarray:
        """Return the log amplitudes minus that of the constant term: (locations, K). Lower values at high frequencies
        mean smoother features."""
        return self.log_amplitude - self.log_amplitude[:, :1]


def compute_log_amplitudes(maps: Tensor) -> Tensor:
    """Compute the mean over channels of ln(|F| + 1e-6) at the frequencies of `get_diagonal_frequencies`: (B, *grid, D)
    -> (B, K) float64.

    Axes before the last two of the grid are averaged. Equivalent loop on a square grid of side n, with F the
    unnormalised 2-D transform of a channel:

        out[b, k] = mean(ln(|F[k, k]| + 1e-6) for F in channels), k = 0 .. ceil(n / 2) - 1
    """
    height, width = maps.shape[-3:-1]
    rows, columns = get_diagonal_indices((height, width))
    spectrum = torch.fft.fft2(maps.float(), dim=(-3, -2))[..., rows, columns, :].abs()
    log_amplitudes = (spectrum + LOG_EPSILON).log().double().mean(-1)  # (B, ..., K)
    return log_amplitudes.mean(tuple(range(1, log_amplitudes.ndim - 1))) if log_amplitudes.ndim > 2 else log_amplitudes


def get_diagonal_indices(grid: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return the row and column indices (K,) of the spectrum's diagonal, below the Nyquist frequency of the shorter
    side.

    Along the longer side, they are the indices of the nearest frequencies.
    """
    height, width = grid[-2:]
    min_side = min(height, width)
    steps = torch.arange(math.ceil(min_side / 2))
    return (steps * height / min_side + 0.5).floor().long(), (steps * width / min_side + 0.5).floor().long()


def get_diagonal_frequencies(grid: tuple[int, ...]) -> np.ndarray:
    """Return the frequencies (K,) of `get_diagonal_indices` in units of pi per patch: 2 k / n for a shorter side of n
    patches.

    Raises UsageError for a side below three, which has only the constant term.
    """
    min_side = min(grid[-2:])
    if min_side < 3:
        raise UsageError(
            f"frequencies require a grid of at least 3 patches along each side, got {' x '.join(map(str, grid))}",
            "use a larger --image-size",
        )
    return 2 * np.arange(math.ceil(min_side / 2)) / min_side
