"""Decode all images once before training, to find unreadable ones and to cache small datasets in memory."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from vitreous.data.decoding.spectral import NO_DATA_REASON
from vitreous.data.loader import EvalLoader
from vitreous.data.modalities.base import Preprocess
from vitreous.data.split import Split
from vitreous.errors import DataError, EmptyImageError, format_first_lines

# maximum size of a dataset in memory, at the model's input size
MAX_CACHE_BYTES = 2**30
MAX_SIZE_PROBES = 64  # number of images that are decoded to check the image sizes of a dataset


def fits_in_memory(split: Split, preprocess: Preprocess) -> bool:
    """Return whether a split can be cached in memory: it has at most `MAX_CACHE_BYTES` at the model's input size, and
    none of up to `MAX_SIZE_PROBES` images is larger than that size."""
    if not preprocess.is_cacheable or len(split) * preprocess.nbytes > MAX_CACHE_BYTES:
        return False
    for sample in np.linspace(0, len(split) - 1, min(MAX_SIZE_PROBES, len(split))).astype(int):
        try:
            decoded = preprocess.decode(split.raw(int(sample)))
        except DataError:
            continue
        if not preprocess.is_within(decoded):
            return False
    return True


def screen_images(
    split: Split, preprocess: Preprocess, workers: int, keep: bool
) -> tuple[Tensor | None, dict[int, DataError]]:
    """Decode every image of a split once, to find unreadable images.

    Returns all images as a tensor (n, C, *image) of `preprocess.dtype` if `keep`, else None, and {sample: error} of the
    unreadable images, which are zeros in the tensor.
    """
    shape = len(split), preprocess.channels, *preprocess.image
    pixels = torch.zeros(shape, dtype=preprocess.dtype) if keep else None
    errors: dict[int, DataError] = {}
    for samples, images in EvalLoader(split, preprocess, workers).iterate_batches(256):
        for sample, image in zip(samples.tolist(), images, strict=True):
            if isinstance(image, DataError):
                errors[sample] = image
            elif pixels is not None:
                pixels[sample] = image
    return pixels, errors


def find_readable_samples(split: Split, errors: dict[int, DataError]) -> np.ndarray:
    """Return the indices (m,) int64 of a split's readable images. Raises DataError if there are none."""
    readable = np.array([sample for sample in range(len(split)) if sample not in errors], dtype=np.int64)
    if not len(readable):
        first_error = next((f"; the first: {error.message}" for error in errors.values()), "")
        raise DataError(
            f"none of {len(split)} images can be read{first_error}", "restore them, or choose another split"
        )
    return readable


def check_unreadable_images(errors: Mapping[int, DataError], total: int, bad_images: str) -> None:
    """Raise DataError, with a list, if some of `total` images are unreadable and `bad_images` is stop. Images without
    valid pixels are no errors."""
    reported = {sample: error for sample, error in errors.items() if not isinstance(error, EmptyImageError)}
    if reported and bad_images == "stop":
        raise unreadable_images_error(reported, total)


def error_from_message(reason: str) -> DataError:
    """Recreate the DataError, or EmptyImageError, of an unreadable image from its stored message."""
    return (EmptyImageError if reason.endswith(NO_DATA_REASON) else DataError)(reason)


def unreadable_images_error(errors: dict[int, DataError], total: int) -> DataError:
    """Return the error for unreadable images, which lists the first twenty of them, with their number among `total`
    images."""
    listing = format_first_lines((error.message for error in errors.values()), len(errors))
    problem = f"{len(errors)} of {total} images cannot be read:{listing}"
    return DataError(problem, "fix or delete these files, or use --bad-images skip")
