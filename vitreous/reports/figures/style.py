"""What figures have in common: how they look, and pictures made of tiles."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from vitreous.reports.scene import FigureResult, Scene

LOOK: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8,
}
BLUE, ORANGE = "#1f5a96", "#c2571a"  # apart in grey too

Making = TypeVar("Making", bound="Callable[[Scene], list[FigureResult]]")


def styled(make: Making) -> Making:
    """A `make` whose figures are drawn in the common style."""

    @wraps(make)
    def drawn(scene: Scene) -> list[FigureResult]:
        from matplotlib import rc_context

        with rc_context(LOOK):
            return make(scene)

    return drawn  # type: ignore[return-value]


def mosaic(tiles: np.ndarray, gap: int = 1, between: float = np.nan) -> np.ndarray:
    """(rows, columns, h, w[, 3]) -> one (H, W[, 3]) picture of the tiles, which one axes draws sooner than many."""
    rows, columns, height, width = tiles.shape[:4]
    whole = np.full(
        (rows * (height + gap) - gap, columns * (width + gap) - gap, *tiles.shape[4:]), between, dtype=np.float32
    )
    for i in range(rows):
        for j in range(columns):
            whole[i * (height + gap) :, j * (width + gap) :][:height, :width] = tiles[i, j]
    return whole


def hide_axes(axes: Axes) -> None:
    """No ticks and no frame, for pictures."""
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)


def count_from_one(name: str) -> str:
    """A name with its indices as people count: `block 0` -> `block 1`, `stage 0 unit 2` -> `stage 1 unit 3`."""
    return re.sub(r"\d+", lambda match: str(int(match[0]) + 1), name)


def times(lengths: Any) -> str:
    """(14, 14) -> `14 × 14`."""
    return " × ".join(map(str, lengths))
