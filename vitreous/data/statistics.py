"""Mean and deviation of each channel over a split, for images whose channels nobody has measured before."""

from __future__ import annotations

import numpy as np

from vitreous.data.loader import EvalLoader
from vitreous.data.preprocess import Preprocess
from vitreous.data.split import Split
from vitreous.errors import DataError

MOST = 10_000  # images, spread over the split, that stand for all
ROUNDING = 1e-7  # of the mean: a deviation below is that of float32


def statistics(split: Split, preprocess: Preprocess, workers: int = 0) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of each channel at the model's size, in units of `preprocess.peak`, the same for any number of
    workers.

    One pass: each image's own moments are merged, in order, in float64 (Chan, Golub and LeVeque, 1983). What cannot
    be read is left out; a channel that never changes has deviation 1. Raises DataError where nothing can be read.
    """
    if len(split) > MOST:
        split = split.take(np.linspace(0, len(split) - 1, MOST).astype(np.int64))
    count, mean, spread, error = 0, np.zeros(preprocess.channels), np.zeros(preprocess.channels), None
    for _, images in EvalLoader(split, preprocess, workers).batches(64):
        for image in images:
            if isinstance(image, DataError):
                error = error or image
                continue
            pixels = image.numpy().reshape(len(image), -1) / np.float64(preprocess.peak)
            own, size = pixels.mean(1), pixels.shape[1]
            apart, whole = own - mean, count + size
            spread += ((pixels - own[:, None]) ** 2).sum(1) + apart**2 * (count * size / whole)
            mean += apart * (size / whole)
            count = whole
    if not count:
        raise error or DataError("there are no pictures to measure channels on")
    deviation = np.sqrt(spread / count)
    deviation = np.where(deviation > ROUNDING * np.abs(mean), deviation, 1.0)
    return tuple(mean.tolist()), tuple(deviation.tolist())
