"""What figures share: the style, panels with images, maps over images, and tiles."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from vitreous.errors import UsageError
from vitreous.inspection.hooks import require_attention
from vitreous.reports.figures.subject import FigureContext, InputImage
from vitreous.reports.pages.thumbnails import ATTENTION_COLORMAP, MIN_MAP_SIDE, enlarge_pixels, overlay_heat_map

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: matplotlib's settings for the figures that `inspect` draws as charts
CHART_STYLE: dict[Any, Any] = {
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
BLUE, ORANGE = "#2f80c4", "#e08a3c"  # legible on white and on black, and differ in grey too
FONT_SIZE = 9  # font size in points
DEFAULT_IMAGE_COUNT = 4  # shown where none are named


def new_figure(width: float, height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Figure, Any]:
    """Return a figure of width x height inches, and its (rows, columns) axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def make_panels(
    scene: FigureContext, rows: int, columns: int, heads: Sequence[str] = (), side: float = 1.6
) -> tuple[Figure, np.ndarray]:
    """Return a figure of empty panels with the images' aspect, `heads` above, and its axes of shape (rows, columns).

    `side`: the longer side of a panel in inches.
    """
    height, width = (side * length / max(scene.preprocess.plane) for length in scene.preprocess.plane)
    figure, axes = new_figure(columns * (width + 0.08), rows * (height + 0.08) + 0.3, rows, columns)
    for place in axes.flat:
        place.set_axis_off()
    for place, head in zip(axes[0], heads, strict=False):
        place.set_title(head, fontsize=FONT_SIZE)
    return figure, axes


def make_image_rows(
    scene: FigureContext, pictures: Sequence[InputImage], heads: Sequence[str], side: float = 1.6
) -> tuple[Figure, np.ndarray]:
    """Return panels with a row for each image, shown with its name in the first column, and their (n, columns) axes."""
    figure, axes = make_panels(scene, len(pictures), len(heads), heads, side)
    for place, picture in zip(axes[:, 0], pictures, strict=True):
        place.imshow(np.asarray(picture.shown), interpolation="nearest")
        label_panel(place, picture.name)
    return figure, axes


def draw_heat_map(axes: Axes, picture: InputImage, values: Tensor | np.ndarray, most: float | None = None) -> Any:
    """Draw a nonnegative (h, w) map of patches over the grey image, relative to `most` or its largest value; return
    what a colour bar is made of."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    weights = np.asarray(values, dtype=np.float64)
    weights = (weights / (most or max(weights.max(), 1e-30))).clip(0, 1)
    width, height = picture.shown.size
    overlay = overlay_heat_map(enlarge_pixels(picture.shown, MIN_MAP_SIDE), weights)
    axes.imshow(np.asarray(overlay), extent=(-0.5, width - 0.5, height - 0.5, -0.5), interpolation="nearest")
    return ScalarMappable(Normalize(0, 1), ATTENTION_COLORMAP)


def draw_weighted_image(axes: Axes, picture: InputImage, values: Tensor | np.ndarray) -> None:
    """Draw the image times a (h, w) map in [0, 1], scaled up bilinearly (arXiv:2010.11929, Fig. 6), at 0 with 15 % of
    its light."""
    from PIL import Image

    pixels, small = np.asarray(picture.shown), Image.fromarray(np.asarray(values, dtype=np.float32))
    light = np.asarray(small.resize(pixels.shape[1::-1], Image.Resampling.BILINEAR)).clip(0, 1)
    axes.imshow((pixels * (0.15 + 0.85 * light[..., None])).astype(np.uint8), interpolation="nearest")


def add_colour_bar(
    figure: Figure, image: Any, axes: np.ndarray, words: str, span: str = "relative\nto the largest"
) -> None:
    """Add a colour bar beside (rows, columns) axes for maps of which each has its own scale, which `span` names."""
    bar = figure.colorbar(image, ax=list(axes.flat), shrink=0.8, aspect=25, pad=0.02)
    bar.set_label(f"{words}, {span}", fontsize=FONT_SIZE)
    bar.ax.tick_params(labelsize=FONT_SIZE)


def label_panel(axes: Axes, text: str, most: int = 20) -> None:
    """Write a line of text under a panel: the last part of a path, cut to `most` characters."""
    text = Path(text).name
    text = text if len(text) <= most else text[: most - 1] + "…"
    place = {"transform": axes.transAxes, "ha": "center", "va": "top"}
    axes.text(0.5, -0.03, text, **place, fontsize=FONT_SIZE - 2, parse_math=False)  # a file may be called $x$


def choose_heads(numbers: Sequence[int], heads: int) -> list[int]:
    """Return the heads asked for, by default all. Raises UsageError for a number outside 0 .. heads - 1."""
    wrong = [head for head in numbers if not 0 <= head < heads]
    if wrong:
        hint = f"--heads counts from 0 to {heads - 1}, figures from 1 to {heads}"
        raise UsageError(f"--heads {wrong[0]}: a block has {heads}", hint)
    return list(dict.fromkeys(numbers)) or list(range(heads))


def count_attention_blocks(scene: FigureContext) -> int:
    """Return the number of blocks. Raises UsageError for a model without attention."""
    require_attention(scene.model)
    return scene.model.config.depth


def tile_images(tiles: np.ndarray, gap: int = 1, between: float = np.nan) -> np.ndarray:
    """Lay out (rows, columns, h, w[, 3]) tiles as one (H, W[, 3]) image, with `gap` pixels of value `between`
    apart."""
    rows, columns, height, width = tiles.shape[:4]
    size = rows * (height + gap) - gap, columns * (width + gap) - gap
    whole = np.full((*size, *tiles.shape[4:]), between, dtype=np.float32)
    for i, j in np.ndindex(rows, columns):
        whole[i * (height + gap) :, j * (width + gap) :][:height, :width] = tiles[i, j]
    return whole


def hide_axes(axes: Axes) -> None:
    """Remove ticks and frame, for images."""
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)


def count_from_one(name: str) -> str:
    """Add one to the indices in a name: `block 0` -> `block 1`, `stage 0 unit 2` -> `stage 1 unit 3`."""
    return re.sub(r"\d+", lambda match: str(int(match[0]) + 1), name)


def format_dimensions(lengths: Any) -> str:
    """Format a size: (14, 14) -> `14 × 14`."""
    return " × ".join(map(str, lengths))
