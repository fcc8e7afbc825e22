"""Photometric distortion for semantic segmentation: brightness, contrast, saturation and hue, drawn independently.

From SSD (arXiv:1512.02325, section 3.6) by way of mmsegmentation's `PhotoMetricDistortion`, which ADE20K's recipes use.
"""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image
from torch import Tensor

DISTORTION_DRAWS = 9  # random numbers per distortion
CHANNEL_LEVELS = 256  # levels of a channel, and of the hue circle


def distort_colours(
    pixels: Tensor, jitter: tuple[float, float, float], hue: float, probability: float, draws: np.ndarray
) -> Tensor:
    """Change brightness, contrast, saturation and hue of an image, each with the same probability and independently.

    Values are clipped to 0 .. 255 and truncated to integers after each operation. Contrast is changed before saturation
    and hue, or after them, with probability 0.5 each.

    Args:
        pixels: (C, H, W) uint8. If C is not 3, saturation and hue are not changed.
        jitter: brightness adds up to +- `jitter[0]` of the range of values; contrast and saturation multiply by up to
            1 +- `jitter[1]` and 1 +- `jitter[2]`.
        hue: the largest rotation of the hue, as a share of the full circle.
        probability: the probability of each operation.
        draws: (DISTORTION_DRAWS,) float64 in [0, 1).

    Returns:
        (C, H, W) uint8.
    """
    is_applied, amounts = draws[:4] < probability, 2 * draws[4:8] - 1  # amounts in -1 .. 1
    x = pixels.numpy()
    if is_applied[0]:
        x = truncate_to_uint8(x + np.float32(255 * jitter[0] * amounts[0]))
    contrast = np.float32(1 + jitter[1] * amounts[1])
    is_contrast_first = draws[8] < 0.5
    if is_applied[1] and is_contrast_first:
        x = truncate_to_uint8(x * contrast)
    if len(x) == 3 and (is_applied[2] or is_applied[3]):
        hsv = np.array(Image.fromarray(np.ascontiguousarray(x.transpose(1, 2, 0))).convert("HSV"))
        if is_applied[2]:
            hsv[..., 1] = truncate_to_uint8(hsv[..., 1] * np.float32(1 + jitter[2] * amounts[2]))
        if is_applied[3]:
            # bytes wrap around like the circle
            hsv[..., 0] += np.uint8(round(CHANNEL_LEVELS * hue * amounts[3]) % CHANNEL_LEVELS)
        distorted = Image.frombytes("HSV", (hsv.shape[1], hsv.shape[0]), hsv.tobytes())
        x = np.asarray(distorted.convert("RGB")).transpose(2, 0, 1)
    if is_applied[1] and not is_contrast_first:
        x = truncate_to_uint8(x * contrast)
    return torch.from_numpy(np.ascontiguousarray(x))


def truncate_to_uint8(values: np.ndarray) -> np.ndarray:
    """Clip values to 0 .. 255 and truncate them to integers: (C, H, W) float32 -> (C, H, W) uint8."""
    return values.clip(0, 255).astype(np.uint8)


def measure_largest_class(classes: np.ndarray, ignore: int) -> float:
    """Measure the share of the most frequent class among the labelled pixels of a class map (H, W) int32. `ignore` is
    the index of unlabelled pixels. Without labelled pixels, the result is 1."""
    counts = np.bincount(classes[classes != ignore])
    return float(counts.max() / counts.sum()) if counts.size else 1.0
