"""Figures of volumes and signals: attention over the middle slices of three axes, or under a curve."""

from __future__ import annotations

import numpy as np
from PIL import Image
from torch import Tensor

from vitreous.reports.figures.clips import compute_clip_maps
from vitreous.reports.figures.drawing import (
    ATTENTION_COLORMAP,
    BLUE,
    DEFAULT_IMAGE_COUNT,
    FONT_SIZE,
    add_colour_bar,
    draw_heat_map,
    label_panel,
    new_figure,
)
from vitreous.reports.figures.subject import FigureContext, FigureResult, InputImage

AXIS_NAMES = ("depth", "height", "width")
SLICE_INCHES, CURVE_INCHES = 1.6, 5.2  # inches: the longer side of a slice, the length of a curve


def make_slices(scene: FigureContext) -> list[FigureResult]:
    """Draw the middle slice of each of the three axes of volumes, with its attention."""
    pictures = scene.take_images(DEFAULT_IMAGE_COUNT)
    maps = [compute_clip_maps(scene, one) for one in pictures]
    sides = [side for axis in range(3) for side in [get_plane_size(scene.preprocess.image, axis)] * 2]
    widths = [SLICE_INCHES * width / max(scene.preprocess.image) for _, width in sides]
    height = SLICE_INCHES * max(height for height, _ in sides) / max(scene.preprocess.image)
    size = sum(widths) + 1.4, len(pictures) * (height + 0.2) + 0.4
    figure, axes = new_figure(*size, len(pictures), 6, gridspec_kw={"width_ratios": widths})
    for row, (places, one, own) in enumerate(zip(axes, pictures, maps, strict=True)):
        most = max(float(own.weights.max()), 1e-30)
        for axis in range(3):
            number, plane, values = take_middle_slice(one.pixels, own.weights, axis)
            plain, over = places[2 * axis : 2 * axis + 2]
            picture = InputImage(one.name, plane, one.pixels)
            plain.imshow(np.asarray(plane), interpolation="nearest")
            image = draw_heat_map(over, picture, values, most)
            if not row:
                plain.set_title(
                    f"{AXIS_NAMES[axis]}, slice {number + 1}\nof {one.pixels.shape[1 + axis]}", fontsize=FONT_SIZE
                )
                over.set_title("attention", fontsize=FONT_SIZE)
        label_panel(places[0], one.name)
    for place in axes.flat:
        place.set_axis_off()
    add_colour_bar(figure, image, axes, "attention")
    caption = (
        f"{maps[0].caption} The middle slice along each axis of the model's input volume, first channel; "
        "maps are scaled to the maximum of the volume, which may be in another slice."
    )
    numbers = {"maps": np.stack([one.weights.numpy() for one in maps]), "images": get_image_names(pictures)}
    return [FigureResult("slices", "Attention in the middle slices", caption, figure, numbers=numbers)]


def get_image_names(pictures: list[InputImage]) -> np.ndarray:
    """Return the names of n images, (n,) text."""
    return np.array([one.name for one in pictures])


def get_plane_size(image: tuple[int, ...], axis: int) -> tuple[int, ...]:
    """Return the size of a slice across one axis of (depth, height, width)."""
    return image[:axis] + image[axis + 1 :]


def take_middle_slice(pixels: Tensor, weights: Tensor, axis: int) -> tuple[int, Image.Image, np.ndarray]:
    """Take the middle slice across an axis of (C, D, H, W) pixels and (d, h, w) patch weights. Returns its index, its
    first channel as a grey image scaled to the volume's range, and its weights."""
    volume, side = pixels[0].float().numpy(), pixels.shape[1 + axis]
    number = side // 2
    low, high = float(volume.min()), float(volume.max())
    grey = (volume.take(number, axis) - low) * (255 / max(high - low, 1e-9))
    return (
        number,
        Image.fromarray(grey.astype(np.uint8)).convert("RGB"),
        weights.numpy().take(number * weights.shape[axis] // side, axis),
    )


def make_curves(scene: FigureContext) -> list[FigureResult]:
    """Draw the model's input signals, with attention below each."""
    pictures = scene.take_images(DEFAULT_IMAGE_COUNT)
    maps = [compute_clip_maps(scene, one) for one in pictures]
    rows = 2 * len(pictures)
    ratios = {"height_ratios": [4, 1] * len(pictures)}
    figure, axes = new_figure(CURVE_INCHES + 1.2, 1.5 * len(pictures) + 0.3, rows, 1, gridspec_kw=ratios, sharex=True)
    length = scene.preprocess.image[0]
    for number, (one, own) in enumerate(zip(pictures, maps, strict=True)):
        curve, strip = axes[2 * number : 2 * number + 2, 0]
        for channel in one.pixels.float().numpy():
            curve.plot(np.arange(length) + 0.5, channel, color=BLUE, linewidth=0.8, alpha=0.8)
        values = own.weights.numpy() / max(float(own.weights.max()), 1e-30)
        image = strip.imshow(
            values[None], cmap=ATTENTION_COLORMAP, vmin=0, vmax=1, extent=(0, length, 0, 1), aspect="auto"
        )
        curve.set_title(one.name.rpartition("/")[2], fontsize=FONT_SIZE)
        strip.set_yticks([])
    axes[0, 0].set_xlim(0, length)
    add_colour_bar(figure, image, axes, "attention")
    caption = (
        f"{maps[0].caption} Input signals, all channels in one panel; below each, the attention to "
        "every patch, scaled to the maximum of the signal."
    )
    numbers = {"maps": np.stack([one.weights.numpy() for one in maps]), "images": get_image_names(pictures)}
    return [FigureResult("curves", "Attention along signals", caption, figure, numbers=numbers)]
