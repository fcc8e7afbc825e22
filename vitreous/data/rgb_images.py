"""What a model sees as RGB images for people: clips, volumes, signals and images of any number of channels."""

from __future__ import annotations

import torch
from PIL import Image
from torch import Tensor

from vitreous.data.curve import draw_signal_curve
from vitreous.data.decoding.clip import sample_frames_evenly


def to_rgb_image(pixels: Tensor, like: Tensor | None = None) -> Image.Image:
    """(C, *image) pixels -> an RGB image: the first three channels, or the first as grey; floats are stretched from
    their range, or that of the pixels `like`, (C, *image) too. Of a clip (C, T, h, w), or a volume, four frames are
    shown; a signal (C, L) is a curve."""
    if pixels.ndim == 2:
        return draw_signal_curve(pixels[0].float().numpy())
    pixels = tile_frames(pixels) if pixels.ndim == 4 else pixels
    bands = select_rgb_bands(pixels)
    if pixels.dtype != torch.uint8:
        known = select_rgb_bands(pixels if like is None else like)
        low, high = known.min(), known.max()
        bands = ((bands - low) / (high - low).clamp(min=1e-9) * 255).clamp(0, 255).to(torch.uint8)
    return Image.fromarray(bands.permute(1, 2, 0).contiguous().numpy())


def to_rgb_frames(pixels: Tensor) -> list[Image.Image]:
    """(C, H, W) pixels -> one RGB image; of a clip (C, T, H, W) one for each frame."""
    return [to_rgb_image(frame) for frame in (pixels.unbind(1) if pixels.ndim == 4 else [pixels])]


def tile_frames(clip: Tensor) -> Tensor:
    """(C, T, h, w) -> (C, 2 h, 2 w): four frames spread over a clip, in the order of reading."""
    four = clip[:, torch.from_numpy(sample_frames_evenly(clip.shape[1], 4))].unflatten(1, (2, 2))
    return four.permute(0, 1, 3, 2, 4).flatten(3).flatten(1, 2)


def select_rgb_bands(pixels: Tensor) -> Tensor:
    """(C, *image) -> (3, *image): the first three channels, or the first three times."""
    return pixels[:3] if len(pixels) >= 3 else pixels[:1].expand(3, *pixels.shape[1:])
