"""Augmentation of batches of cached images without interpolation: shifts, windows, mirroring, random erasing.

Pixels are moved in numpy, which copies whole image rows where torch copies single pixels.
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

WINDOW_DRAWS_START, ERASE_DRAWS_START = (
    9,
    11,
)  # first draws of a key for simple crops and for erasing, after those of `Augment.maps`
MAX_ERASE_ATTEMPTS = 10  # attempts to draw a box that fits
NOISE_SEED = 2**32  # separates the noise seed from other uses of a key
ERASE_VALUE = 128
#: with or without repeating the edge pixels
NUMPY_PAD_MODES: dict[str, Literal["symmetric", "reflect"]] = {
    "reflection": "symmetric",
    "reflection inside": "reflect",
}


def shift_and_mirror(images: Tensor, x: np.ndarray, y: np.ndarray, mirror: np.ndarray, border: str) -> Tensor:
    """Shift (B, C, H, W) uint8 or float32 by (B,) integer pixels and mirror those in (B,) `mirror`.

    Row i and column j (W - 1 - j if mirrored) of an image get image[:, i + y, j + x]; `border` selects the fill
    outside.
    """
    pixels = images.numpy()
    height, width = pixels.shape[-2:]
    reach = int(max(abs(x).max(), abs(y).max()))
    if reach:
        around = pad_images(pixels, reach, border)
        views = np.lib.stride_tricks.sliding_window_view(around, (height, width), (2, 3))
        pixels = np.ascontiguousarray(views.transpose(0, 2, 3, 1, 4, 5)[np.arange(len(pixels)), y + reach, x + reach])
    else:
        pixels = pixels.copy()
    if mirror.any():
        word = math.gcd(width, 8)  # bytes are reversed in words: eight times fewer steps
        words = pixels.view(f"u{word}")
        words[mirror] = words[mirror][..., ::-1].byteswap()
    return torch.from_numpy(pixels)


def pad_images(pixels: np.ndarray, reach: int, border: str) -> np.ndarray:
    """Pad (B, C, H, W) to (B, C, H + 2 reach, W + 2 reach), in a fraction of the time of np.pad."""
    batch, channels, height, width = pixels.shape
    if border == "zeros":
        around = np.zeros((batch, channels, height + 2 * reach, width + 2 * reach), pixels.dtype)
        around[:, :, reach : reach + height, reach : reach + width] = pixels
        return around
    rows, columns = (np.pad(np.arange(side), reach, NUMPY_PAD_MODES[border]) for side in (height, width))
    tall = np.take(pixels, rows, 2)
    around = np.empty((batch, channels, height + 2 * reach, width + 2 * reach), pixels.dtype)
    around[..., reach : reach + width] = tall
    for side in (slice(None, reach), slice(reach + width, None)):
        around[..., side] = np.take(tall, columns[side], 3)
    return around


def apply_simple_crops(images: Tensor, keys: np.ndarray) -> Tensor:
    """Apply simple crops to (B, C, H, W) images of the model's size by (B,) keys: `SimpleCrop`, drawn from the keys."""
    u = draw_uniform(keys, WINDOW_DRAWS_START + 2)
    y, x = (
        np.floor(u[:, WINDOW_DRAWS_START + axis] * (2 * SIMPLE_CROP_PADDING + 1)).astype(np.int64) - SIMPLE_CROP_PADDING
        for axis in (0, 1)
    )
    return shift_and_mirror(images, x, y, np.zeros(len(keys), dtype=bool), "reflection inside")


def erase_random_boxes(images: Tensor, keys: np.ndarray, probability: float, noise: bool) -> Tensor:
    """Erase random boxes (arXiv:1708.04896) of (B, C, H, W) uint8 or float32 in 0..255 by (B,) keys, in place.

    A box has a share of 0.02 to 1/3 of the image, uniform, and an aspect of 0.3 to 1 / 0.3, log-uniform; it is grey, or
    noise with ImageNet's mean and std.
    """
    height, width = images.shape[-2:]
    u = draw_uniform(keys, ERASE_DRAWS_START + 3 + 2 * MAX_ERASE_ATTEMPTS)[:, ERASE_DRAWS_START:]
    area = height * width * (0.02 + (1 / 3 - 0.02) * u[:, 3 : 3 + MAX_ERASE_ATTEMPTS])
    aspect = np.exp(math.log(0.3) * (1 - 2 * u[:, 3 + MAX_ERASE_ATTEMPTS :]))
    tall, wide = np.rint(np.sqrt(area * aspect)), np.rint(np.sqrt(area / aspect))
    fits = (tall < height) & (wide < width)
    first = np.arange(len(keys)), fits.argmax(1)
    tall, wide = tall[first], wide[first]
    top, left = np.floor(u[:, 1] * (height - tall + 1)), np.floor(u[:, 2] * (width - wide + 1))
    edges = np.stack([top, top + tall, left, left + wide], 1).astype(np.int64)
    generator = torch.Generator()
    for row in np.flatnonzero((u[:, 0] < probability) & fits[first]):
        rows, columns = slice(*edges[row, :2].tolist()), slice(*edges[row, 2:].tolist())
        hole = images[row, :, rows, columns]
        hole.copy_(
            draw_imagenet_noise(hole.shape, generator.manual_seed(int(keys[row]) >> 1 ^ NOISE_SEED))
            if noise
            else torch.tensor(ERASE_VALUE)
        )
    return images


def draw_imagenet_noise(shape: torch.Size, generator: torch.Generator | None = None) -> Tensor:
    """Draw noise with ImageNet's statistics, (C, h, w) float32, as integers from 0 to 255."""
    mean, std = get_imagenet_moments(shape[0])
    return ((mean + std * torch.randn(shape, generator=generator)) * 255).round_().clamp_(0, 255)


@cache
def get_imagenet_moments(channels: int) -> tuple[Tensor, Tensor]:
    """Return ImageNet's mean and std, (3, 1, 1) each; scalars over all colours for other numbers of channels."""
    mean, std = (torch.tensor(values)[:, None, None] for values in IMAGENET_MOMENTS)
    return (mean, std) if channels == len(mean) else (mean.mean(), std.mean())
