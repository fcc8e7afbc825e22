"""Multi-crop views of batches of cached images: the distributions of `MultiCrop` for files, in float32 for all views
together.

n rows, each a view of an image; images are stored as (n, H, C, W), so that crop, mirror, resize and blur are two matrix
products with (n, out, in) whose rows sum to one.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from vitreous.data.augmentation.crops import MAX_CROP_ATTEMPTS

AREA_CROP_ATTEMPTS = MAX_CROP_ATTEMPTS["torchvision"]
CROP_DRAWS_START, COLOUR_DRAWS_START = (
    2 * AREA_CROP_ATTEMPTS,
    2 * AREA_CROP_ATTEMPTS + 3,
)  # offsets of the draws for a row's position and mirroring, and for its colours
DRAWS_PER_VIEW = COLOUR_DRAWS_START + 13
BICUBIC_COEFFICIENT = -0.5  # Pillow's bicubic filter
GAUSSIAN_CUTOFF = 4.0  # truncation of a Gaussian, in std
LUMA_WEIGHTS = (0.299, 0.587, 0.114)  # red, green and blue (ITU-R BT.601)
SOLARISE_THRESHOLD = 128  # solarising inverts values from this threshold
BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)


def crop_and_resize_batch(
    rows: Tensor,
    u: np.ndarray,
    size: tuple[int, int],
    area: tuple[float, float],
    ratio: tuple[float, float],
    flip: float,
) -> Tensor:
    """Crop a box from each (n, H, C, W) row, by (n, DRAWS_PER_VIEW) numbers, resize it to `size` and mirror some: (n,
    h, C, w).

    Boxes are those of torchvision's RandomResizedCrop (`AreaCrop`).
    """
    height, _, width = rows.shape[1:]
    tall, wide = draw_box_sizes(u, height, width, area, ratio)
    top = np.floor(u[:, CROP_DRAWS_START] * (height - tall + 1))
    left = np.floor(u[:, CROP_DRAWS_START + 1] * (width - wide + 1))
    across = create_bicubic_matrices(left, wide, width, size[1])
    mirror = torch.from_numpy(u[:, CROP_DRAWS_START + 2] < flip)
    across[mirror] = across[mirror].flip(1)
    return apply_axis_matrices(rows, create_bicubic_matrices(top, tall, height, size[0]), across)


def draw_box_sizes(
    u: np.ndarray, height: int, width: int, area: tuple[float, float], ratio: tuple[float, float]
) -> tuple[np.ndarray, np.ndarray]:
    """Draw (n,) heights and (n,) widths of boxes, integers in float64, from (n, 2 AREA_CROP_ATTEMPTS) or more numbers
    in 0 .. 1: the first attempt that fits, else the largest box with that aspect."""
    areas = height * width * (area[0] + (area[1] - area[0]) * u[:, :AREA_CROP_ATTEMPTS])
    low, high = np.log(ratio)
    aspects = np.exp(low + (high - low) * u[:, AREA_CROP_ATTEMPTS : 2 * AREA_CROP_ATTEMPTS])
    wide, tall = np.rint(np.sqrt(areas * aspects)), np.rint(np.sqrt(areas / aspects))
    fits = (wide > 0) & (wide <= width) & (tall > 0) & (tall <= height)
    first = np.arange(len(u)), fits.argmax(1)
    whole = min(max(width / height, ratio[0]), ratio[1])
    largest = (min(height, round(width / whole)), min(width, round(height * whole)))
    return np.where(fits.any(1), tall[first], largest[0]), np.where(fits.any(1), wide[first], largest[1])


def create_bicubic_matrices(start: np.ndarray, length: np.ndarray, side: int, out: int) -> Tensor:
    """Create matrices (n, out, side) float32 that resample (n,) lengths of an axis, from (n,) starts, to `out` pixels
    with Pillow's antialiased bicubic filter."""
    scale = (length / out)[:, None, None]
    support = np.maximum(scale, 1.0)
    centres = (np.arange(out) + 0.5)[None, :, None] * scale
    places = np.arange(side)[None, None] - start[:, None, None]
    x = np.abs((places + 0.5 - centres) / support).astype(np.float32)
    inner = ((BICUBIC_COEFFICIENT + 2) * x - (BICUBIC_COEFFICIENT + 3)) * x * x + 1
    outer = (((x - 5) * x + 8) * x - 4) * BICUBIC_COEFFICIENT
    inside = (places >= 0) & (places < length[:, None, None]) & (x < 2)
    weights = np.where(inside, np.where(x < 1, inner, outer), 0)
    return torch.from_numpy(weights / weights.sum(-1, keepdims=True))


def create_gaussian_matrices(radius: np.ndarray, side: int) -> Tensor:
    """Create matrices (n, side, side) float32 that blur an axis by Gaussians of (n,) std in pixels; edge pixels are
    repeated outside."""
    reach = math.ceil(GAUSSIAN_CUTOFF * float(radius.max()))
    places = np.arange(-reach, side + reach)[None, None]
    apart = (places - np.arange(side)[None, :, None]) / np.maximum(radius, 1e-6)[:, None, None]
    weights = np.exp(-0.5 * np.minimum(apart * apart, 1e3)).astype(np.float32)
    weights[..., reach] += weights[..., :reach].sum(-1)
    weights[..., side + reach - 1] += weights[..., side + reach :].sum(-1)
    weights = weights[..., reach : side + reach]
    return torch.from_numpy(weights / weights.sum(-1, keepdims=True))


