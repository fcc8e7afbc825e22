"""Measure the mean and standard deviation (std) of each channel of a split, for normalising its images."""

from __future__ import annotations

import numpy as np
from PIL import Image
from torch.utils.data import Dataset

from vitreous.data.decoding.spectral import get_void_mask
from vitreous.data.layouts.video import open_sample
from vitreous.data.loader import map_in_workers
from vitreous.data.modalities.base import Preprocess
from vitreous.data.split import Split
from vitreous.errors import DataError

MAX_MOMENTS_IMAGES = 10_000  # images sampled evenly from the split
STD_TOLERANCE = 1e-7  # a std below this share of the mean is a rounding error of float32
MOMENTS_CHUNK_SIZE = 64  # images that a worker measures per chunk

#: number of pixels; mean (C,) and sum of squared differences from the mean (C,) of each channel
ChannelMoments = tuple[int, np.ndarray, np.ndarray]


def measure_channel_statistics(
    split: Split, preprocess: Preprocess, workers: int = 0
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Measure the mean and std of each channel at the model's size, in units of `preprocess.peak`.

    The moments of the images are merged in order, in one pass and in float64 (Chan, Golub and LeVeque, 1983), so the
    result does not depend on the number of workers. At most `MAX_MOMENTS_IMAGES` images are read. Unreadable images and
    invalid pixels are left out; a constant channel gets std 1. Raises DataError if no image can be read.
    """
    if len(split) > MAX_MOMENTS_IMAGES:
        split = split.take(np.linspace(0, len(split) - 1, MAX_MOMENTS_IMAGES).astype(np.int64))
    count, mean, squared_deviations, error = 0, np.zeros(preprocess.channels), np.zeros(preprocess.channels), None
    chunks = [
        list(range(low, min(low + MOMENTS_CHUNK_SIZE, len(split)))) for low in range(0, len(split), MOMENTS_CHUNK_SIZE)
    ]
    for chunk_moments in map_in_workers(
        MomentsDataset(split, preprocess), chunks, workers, list, 2 if workers else None
    ):
        for moments in chunk_moments:
            if isinstance(moments, DataError):
                error = error or moments
                continue
            num_pixels, image_mean, squares = moments
            if not num_pixels:
                continue
            difference, total = image_mean - mean, count + num_pixels
            squared_deviations += squares + difference**2 * (count * num_pixels / total)
            mean += difference * (num_pixels / total)
            count = total
    if not count:
        raise error or DataError("no image has valid pixels to measure channel statistics on", "use other images")
    std = np.sqrt(squared_deviations / count)
    std = np.where(std > STD_TOLERANCE * np.abs(mean), std, 1.0)
    return tuple(mean.tolist()), tuple(std.tolist())


class MomentsDataset(Dataset):
    """Dataset that maps a sample index to the moments of the sample's channels, or to its DataError."""

    def __init__(self, split: Split, preprocess: Preprocess) -> None:
        self.split, self.preprocess = split, preprocess

    def __getitem__(self, sample: int) -> ChannelMoments | DataError:
        try:
            return measure_sample_moments(self.split, self.preprocess, sample)
        except DataError as error:
            return error


def measure_sample_moments(split: Split, preprocess: Preprocess, sample: int) -> ChannelMoments:
    """Measure the moments of the channels of an image, resized to the model's input size. Invalid pixels, and pixels
    that resampling mixes with them, are excluded. Raises DataError for an unreadable image."""
    decoded = preprocess.decode(open_sample(split, sample), split.name(sample))
    image, void = preprocess.to_array(decoded), get_void_mask(decoded)
    pixels = image.reshape(len(image), -1) / np.float64(preprocess.peak)
    if void is not None:
        resampled_void = preprocess.to_array((Image.fromarray(void.astype(np.float32)),))
        pixels = pixels[:, resampled_void.ravel() == 0]
    num_pixels = pixels.shape[1]
    mean = pixels.mean(1) if num_pixels else np.zeros(len(pixels))
    return num_pixels, mean, ((pixels - mean[:, None]) ** 2).sum(1)
