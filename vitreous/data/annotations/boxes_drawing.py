"""Draw objects on images: boxes with class and score, and translucent masks. Render masks as instance maps.

In shapes, n is objects, and H and W are the height and width of the image. Boxes are left, top, right, bottom in
pixels.
"""

from __future__ import annotations

import colorsys
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from vitreous.data.annotations.drawing import GOLDEN_RATIO
from vitreous.data.annotations.shapes import rle_to_mask_window

MASK_OPACITY = 0.45  # opacity of a mask's colour over the image
MAX_LARGE_LABELS = 12  # maximum number of objects for which labels are large
MIN_LABELLED_SIDE = 160  # minimum pixels of the shorter side for labels, which would hide smaller images
LIGHT_LUMINANCE = 0.3  # relative luminance above which black text is more legible than white

Colour = tuple[int, int, int]


def draw_objects(
    image: Image.Image,
    boxes: np.ndarray,
    colours: Sequence[Colour],
    texts: Sequence[str],
    masks: Sequence[Sequence[int]] | None = None,
) -> Image.Image:
    """Draw objects on an image, the first on top. Returns an RGB image.

    Each object has a box of `boxes` (n, 4), a colour, a text, which may be empty, and, if `masks` are passed, a mask as
    run lengths (see `rle_to_mask`). Images with a side below `MIN_LABELLED_SIDE` get no texts.
    """
    pixels = np.array(image.convert("RGB"))
    for index in reversed(range(len(masks or ()))):
        assert masks is not None
        size = (pixels.shape[0], pixels.shape[1])
        left, top, right, bottom = window = box_to_pixel_window(boxes[index], size)
        window_mask, crop = rle_to_mask_window(masks[index], size, window), pixels[top:bottom, left:right]
        for channel, shade in enumerate(colours[index]):
            blended = np.rint(np.arange(256) * (1 - MASK_OPACITY) + shade * MASK_OPACITY).astype(np.uint8)
            np.copyto(crop[..., channel], blended[crop[..., channel]], where=window_mask)
    drawn_image = Image.fromarray(pixels)
    draw, shorter_side = ImageDraw.Draw(drawn_image), min(drawn_image.size)
    line_width = max(1, round(shorter_side / 250))
    for index in reversed(range(len(boxes))):
        edges = round_box(boxes[index])
        if shorter_side >= MIN_LABELLED_SIDE:
            draw.rectangle(edges, outline=(0, 0, 0), width=line_width + 1)  # visible on a background of the same colour
        draw.rectangle(edges, outline=colours[index], width=line_width)
    if shorter_side >= MIN_LABELLED_SIDE:
        font = ImageFont.load_default(
            float(np.clip(shorter_side / (28 if len(boxes) <= MAX_LARGE_LABELS else 42), 10, 36))
        )
        for index in reversed([index for index, text in enumerate(texts) if text]):
            draw_label(
                draw, drawn_image.size, box=round_box(boxes[index]), text=texts[index], colour=colours[index], font=font
            )
    return drawn_image


def box_to_pixel_window(box: np.ndarray, size: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Return the pixel window (left, top, right, bottom) around a box (4,), with a margin of one pixel, within an image
    of `size` (H, W)."""
    low, high = np.floor(box[:2]).astype(int) - 1, np.ceil(box[2:]).astype(int) + 1
    return max(0, low[0]), max(0, low[1]), min(size[1], high[0]), min(size[0], high[1])


def round_box(box: np.ndarray) -> tuple[int, int, int, int]:
    """Return the indices of the first and last pixel columns and rows (left, top, right, bottom) that a box (4,) covers
    by more than half."""
    left, top, right, bottom = (round(float(edge)) for edge in box)
    return left, top, max(left, right - 1), max(top, bottom - 1)


def draw_label(
    draw: ImageDraw.ImageDraw,
    size: tuple[int, int],
    box: tuple[int, int, int, int],
    text: str,
    colour: Colour,
    font: ImageFont.FreeTypeFont | ImageFont.ImageFont,
) -> None:
    """Draw a text on a coloured background above a box, or inside the box if there is no room above. The text stays
    within the image of `size` (W, H)."""
    left, top, right, bottom = draw.textbbox((0, 0), text, font=font)
    width, height = int(right - left) + 6, int(bottom - top) + 6
    x = max(0, min(box[0], size[0] - width))
    y = box[1] - height if box[1] >= height else min(box[1], max(0, size[1] - height))
    draw.rectangle((x, y, x + width - 1, y + height - 1), fill=colour)
    draw.text((x + 3 - left, y + 3 - top), text, font=font, fill=(0, 0, 0) if is_light(colour) else (255, 255, 255))


def is_light(colour: Colour) -> bool:
    """Return whether black text is more legible than white text on a colour, by its relative luminance (WCAG 2)."""
    linear = [
        (channel / 255 / 12.92) if channel <= 10 else ((channel / 255 + 0.055) / 1.055) ** 2.4 for channel in colour
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] > LIGHT_LUMINANCE


def render_instance_map(masks: Sequence[Sequence[int]], boxes: np.ndarray, size: tuple[int, int]) -> Image.Image:
    """Render an instance map of `size` (H, W) from the run lengths of n masks, each inside its box (n, 4). A pixel is 1
    + the index of its object, 0 for none.

    The first of overlapping masks is on top. The image has 8 bits and a palette, or 16 bits for more than 255
    objects.
    """
    instance_map = np.zeros(size, np.uint16)
    for index in reversed(range(len(masks))):
        left, top, right, bottom = window = box_to_pixel_window(boxes[index], size)
        instance_map[top:bottom, left:right][rle_to_mask_window(masks[index], size, window)] = index + 1
    if len(masks) > 255:
        return Image.fromarray(instance_map)
    image = Image.fromarray(instance_map.astype(np.uint8))
    hues = [colorsys.hsv_to_rgb((0.55 + GOLDEN_RATIO * index) % 1, 0.75, 0.95) for index in range(255)]
    image.putpalette([0, 0, 0, *(round(255 * channel) for hue in hues for channel in hue)])
    return image
