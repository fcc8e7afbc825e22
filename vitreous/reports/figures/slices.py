"""Figures of volumes and signals: attention over the middle slices of a volume, or below the curve of a signal."""

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
SLICE_INCHES, CURVE_INCHES = 1.6, 5.2  # longer side of a slice, and length of a curve, in inches


def make_slices(context: FigureContext) -> list[FigureResult]:
    """Draw one row per volume: the middle slice along each of the three axes, and its attention map."""
    input_images = context.take_images(DEFAULT_IMAGE_COUNT)
    maps = [compute_clip_maps(context, volume) for volume in input_images]
    plane_sizes = [
        plane_size for axis in range(3) for plane_size in [get_plane_size(context.preprocess.image, axis)] * 2
    ]
    widths = [SLICE_INCHES * width / max(context.preprocess.image) for _, width in plane_sizes]
    height = SLICE_INCHES * max(height for height, _ in plane_sizes) / max(context.preprocess.image)
    size = sum(widths) + 1.4, len(input_images) * (height + 0.2) + 0.4
    figure, axes = new_figure(*size, len(input_images), 6, gridspec_kw={"width_ratios": widths})
    for row, (panels, volume, volume_maps) in enumerate(zip(axes, input_images, maps, strict=True)):
        max_weight = max(float(volume_maps.weights.max()), 1e-30)
        for axis in range(3):
            slice_index, plane, values = take_middle_slice(volume.pixels, volume_maps.weights, axis)
            image_panel, map_panel = panels[2 * axis : 2 * axis + 2]
            slice_image = InputImage(volume.name, plane, volume.pixels)
            image_panel.imshow(np.asarray(plane), interpolation="nearest")
            mappable = draw_heat_map(map_panel, slice_image, values, max_weight)
            if not row:
                image_panel.set_title(
                    f"{AXIS_NAMES[axis]}, slice {slice_index + 1}\nof {volume.pixels.shape[1 + axis]}",
                    fontsize=FONT_SIZE,
                )
                map_panel.set_title("attention", fontsize=FONT_SIZE)
        label_panel(panels[0], volume.name)
    for panel in axes.flat:
        panel.set_axis_off()
    add_colour_bar(figure, mappable, axes, "attention")
    caption = (
        f"{maps[0].caption} The middle slice along each axis of the model's input volume, first channel; "
        "maps are scaled to the maximum of the volume, which may be in another slice."
    )
    arrays = {"maps": np.stack([volume.weights.numpy() for volume in maps]), "images": get_image_names(input_images)}
    return [FigureResult("slices", "Attention in the middle slices", caption, figure, arrays=arrays)]


def get_image_names(input_images: list[InputImage]) -> np.ndarray:
    """Return the names of n images as an array (n,) of strings."""
    return np.array([image.name for image in input_images])


def get_plane_size(image: tuple[int, ...], axis: int) -> tuple[int, ...]:
    """Return the size of a slice across axis 0, 1 or 2 of a volume (depth, height, width)."""
    return image[:axis] + image[axis + 1 :]


def take_middle_slice(pixels: Tensor, weights: Tensor, axis: int) -> tuple[int, Image.Image, np.ndarray]:
    """Take the middle slice across an axis of (C, D, H, W) pixels and (d, h, w) patch weights. Returns its index, its
    first channel as a grey image scaled to the volume's range, and its weights."""
    volume, length = pixels[0].float().numpy(), pixels.shape[1 + axis]
    index = length // 2
    low, high = float(volume.min()), float(volume.max())
    grey = (volume.take(index, axis) - low) * (255 / max(high - low, 1e-9))
    return (
        index,
        Image.fromarray(grey.astype(np.uint8)).convert("RGB"),
        weights.numpy().take(index * weights.shape[axis] // length, axis),
    )


def make_curves(context: FigureContext) -> list[FigureResult]:
    """Draw the model's input signals, with attention below each."""
    input_images = context.take_images(DEFAULT_IMAGE_COUNT)
    maps = [compute_clip_maps(context, signal) for signal in input_images]
    num_rows = 2 * len(input_images)
    ratios = {"height_ratios": [4, 1] * len(input_images)}
    figure, axes = new_figure(
        CURVE_INCHES + 1.2, 1.5 * len(input_images) + 0.3, num_rows, 1, gridspec_kw=ratios, sharex=True
    )
    length = context.preprocess.image[0]
    for index, (signal, signal_maps) in enumerate(zip(input_images, maps, strict=True)):
        curve, strip = axes[2 * index : 2 * index + 2, 0]
        for channel in signal.pixels.float().numpy():
            curve.plot(np.arange(length) + 0.5, channel, color=BLUE, linewidth=0.8, alpha=0.8)
        values = signal_maps.weights.numpy() / max(float(signal_maps.weights.max()), 1e-30)
        mappable = strip.imshow(
            values[None], cmap=ATTENTION_COLORMAP, vmin=0, vmax=1, extent=(0, length, 0, 1), aspect="auto"
        )
        curve.set_title(signal.name.rpartition("/")[2], fontsize=FONT_SIZE)
        strip.set_yticks([])
    axes[0, 0].set_xlim(0, length)
    add_colour_bar(figure, mappable, axes, "attention")
    caption = (
        f"{maps[0].caption} Input signals, all channels in one panel; below each, the attention to "
        "every patch, scaled to the maximum of the signal."
    )
    arrays = {"maps": np.stack([signal.weights.numpy() for signal in maps]), "images": get_image_names(input_images)}
    return [FigureResult("curves", "Attention along signals", caption, figure, arrays=arrays)]
