"""Logits of many images, the same bits whatever the batches that the images arrive in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from torch import Tensor, nn

from vitreous.data.loader import Judged
from vitreous.data.preprocess import Preprocess
from vitreous.errors import DataError

CHUNK = 64  # images of one forward pass in evaluation


@torch.inference_mode()
def logits_of(
    model: nn.Module,
    reader: Judged,
    batch_size: int = CHUNK,
    precision: torch.dtype = torch.float32,
    each: Callable[[int], None] = lambda images: None,
) -> tuple[np.ndarray, dict[int, DataError]]:
    """The (n, K) float32 logits of every picture of a split, in order, and the pictures that could not be read.

    Every forward pass has exactly CHUNK images, filled up with zeros at the end: products of another shape may round
    otherwise. `batch_size` pictures are decoded at a time; it changes nothing but memory. The row of an unreadable
    picture is zeros. `each` is told how many images each step was.
    """
    device = next(model.parameters()).device
    rows: list[np.ndarray] = []
    bad: dict[int, DataError] = {}
    for samples, images in chunks(reader.batches(batch_size), CHUNK):
        blank = torch.zeros(reader.preprocess.channels, *reader.preprocess.image, dtype=torch.uint8)
        bad |= {s: image for s, image in zip(samples, images, strict=True) if isinstance(image, DataError)}
        filled = [blank if isinstance(image, DataError) else image for image in images]
        batch = torch.stack(filled + [blank] * (CHUNK - len(filled))).to(device)
        rows.append(forward(model, batch, reader.preprocess, precision)[: len(images)])
        each(len(images))
    return np.concatenate(rows) if rows else np.zeros((0, 0), np.float32), bad


def forward(model: nn.Module, pixels: Tensor, preprocess: Preprocess, precision: torch.dtype = torch.float32) -> np.ndarray:
    """(B, C, *image) uint8 -> (B, K) float32 logits."""
    with torch.autocast(pixels.device.type, dtype=torch.bfloat16, enabled=precision == torch.bfloat16):
        return model(preprocess.normalise(pixels)).float().cpu().numpy()


def chunks(batches: Iterable[tuple[Tensor, list]], size: int) -> Iterator[tuple[list[int], list]]:
    """Batches of any size -> batches of `size`, the last one shorter."""
    samples: list[int] = []
    images: list = []
    for more_samples, more_images in batches:
        samples, images = samples + more_samples.tolist(), images + more_images
        while len(images) >= size:
            yield samples[:size], images[:size]
            samples, images = samples[size:], images[size:]
    if images:
        yield samples, images
