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
    """Pad (B, C, H, W) to (B, C, H + 2 reach, W + 2 reach), in a fraction of the time of np.pad."""
    batch, channels, height, width = pixels.shape
    if border == "zeros":
        padded = np.zeros((batch, channels, height + 2 * margin, width + 2 * margin), pixels.dtype)
        padded[:, :, margin : margin + height, margin : margin + width] = pixels
        return padded
    row_indices, column_indices = (
        np.pad(np.arange(edge_slice), margin, NUMPY_PAD_MODES[border]) for edge_slice in (height, width)
    )
    row_padded = np.take(pixels, row_indices, 2)
    padded = np.empty((batch, channels, height + 2 * margin, width + 2 * margin), pixels.dtype)
    padded[..., margin : margin + width] = row_padded
    for edge_slice in (slice(None, margin), slice(margin + width, None)):
        padded[..., edge_slice] = np.take(row_padded, column_indices[edge_slice], 3)
    return padded


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
    box_heights, box_widths = np.rint(np.sqrt(area * aspect)), np.rint(np.sqrt(area / aspect))
    is_inside = (box_heights < height) & (box_widths < width)
    first_fit = np.arange(len(keys)), is_inside.argmax(1)
    box_heights, box_widths = box_heights[first_fit], box_widths[first_fit]
    top, left = np.floor(u[:, 1] * (height - box_heights + 1)), np.floor(u[:, 2] * (width - box_widths + 1))
    edges = np.stack([top, top + box_heights, left, left + box_widths], 1).astype(np.int64)
    generator = torch.Generator()
    for index in np.flatnonzero((u[:, 0] < probability) & is_inside[first_fit]):
        rows, columns = slice(*edges[index, :2].tolist()), slice(*edges[index, 2:].tolist())
        erased = images[index, :, rows, columns]
        erased.copy_(
            draw_imagenet_noise(erased.shape, generator.manual_seed(int(keys[index]) >> 1 ^ NOISE_SEED))
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
