"""The figure `segments`: the patches that hold most of each head's attention (DINO, arXiv:2104.14294, Fig. 3)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitreous.inspection.attention import attention
from vitreous.inspection.segments import segments
from vitreous.reports.figures.overlay import asked, block_of, chosen, last, named, panels, reader, show
from vitreous.reports.scene import FigureResult, Picture, Scene

TINT, DIM = np.array([214, 84, 32]), 0.35  # of patches that are kept, and of the light that the others are left
FINE = 320  # pixels along a side that an edge is drawn with


def make(scene: Scene) -> list[FigureResult]:
    """A figure for each block of --layers (default: the last): a row for each picture, a column for each head."""
    layers, pictures = last(scene), asked(scene)
    prefix, mass = scene.model.config.prefix, scene.options.mass
    results = [attention(scene.model, scene.input(one.pixels[None]), layers) for one in pictures]
    grid = tuple(i // p for i, p in zip(scene.preprocess.image, scene.model.config.patch, strict=True))
    figures = []
    for layer in layers:
        rows = torch.cat([one[layer] for one in results]).cpu()[..., prefix:]
        heads = chosen(scene.options.heads, rows.shape[1])
        masks = segments(rows[:, heads], mass).unflatten(-1, grid)
        caption = (
            f"The fewest patches that hold {mass:.0%} of the attention of {reader(scene)} to patches, in each head of "
            f"{block_of(layer, scene)} (arXiv:2104.14294, Fig. 3). Prefix tokens are left out before the share is "
            "taken."
        )
        numbers = {
            "kept": masks.numpy(),
            "heads": np.array(heads),
            "mass": np.array(mass),
            "images": np.array([one.name for one in pictures]),
        }
        name = "segments" if len(layers) == 1 else f"segments-{layer}"
        figures.append(
            FigureResult(name, f"Segments of block {layer + 1}", caption, drawn(scene, pictures, masks, heads), numbers)
        )
    return figures


def drawn(scene: Scene, pictures: list[Picture], masks: Tensor, heads: list[int]) -> Any:
    """(n, k, *grid) bool: a row for each picture; patches that are not kept lie in the dark, the others have an
    edge."""
    words = ["input", *(f"head {head + 1}" for head in heads)]
    figure, axes = panels(scene, len(pictures), len(words), words, side=1.4 if len(words) <= 6 else 1.0)
    for row, picture, head_masks in zip(axes, pictures, masks, strict=True):
        show(row[0], picture)
        named(row[0], picture.name)
        for place, mask in zip(row[1:], head_masks.numpy(), strict=True):
            place.imshow(masked(np.asarray(picture.shown), mask), interpolation="nearest")
    return figure


def masked(pixels: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """(H, W, 3) uint8 and the (h, w) patches kept -> (kH, kW, 3) uint8: small pictures k times as large, for edges that
    are thin."""
    times = max(1, FINE // max(pixels.shape))
    pixels = pixels.repeat(times, 0).repeat(times, 1)
    whole = np.repeat(np.repeat(mask, pixels.shape[0] // mask.shape[0], 0), pixels.shape[1] // mask.shape[1], 1)
    edge = np.zeros_like(whole)
    width = max(1, max(pixels.shape) // 160)
    for axis in (0, 1):
        for step in (*range(-width, 0), *range(1, width + 1)):
            moved = np.roll(whole, step, axis)
            wrapped = [slice(None)] * 2
            wrapped[axis] = slice(None, step) if step > 0 else slice(step, None)
            moved[tuple(wrapped)] = False
            edge |= whole & ~moved
    shown = np.where(whole[..., None], pixels, pixels * DIM)
    return np.where(edge[..., None], TINT, shown).astype(np.uint8)
