"""Augment batches of cached images without interpolation: integer shifts, mirroring, random erasing.

Shifts use numpy, which copies complete rows of pixels, where torch copies single pixels.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from vitreous.data.augmentation.crops import SIMPLE_CROP_PADDING
from vitreous.data.keys import draw_uniform
from vitreous.data.modalities.base import IMAGENET_MOMENTS

#: index of the first random number of a key for simple crops, and for erasing; `Augment.draw_affine_maps` uses 0 to 8
CROP_DRAWS_START, ERASE_DRAWS_START = 9, 11
MAX_ERASE_ATTEMPTS = 10  # attempts to draw a box that is inside the image
NOISE_SEED = 2**32  # combined with a key, so that noise is independent of other random numbers of that key
ERASE_VALUE = 128  # grey value of erased pixels
#: fill outside the image -> mode of np.pad: reflection that repeats the edge pixels, or does not repeat them
NUMPY_PAD_MODES: dict[str, Literal["symmetric", "reflect"]] = {
    "reflection": "symmetric",
    "reflection inside": "reflect",
}


def shift_and_mirror(images: Tensor, x: np.ndarray, y: np.ndarray, mirror: np.ndarray, border: str) -> Tensor:
    """Shift images (B, C, H, W) uint8 or float32 by integer pixels, and mirror some of them horizontally.

    `x` and `y` (B,) are shifts in pixels: row i and column j of a result are row i + y and column j + x of the image.
    Images with True in `mirror` (B,) are mirrored after the shift. `border` selects the fill outside the image:
    `zeros`, or a key of `NUMPY_PAD_MODES`.
    """
    pixels = images.numpy()
    height, width = pixels.shape[-2:]
    max_shift = int(max(abs(x).max(), abs(y).max()))
    if max_shift:
        padded = pad_images(pixels, max_shift, border)
        views = np.lib.stride_tricks.sliding_window_view(padded, (height, width), (2, 3))
        pixels = np.ascontiguousarray(
            views.transpose(0, 2, 3, 1, 4, 5)[np.arange(len(pixels)), y + max_shift, x + max_shift]
        )
    else:
        pixels = pixels.copy()
    if mirror.any():
        word_size = math.gcd(width, 8)  # bytes are reversed in words: eight times fewer steps
        words = pixels.view(f"u{word_size}")
        words[mirror] = words[mirror][..., ::-1].byteswap()
    return torch.from_numpy(pixels)


def pad_images(pixels: np.ndarray, margin: int, border: str) -> np.ndarray:
    """Pad images (B, C, H, W) to (B, C, H + 2 margin, W + 2 margin), faster than np.pad. `border` as in
    `shift_and_mirror`."""
    batch, channels, height, width = pixels.shape
    if border == "zeros":
        padded = np.zeros((batch, channels, height + 2 * margin, width + 2 * margin), pixels.dtype)
        padded[:, :, margin : margin + height, margin : margin + width] = pixels
        return padded
    row_indices, column_indices = (
        np.pad(np.arange(length), margin, NUMPY_PAD_MODES[border]) for length in (height, width)
    )
    row_padded = np.take(pixels, row_indices, 2)
    padded = np.empty((batch, channels, height + 2 * margin, width + 2 * margin), pixels.dtype)
    padded[..., margin : margin + width] = row_padded
    for edge_slice in (slice(None, margin), slice(margin + width, None)):
        padded[..., edge_slice] = np.take(row_padded, column_indices[edge_slice], 3)
    return padded


def apply_simple_crops(images: Tensor, keys: np.ndarray) -> Tensor:
    """Apply the simple crop of DeiT III to images (B, C, H, W) of the model's size, at random positions drawn from (B,)
    keys. This is `SimpleCrop` for batches."""
    u = draw_uniform(keys, CROP_DRAWS_START + 2)
    y, x = (
        np.floor(u[:, CROP_DRAWS_START + axis] * (2 * SIMPLE_CROP_PADDING + 1)).astype(np.int64) - SIMPLE_CROP_PADDING
        for axis in (0, 1)
    )
    return shift_and_mirror(images, x, y, np.zeros(len(keys), dtype=bool), "reflection inside")


def erase_random_boxes(images: Tensor, keys: np.ndarray, probability: float, use_noise: bool) -> Tensor:
    """Erase a random box (random erasing, arXiv:1708.04896) of each image with `probability`, in place.

    `images` are (B, C, H, W) uint8 or float32 in 0..255; `keys` (B,) seed the draws. The area of the box as a share
    of the image is uniform in 0.02 to 1/3; its aspect ratio is log-uniform in 0.3 to 1 / 0.3. The box is filled with
    noise of ImageNet's mean and std if `use_noise` is set, otherwise with grey.
    """
    height, width = images.shape[-2:]
    # columns of u: whether to erase, y, x, then an area per attempt, then an aspect ratio per attempt
    u = draw_uniform(keys, ERASE_DRAWS_START + 3 + 2 * MAX_ERASE_ATTEMPTS)[:, ERASE_DRAWS_START:]
    area = height * width * (0.02 + (1 / 3 - 0.02) * u[:, 3 : 3 + MAX_ERASE_ATTEMPTS])
    aspect = np.exp(math.log(0.3) * (1 - 2 * u[:, 3 + MAX_ERASE_ATTEMPTS :]))
    box_heights, box_widths = np.rint(np.sqrt(area * aspect)), np.rint(np.sqrt(area / aspect))
    is_inside = (box_heights < height) & (box_widths < width)
    first_fit = np.arange(len(keys)), is_inside.argmax(1)
    box_heights, box_widths = box_heights[first_fit], box_widths[first_fit]
    top, left = np.floor(u[:, 1] * (height - box_heights + 1)), np.floor(u[:, 2] * (width - box_widths + 1))
    edges = np.stack([top, top + box_heights, left, left + box_widths], 1).astype(np.int64)
    generator = torch.Generator()
    for index in np.flatnonzero((u[:, 0] < probability) & is_inside[first_fit]):
        rows, columns = slice(*edges[index, :2].tolist()), slice(*edges[index, 2:].tolist())
        box_pixels = images[index, :, rows, columns]
        box_pixels.copy_(
            draw_imagenet_noise(box_pixels.shape, generator.manual_seed(int(keys[index]) >> 1 ^ NOISE_SEED))
            if use_noise
            else torch.tensor(ERASE_VALUE)
        )
    return images


def draw_imagenet_noise(shape: torch.Size, generator: torch.Generator | None = None) -> Tensor:
    """Draw normal noise with ImageNet's mean and std, (C, h, w) float32, rounded to integers from 0 to 255."""
    mean, std = get_imagenet_moments(shape[0])
    return ((mean + std * torch.randn(shape, generator=generator)) * 255).round_().clamp_(0, 255)


@cache
def get_imagenet_moments(channels: int) -> tuple[Tensor, Tensor]:
    """Return ImageNet's mean and std per channel, (3, 1, 1) each. If `channels` is not 3, return their means over the
    channels, scalars."""
    mean, std = (torch.tensor(values)[:, None, None] for values in IMAGENET_MOMENTS)
    return (mean, std) if channels == len(mean) else (mean.mean(), std.mean())