def apply_axis_matrices(rows: Tensor, down: Tensor, across: Tensor) -> Tensor:
    """Apply matrices along both axes: (n, H, C, W) by (n, h, H) and (n, w, W) -> (n, h, C, w)."""
    count, height, channels, _ = rows.shape
    wide = torch.bmm(rows.reshape(count, height * channels, -1), across.transpose(1, 2))
    return torch.bmm(down, wide.view(count, height, -1)).view(count, down.shape[1], channels, -1)


def augment_batch_colours(
    rows: Tensor,
    u: np.ndarray,
    chances: np.ndarray,
    jitter: tuple[float, float, float, float],
    radius: tuple[float, float],
) -> Tensor:
    """Augment colours of (n, h, C, w) rows in 0 .. 255, C 1 or 3, by (n, DRAWS_PER_VIEW) numbers in 0 .. 1.

    `chances` (n, 4): the probabilities of jitter, grey, blur and solarising, applied in this order; `radius` of the
    blur in pixels, uniform.
    """
    u = u[:, COLOUR_DRAWS_START:]
    happens = u[:, [0, 9, 10, 12]] < chances
    changed, grey, blurred, solarised = (np.flatnonzero(column) for column in happens.T)
    if any(jitter) and len(changed):
        place = torch.from_numpy(changed)
        rows[place] = jitter_batch_colours(rows[place], u[changed, 1:5], u[changed, 5:9], jitter)
    if rows.shape[2] == 3 and len(grey):
        place = torch.from_numpy(grey)
        rows[place] = rgb_to_grey(rows[place]).expand(-1, -1, 3, -1)
    if len(blurred):
        place, reach = torch.from_numpy(blurred), radius[0] + (radius[1] - radius[0]) * u[blurred, 11]
        down, across = (create_gaussian_matrices(reach, side) for side in (rows.shape[1], rows.shape[3]))
        rows[place] = apply_axis_matrices(rows[place], down, across)
    if len(solarised):
        place = torch.from_numpy(solarised)
        rows[place] = torch.where(rows[place] >= SOLARISE_THRESHOLD, 255 - rows[place], rows[place])
    return rows


def jitter_batch_colours(
    rows: Tensor, order: np.ndarray, u: np.ndarray, strength: tuple[float, float, float, float]
) -> Tensor:
    """Jitter (n, h, C, w) rows in 0 .. 255: brightness, contrast, saturation and hue in the order of (n, 4) numbers, by
    factors 1 +- strength, the hue by +- strength of the circle, from (n, 4) numbers in 0 .. 1.

    The first three are f x + (1 - f) of black, the mean of the grey image, and the grey image.
    """
    order = order.argsort(1)
    amount = torch.from_numpy((2 * u - 1) * np.asarray(strength)).float()
    for place in range(4):
        kind = torch.from_numpy(order[:, place])
        factor = torch.where(kind == HUE, 1.0, 1 + amount.gather(1, kind[:, None])[:, 0])[:, None, None, None]
        grey = rgb_to_grey(rows)
        base = torch.where((kind == SATURATION)[:, None, None, None], grey, 0.0)
        base += torch.where(kind == CONTRAST, grey.mean((1, 2, 3)), 0.0)[:, None, None, None]
        rows = (rows * factor).add_(base.mul_(1 - factor)).clamp_(0, 255)
        turned = (kind == HUE).nonzero()[:, 0]
        if rows.shape[2] == 3 and len(turned):
            rows[turned] = rotate_hue(rows[turned], amount[turned, HUE])
    return rows


def rgb_to_grey(rows: Tensor) -> Tensor:
    """Convert (n, h, C, w) rows, C 1 or 3, to grey (n, h, 1, w)."""
    if rows.shape[2] == 1:
        return rows
    red, green, blue = rows.split(1, 2)
    return (red * LUMA_WEIGHTS[0]).add_(green, alpha=LUMA_WEIGHTS[1]).add_(blue, alpha=LUMA_WEIGHTS[2])


def rotate_hue(rows: Tensor, turn: Tensor) -> Tensor:
    """Rotate the hue of (n, h, 3, w) colours by (n,) shares of the circle, with constant value and saturation (HSV)."""
    red, green, blue = rows.unbind(2)
    value = rows.amax(2)
    chroma = value - rows.amin(2)
    unit = chroma.clamp(min=1e-6)
    hue = torch.where(
        value == red,
        (green - blue) / unit,
        torch.where(value == green, (blue - red) / unit + 2, (red - green) / unit + 4),
    )
    hue += 6 * turn[:, None, None]
    parts = []
    for offset in (5, 3, 1):
        sector = (hue + offset).remainder_(6)
        parts.append(value - chroma * torch.minimum(sector, 4 - sector).clamp_(0, 1))
    return torch.stack(parts, 2)
