"""Multi-crop views of cached images, computed for a whole batch in float32. Their distribution is that of `MultiCrop`
for image files, which uses Pillow.

In shapes, n is views. Images are stored as (n, H, C, W), so that crop, mirroring, resizing and blur are one batched
matrix product per axis. Each row of such a matrix has the weights of the input pixels for one output pixel, which sum
to 1.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from vitreous.data.augmentation.crops import MAX_CROP_ATTEMPTS

AREA_CROP_ATTEMPTS = MAX_CROP_ATTEMPTS["torchvision"]
# indices of random numbers of a view: first area and aspect ratio of each crop attempt, then position and mirroring,
# then colours
CROP_DRAWS_START, COLOUR_DRAWS_START = 2 * AREA_CROP_ATTEMPTS, 2 * AREA_CROP_ATTEMPTS + 3
DRAWS_PER_VIEW = COLOUR_DRAWS_START + 13
BICUBIC_COEFFICIENT = -0.5  # parameter a of Pillow's bicubic filter
GAUSSIAN_CUTOFF = 4.0  # distance at which a Gaussian kernel is truncated, in std
LUMA_WEIGHTS = (0.299, 0.587, 0.114)  # red, green and blue (ITU-R BT.601)
SOLARISE_THRESHOLD = 128  # solarising inverts values of at least this threshold
# indices in the `jitter` setting
BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)


def crop_and_resize_batch(
    views: Tensor,
    uniform_draws: np.ndarray,
    size: tuple[int, int],
    area: tuple[float, float],
    ratio: tuple[float, float],
    flip_probability: float,
) -> Tensor:
    """Crop a random box of each image (n, H, C, W), resize it to `size` (h, w) and mirror it with probability
    `flip_probability`: (n, h, C, w).

    `area` and `ratio` are the ranges of the box's share of the image and of its aspect ratio, as in torchvision's
    RandomResizedCrop (`AreaCrop`). `uniform_draws` are (n, DRAWS_PER_VIEW) random numbers in [0, 1).
    """
    height, _, width = views.shape[1:]
    box_heights, box_widths = draw_box_sizes(uniform_draws, height, width, area, ratio)
    top = np.floor(uniform_draws[:, CROP_DRAWS_START] * (height - box_heights + 1))
    left = np.floor(uniform_draws[:, CROP_DRAWS_START + 1] * (width - box_widths + 1))
    width_matrices = create_bicubic_matrices(left, box_widths, width, size[1])
    mirror = torch.from_numpy(uniform_draws[:, CROP_DRAWS_START + 2] < flip_probability)
    width_matrices[mirror] = width_matrices[mirror].flip(1)
    return apply_axis_matrices(views, create_bicubic_matrices(top, box_heights, height, size[0]), width_matrices)


def draw_box_sizes(
    uniform_draws: np.ndarray, height: int, width: int, area: tuple[float, float], ratio: tuple[float, float]
) -> tuple[np.ndarray, np.ndarray]:
    """Draw the heights (n,) and widths (n,) of crop boxes, integers stored as float64.

    The first attempt that is inside the image is used. If there is none, the box is the largest with a valid aspect
    ratio. `uniform_draws` are (n, 2 AREA_CROP_ATTEMPTS) or more random numbers in [0, 1).
    """
    areas = height * width * (area[0] + (area[1] - area[0]) * uniform_draws[:, :AREA_CROP_ATTEMPTS])
    low, high = np.log(ratio)
    aspects = np.exp(low + (high - low) * uniform_draws[:, AREA_CROP_ATTEMPTS : 2 * AREA_CROP_ATTEMPTS])
    box_widths, box_heights = np.rint(np.sqrt(areas * aspects)), np.rint(np.sqrt(areas / aspects))
    is_inside = (box_widths > 0) & (box_widths <= width) & (box_heights > 0) & (box_heights <= height)
    first_fit = np.arange(len(uniform_draws)), is_inside.argmax(1)
    clipped_aspect = min(max(width / height, ratio[0]), ratio[1])
    largest = (min(height, round(width / clipped_aspect)), min(width, round(height * clipped_aspect)))
    return np.where(is_inside.any(1), box_heights[first_fit], largest[0]), np.where(
        is_inside.any(1), box_widths[first_fit], largest[1]
    )


def create_bicubic_matrices(start: np.ndarray, length: np.ndarray, axis_length: int, out: int) -> Tensor:
    """Create matrices that crop and resize one axis of n images with Pillow's antialiased bicubic filter: (n, out,
    axis_length) float32. `start` (n,) and `length` (n,) are the cropped intervals, `out` is the resized length."""
    scale = (length / out)[:, None, None]
    support = np.maximum(scale, 1.0)
    centres = (np.arange(out) + 0.5)[None, :, None] * scale
    positions = np.arange(axis_length)[None, None] - start[:, None, None]
    x = np.abs((positions + 0.5 - centres) / support).astype(np.float32)
    inner = ((BICUBIC_COEFFICIENT + 2) * x - (BICUBIC_COEFFICIENT + 3)) * x * x + 1
    outer = (((x - 5) * x + 8) * x - 4) * BICUBIC_COEFFICIENT
    is_inside = (positions >= 0) & (positions < length[:, None, None]) & (x < 2)
    weights = np.where(is_inside, np.where(x < 1, inner, outer), 0)
    return torch.from_numpy(weights / weights.sum(-1, keepdims=True))


def create_gaussian_matrices(radius: np.ndarray, axis_length: int) -> Tensor:
    """Create matrices that blur one axis of n images with Gaussians: (n, axis_length, axis_length) float32. `radius`
    (n,) are the stds in pixels. Outside the image, edge pixels are repeated."""
    kernel_radius = math.ceil(GAUSSIAN_CUTOFF * float(radius.max()))
    positions = np.arange(-kernel_radius, axis_length + kernel_radius)[None, None]
    distance = (positions - np.arange(axis_length)[None, :, None]) / np.maximum(radius, 1e-6)[:, None, None]
    weights = np.exp(-0.5 * np.minimum(distance * distance, 1e3)).astype(np.float32)
    weights[..., kernel_radius] += weights[..., :kernel_radius].sum(-1)
    weights[..., axis_length + kernel_radius - 1] += weights[..., axis_length + kernel_radius :].sum(-1)
    weights = weights[..., kernel_radius : axis_length + kernel_radius]
    return torch.from_numpy(weights / weights.sum(-1, keepdims=True))


def apply_axis_matrices(views: Tensor, height_matrices: Tensor, width_matrices: Tensor) -> Tensor:
    """Multiply each image by a matrix along its height and a matrix along its width: (n, H, C, W), (n, h, H) and (n, w,
    W) -> (n, h, C, w)."""
    count, height, channels, _ = views.shape
    resized = torch.bmm(views.reshape(count, height * channels, -1), width_matrices.transpose(1, 2))
    return torch.bmm(height_matrices, resized.view(count, height, -1)).view(
        count, height_matrices.shape[1], channels, -1
    )


def augment_batch_colours(
    views: Tensor,
    uniform_draws: np.ndarray,
    probabilities: np.ndarray,
    jitter: tuple[float, float, float, float],
    radius: tuple[float, float],
) -> Tensor:
    """Augment the colours of views (n, h, C, w) in 0 .. 255, with 1 or 3 channels, in place.

    `uniform_draws` are (n, DRAWS_PER_VIEW) random numbers in [0, 1). `probabilities` (n, 4) are those of jitter,
    conversion to grey, blur and solarising, which are applied in this order. `jitter` are the strengths of brightness,
    contrast, saturation and hue; `radius` is the range of the std of the blur in pixels, uniform.
    """
    uniform_draws = uniform_draws[:, COLOUR_DRAWS_START:]
    is_applied = uniform_draws[:, [0, 9, 10, 12]] < probabilities
    changed, grey, blurred, solarised = (np.flatnonzero(column) for column in is_applied.T)
    if any(jitter) and len(changed):
        indices = torch.from_numpy(changed)
        views[indices] = jitter_batch_colours(
            views[indices], uniform_draws[changed, 1:5], uniform_draws[changed, 5:9], jitter
        )
    if views.shape[2] == 3 and len(grey):
        indices = torch.from_numpy(grey)
        views[indices] = rgb_to_grey(views[indices]).expand(-1, -1, 3, -1)
    if len(blurred):
        indices, blur_radii = (
            torch.from_numpy(blurred),
            radius[0] + (radius[1] - radius[0]) * uniform_draws[blurred, 11],
        )
        height_matrices, width_matrices = (
            create_gaussian_matrices(blur_radii, length) for length in (views.shape[1], views.shape[3])
        )
        views[indices] = apply_axis_matrices(views[indices], height_matrices, width_matrices)
    if len(solarised):
        indices = torch.from_numpy(solarised)
        views[indices] = torch.where(views[indices] >= SOLARISE_THRESHOLD, 255 - views[indices], views[indices])
    return views


def jitter_batch_colours(
    views: Tensor, order: np.ndarray, u: np.ndarray, strength: tuple[float, float, float, float]
) -> Tensor:
    """Change brightness, contrast, saturation and hue of views (n, h, C, w) in 0 .. 255, in random order.

    `order` (n, 4) are random numbers whose ranks are the order; `u` (n, 4) in [0, 1) select the amounts. The factor f
    of the first three operations is within 1 +- strength: the result is f x + (1 - f) y, where y is black for
    brightness, the mean of the grey image for contrast, and the grey image for saturation. The hue is rotated by up to
    +- strength of the circle.
    """
    order = order.argsort(1)
    amount = torch.from_numpy((2 * u - 1) * np.asarray(strength)).float()
    for step in range(4):
        operation = torch.from_numpy(order[:, step])
        factor = torch.where(operation == HUE, 1.0, 1 + amount.gather(1, operation[:, None])[:, 0])[:, None, None, None]
        grey = rgb_to_grey(views)
        base = torch.where((operation == SATURATION)[:, None, None, None], grey, 0.0)
        base += torch.where(operation == CONTRAST, grey.mean((1, 2, 3)), 0.0)[:, None, None, None]
        views = (views * factor).add_(base.mul_(1 - factor)).clamp_(0, 255)
        hue_indices = (operation == HUE).nonzero()[:, 0]
        if views.shape[2] == 3 and len(hue_indices):
            views[hue_indices] = rotate_hue(views[hue_indices], amount[hue_indices, HUE])
    return views


def rgb_to_grey(views: Tensor) -> Tensor:
    """Convert images (n, h, C, w) with 1 or 3 channels to grey, (n, h, 1, w)."""
    if views.shape[2] == 1:
        return views
    red, green, blue = views.split(1, 2)
    return (red * LUMA_WEIGHTS[0]).add_(green, alpha=LUMA_WEIGHTS[1]).add_(blue, alpha=LUMA_WEIGHTS[2])


def rotate_hue(views: Tensor, hue_shift: Tensor) -> Tensor:
    """Rotate the hue of RGB images (n, h, 3, w) by `hue_shift` (n,), shares of the circle. Value and saturation (HSV)
    stay constant."""
    red, green, blue = views.unbind(2)
    value = views.amax(2)
    chroma = value - views.amin(2)
    unit = chroma.clamp(min=1e-6)
    hue = torch.where(
        value == red,
        (green - blue) / unit,
        torch.where(value == green, (blue - red) / unit + 2, (red - green) / unit + 4),
    )
    hue += 6 * hue_shift[:, None, None]
    channels = []
    for offset in (5, 3, 1):
        sector = (hue + offset).remainder_(6)
        channels.append(value - chroma * torch.minimum(sector, 4 - sector).clamp_(0, 1))
    return torch.stack(channels, 2)
