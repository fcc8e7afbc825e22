"""Shared drawing functions: style, panels of images, heat maps over images, and tiles."""

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

#: matplotlib settings of the charts of `inspect`
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
BLUE, ORANGE = "#2f80c4", "#e08a3c"  # legible on white and on black, and distinct in greyscale
FONT_SIZE = 9  # font size in points
DEFAULT_IMAGE_COUNT = 4  # images of the dataset that are shown if no input images are given


def new_figure(width: float, height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Figure, Any]:
    """Return a figure of width x height inches, and its (rows, columns) axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def make_panels(
    context: FigureContext, rows: int, columns: int, titles: Sequence[str] = (), side: float = 1.6
) -> tuple[Figure, np.ndarray]:
    """Return a figure of empty panels for images, and its axes of shape (rows, columns).

    Panels have the aspect ratio of the model's input images, and `titles` above the first row. `side` is the longer
    side of a panel in inches.
    """
    height, width = (side * length / max(context.preprocess.plane) for length in context.preprocess.plane)
    figure, axes = new_figure(columns * (width + 0.08), rows * (height + 0.08) + 0.3, rows, columns)
    for panel in axes.flat:
        panel.set_axis_off()
    for panel, title in zip(axes[0], titles, strict=False):
        panel.set_title(title, fontsize=FONT_SIZE)
    return figure, axes


def make_image_rows(
    context: FigureContext, input_images: Sequence[InputImage], titles: Sequence[str], side: float = 1.6
) -> tuple[Figure, np.ndarray]:
    """Return a figure with one row per image, and its (n, columns) axes; the first column shows the image and its
    name, the others are empty."""
    figure, axes = make_panels(context, len(input_images), len(titles), titles, side)
    for panel, input_image in zip(axes[:, 0], input_images, strict=True):
        panel.imshow(np.asarray(input_image.rgb_image), interpolation="nearest")
        label_panel(panel, input_image.name)
    return figure, axes


def draw_heat_map(
    axes: Axes, input_image: InputImage, values: Tensor | np.ndarray, max_value: float | None = None
) -> Any:
    """Draw a nonnegative map of patches (h, w) over the grey image. Returns the colour scale for a colour bar.

    The map is divided by `max_value`, by default its maximum.
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    weights = np.asarray(values, dtype=np.float64)
    weights = (weights / (max_value or max(weights.max(), 1e-30))).clip(0, 1)
    width, height = input_image.rgb_image.size
    overlay = overlay_heat_map(enlarge_pixels(input_image.rgb_image, MIN_MAP_SIDE), weights)
    axes.imshow(np.asarray(overlay), extent=(-0.5, width - 0.5, height - 0.5, -0.5), interpolation="nearest")
    return ScalarMappable(Normalize(0, 1), ATTENTION_COLORMAP)


def draw_weighted_image(axes: Axes, input_image: InputImage, values: Tensor | np.ndarray) -> None:
    """Draw the image times a (h, w) map in [0, 1], enlarged bilinearly (arXiv:2010.11929, Fig. 6); 0 keeps 15 % of the
    brightness."""
    from PIL import Image

    pixels, weight_image = np.asarray(input_image.rgb_image), Image.fromarray(np.asarray(values, dtype=np.float32))
    brightness = np.asarray(weight_image.resize(pixels.shape[1::-1], Image.Resampling.BILINEAR)).clip(0, 1)
    axes.imshow((pixels * (0.15 + 0.85 * brightness[..., None])).astype(np.uint8), interpolation="nearest")


def add_colour_bar(
    figure: Figure, mappable: Any, axes: np.ndarray, label: str, span: str = "relative\nto the largest"
) -> None:
    """Add a colour bar to (rows, columns) axes of separately scaled maps; `span` describes the scale."""
    colour_bar = figure.colorbar(mappable, ax=list(axes.flat), shrink=0.8, aspect=25, pad=0.02)
    colour_bar.set_label(f"{label}, {span}", fontsize=FONT_SIZE)
    colour_bar.ax.tick_params(labelsize=FONT_SIZE)


def label_panel(axes: Axes, text: str, max_length: int = 20) -> None:
    """Write `text`, truncated to `max_length` characters, under a panel. Of a path, only write the file name."""
    text = Path(text).name
    text = text if len(text) <= max_length else text[: max_length - 1] + "…"
    alignment = {"transform": axes.transAxes, "ha": "center", "va": "top"}
    axes.text(0.5, -0.03, text, **alignment, fontsize=FONT_SIZE - 2, parse_math=False)  # a file name may contain $x$


def choose_heads(head_indices: Sequence[int], num_heads: int) -> list[int]:
    """Return the head indices without duplicates, by default all. Raises UsageError for an index that does not
    exist."""
    invalid = [head for head in head_indices if not 0 <= head < num_heads]
    if invalid:
        hint = f"use --heads 0 to {num_heads - 1}; figures count from 1"
        raise UsageError(f"--heads {invalid[0]}: a block has {num_heads} heads", hint)
    return list(dict.fromkeys(head_indices)) or list(range(num_heads))


def count_attention_blocks(context: FigureContext) -> int:
    """Return the number of blocks. Raises UsageError for a model without attention."""
    require_attention(context.model)
    return context.model.config.depth


def tile_images(tiles: np.ndarray, gap: int = 1, gap_value: float = np.nan) -> np.ndarray:
    """Arrange (rows, columns, h, w[, 3]) tiles as one (H, W[, 3]) image, separated by `gap` pixels of value
    `gap_value`."""
    rows, columns, height, width = tiles.shape[:4]
    size = rows * (height + gap) - gap, columns * (width + gap) - gap
    canvas = np.full((*size, *tiles.shape[4:]), gap_value, dtype=np.float32)
    for row, column in np.ndindex(rows, columns):
        canvas[row * (height + gap) :, column * (width + gap) :][:height, :width] = tiles[row, column]
    return canvas


def hide_axes(axes: Axes) -> None:
    """Remove the ticks and the frame of axes."""
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)


def count_from_one(name: str) -> str:
    """Add one to the indices in a name: `block 0` -> `block 1`, `stage 0 unit 2` -> `stage 1 unit 3`."""
    return re.sub(r"\d+", lambda match: str(int(match[0]) + 1), name)


def format_dimensions(lengths: Any) -> str:
    """Format a size of any number of axes: (14, 14) -> `14 × 14`."""
    return " × ".join(map(str, lengths))
