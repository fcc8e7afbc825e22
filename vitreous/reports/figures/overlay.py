"""Maps of patches drawn over pictures: what the figures of attention share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from vitreous.errors import UsageError
from vitreous.inspection.hooks import has_attention
from vitreous.reports.scene import Picture, Scene

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE = 9  # of letters, in points
SIDE = 1.6  # of a panel's longer side, in inches
HEAT = "inferno"
PICTURES = 4  # shown where none are named


def asked(scene: Scene, most: int = PICTURES) -> list[Picture]:
    """The pictures of a figure: those named, or a few of the data."""
    return scene.some(most)


def panels(
    scene: Scene, rows: int, columns: int, heads: Sequence[str] = (), side: float = SIDE
) -> tuple[Figure, np.ndarray]:
    """A figure of rows x columns empty panels of the images' aspect, a line of text over each column: the figure, and
    its axes."""
    from matplotlib.figure import Figure

    height, width = (side * length / max(scene.preprocess.image) for length in scene.preprocess.image)
    figure = Figure(figsize=(columns * (width + 0.08), rows * (height + 0.08) + 0.3), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for place in axes.flat:
        place.set_axis_off()
    for place, head in zip(axes[0], heads, strict=False):
        place.set_title(head, fontsize=SIZE)
    return figure, axes


def show(axes: Axes, picture: Picture, dim: float = 1.0) -> None:
    """The picture as the model sees it, or darkened to a share `dim` of its light."""
    axes.imshow((np.asarray(picture.shown) * dim).astype(np.uint8), interpolation="nearest")


def heat(axes: Axes, picture: Picture, values: Tensor | np.ndarray) -> Any:
    """A (h, w) map of patches at least zero in colours over the grey picture, its largest value one; the colours'
    image."""
    grey = np.asarray(picture.shown.convert("L"))
    axes.imshow(grey, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
    values = np.asarray(values, dtype=np.float64)
    values = values / max(values.max(), 1e-30)
    extent = (-0.5, grey.shape[1] - 0.5, grey.shape[0] - 0.5, -0.5)
    return axes.imshow(values, cmap=HEAT, vmin=0, vmax=1, alpha=0.65, extent=extent, interpolation="bilinear")


def lit(axes: Axes, picture: Picture, values: Tensor | np.ndarray) -> None:
    """The picture times the map, its largest value one, scaled up bilinearly as the paper does (arXiv:2010.11929, Fig.
    6)."""
    pixels = np.asarray(picture.shown)
    axes.imshow((pixels * enlarged(values, pixels.shape[:2])[..., None]).astype(np.uint8), interpolation="nearest")


def enlarged(values: Tensor | np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """A (h, w) map at least zero -> (H, W) of `size`, bilinear, its largest value one."""
    from PIL import Image

    values = np.asarray(values, dtype=np.float32)
    scaled = Image.fromarray(values / max(float(values.max()), 1e-30)).resize(
        (size[1], size[0]), Image.Resampling.BILINEAR
    )
    return np.asarray(scaled).clip(0, 1)


def scale(figure: Figure, image: Any, axes: np.ndarray, words: str) -> None:
    """A colour bar for the panels, each map relative to its own largest value."""
    bar = figure.colorbar(image, ax=list(axes.flat), shrink=0.8, aspect=25, pad=0.02)
    if bar.solids is not None:
        bar.solids.set_alpha(1)  # not as pale as the map over a picture
    bar.set_label(f"{words}, relative\nto the largest", fontsize=SIZE)
    bar.ax.tick_params(labelsize=SIZE)


def named(axes: Axes, text: str, most: int = 20) -> None:
    """A line of text under a panel, of a path its last part, cut where it is longer than the panel is wide."""
    text = Path(text).name
    text = text if len(text) <= most else text[: most - 1] + "…"
    axes.text(0.5, -0.03, text, transform=axes.transAxes, ha="center", va="top", fontsize=SIZE - 2)


def chosen(numbers: Sequence[int], heads: int) -> list[int]:
    """The heads asked for, or all. Raises UsageError for one that is not there."""
    wrong = [head for head in numbers if not 0 <= head < heads]
    if wrong:
        raise UsageError(
            f"--heads {wrong[0]}: a block has {heads}",
            f"--heads counts from 0 to {heads - 1}, figures from 1 to {heads}",
        )
    return list(dict.fromkeys(numbers)) or list(range(heads))


def last(scene: Scene) -> list[int]:
    """The blocks asked for with --layers, or the last one. Raises UsageError for a model without attention."""
    depth = depth_of(scene)
    return scene.layers(depth) if scene.options.layers else [depth - 1]


def depth_of(scene: Scene) -> int:
    """Blocks of the model. Raises UsageError for a model without attention."""
    has_attention(scene.model)
    return scene.model.config.depth  # type: ignore[union-attr]


def block_of(layer: int, scene: Scene) -> str:
    """A block by its index from 0, for captions: counted from 1, with the option that asks for it."""
    return f"block {layer + 1} of {depth_of(scene)} (--layers {layer})"


def reader(scene: Scene) -> str:
    """Where the answer is read from, for captions."""
    return (
        "the class token"
        if getattr(scene.model.config, "pool", "mean") in ("class", "distilled")
        else "the mean over the patches"
    )
