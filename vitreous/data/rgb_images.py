"""Show model inputs as RGB images: clips, volumes, signals and images with any number of channels."""

from __future__ import annotations

import torch
from PIL import Image
from torch import Tensor

from vitreous.data.curve import draw_signal_curve
from vitreous.data.decoding.clip import sample_frames_evenly


def to_rgb_image(pixels: Tensor, like: Tensor | None = None) -> Image.Image:
    """Convert pixels (C, *image) to an RGB image of their first three channels, or of the first one in grey.

    Pixels that are not uint8 are scaled by their range, or by that of the pixels `like`, also (C, *image). A clip or
    volume (C, T, h, w) is shown as four frames, a signal (C, L) as a curve.
    """
    if pixels.ndim == 2:
        return draw_signal_curve(pixels[0].float().numpy())
    pixels = tile_frames(pixels) if pixels.ndim == 4 else pixels
    bands = select_rgb_bands(pixels)
    if pixels.dtype != torch.uint8:
        reference = select_rgb_bands(pixels if like is None else like)
        low, high = reference.min(), reference.max()
        bands = ((bands - low) / (high - low).clamp(min=1e-9) * 255).clamp(0, 255).to(torch.uint8)
    return Image.fromarray(bands.permute(1, 2, 0).contiguous().numpy())


def to_rgb_frames(pixels: Tensor) -> list[Image.Image]:
    """Convert (C, H, W) pixels to one RGB image, or a clip (C, T, H, W) to one image per frame."""
    return [to_rgb_image(frame) for frame in (pixels.unbind(1) if pixels.ndim == 4 else [pixels])]


def tile_frames(clip: Tensor) -> Tensor:
    """Tile four evenly spaced frames of a clip in reading order: (C, T, h, w) -> (C, 2 h, 2 w)."""
    frames = clip[:, torch.from_numpy(sample_frames_evenly(clip.shape[1], 4))].unflatten(1, (2, 2))
    return frames.permute(0, 1, 3, 2, 4).flatten(3).flatten(1, 2)


def select_rgb_bands(pixels: Tensor) -> Tensor:
    """Select three channels: (C, *image) -> (3, *image), the first three, or the first one repeated."""
    return pixels[:3] if len(pixels) >= 3 else pixels[:1].expand(3, *pixels.shape[1:])
