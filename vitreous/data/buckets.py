"""Buckets: a small set of input sizes for samples of many sizes, so that a batch has one size and little is cropped.

The size of a bucket is (height, width), or (frames, height, width) for clips. The form of a sample is the size of its
file, (frames, height, width); an image has one frame. In shapes, n is samples.
"""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from vitreous.data.decoding.clip import Clip
from vitreous.data.decoding.decode import decode_to_pillow, read_upright_size
from vitreous.data.layouts.video import open_sample
from vitreous.data.loader import map_in_workers
from vitreous.data.modalities.base import Preprocess
from vitreous.data.split import Split
from vitreous.errors import DataError, UsageError
from vitreous.nn.sizes import nearest_divisible_size

#: width / height of the candidate buckets: 0.35 to 2.83
BUCKET_ASPECT_RATIOS = [2 ** (step / 4) for step in range(-6, 7)]
MIN_BUCKET_SHARE = 0.03  # minimum share of the samples in a bucket; rarer buckets are removed
MAX_BUCKETS = 64  # maximum number of buckets of a run
FORMS_CHUNK_SIZE = 64  # samples that a worker measures per chunk


def find_nearest_buckets(forms: np.ndarray, buckets: tuple[tuple[int, ...], ...], stride: int = 0) -> np.ndarray:
    """Find the nearest bucket of each form: (n, 3) int64 -> indices in `buckets` (n,) int64.

    The number of frames is compared first: the longest buckets that the clip can fill are candidates, or the shortest
    buckets if it can fill none. Among the candidates, the nearest aspect ratio is chosen, then the nearest area.
    `stride` is the distance of sampled frames; 0: frames are sampled over the complete clip.

        for sample in range(n):
            frames, height, width = forms[sample]
            fill = frames, or with a stride 1 + (frames - 1) // stride
            length = max(T for T, H, W in buckets if T <= fill), or min(T for T, H, W in buckets)
            bucket = the first of those with T = length that has the least
                (|log(width / height) - log(W / H)|, |log(width height) - log(W H)|)
    """
    sizes = np.array([(1, *bucket) if len(bucket) == 2 else bucket for bucket in buckets], np.float64)
    source_sizes = np.maximum(forms, 1).astype(np.float64)
    fill = 1 + (source_sizes[:, 0] - 1) // stride if stride else source_sizes[:, 0]
    is_filled = sizes[:, 0] <= fill[:, None]
    length = np.where(is_filled.any(1), np.where(is_filled, sizes[:, 0], 0).max(1), sizes[:, 0].min())
    aspect = np.abs(np.log(source_sizes[:, 2] / source_sizes[:, 1])[:, None] - np.log(sizes[:, 2] / sizes[:, 1]))
    area = np.abs(np.log(source_sizes[:, 1] * source_sizes[:, 2])[:, None] - np.log(sizes[:, 1] * sizes[:, 2]))
    aspect = np.where(sizes[:, 0] == length[:, None], aspect.round(9), np.inf)
    nearest = aspect == aspect.min(1, keepdims=True)
    return np.where(nearest, area, np.inf).argmin(1)


def assign_buckets(forms: np.ndarray, preprocess: Preprocess) -> np.ndarray:
    """Find the nearest bucket of a preprocessing for each form: (n, 3) int64 -> indices in `preprocess.buckets` (n,)
    int64."""
    return find_nearest_buckets(forms, preprocess.buckets, preprocess.stride)


def find_samples_at_model_size(split: Split, preprocess: Preprocess, workers: int = 0) -> np.ndarray:
    """Return the indices (m,) int64 of the samples whose bucket is the model's input size, `preprocess.image`. Without
    buckets, these are all samples."""
    if not preprocess.has_buckets:
        return np.arange(len(split))
    model_bucket = preprocess.buckets.index(preprocess.image)
    return np.flatnonzero(assign_buckets(measure_sample_forms(split, workers), preprocess) == model_bucket)


def choose_buckets(
    forms: np.ndarray, image: tuple[int, ...], patch: tuple[int, ...], stride: int = 0
) -> tuple[tuple[int, ...], ...]:
    """Choose buckets for forms (n, 3) int64, the most frequent bucket first.

    `image` is the model's input size, `patch` its patch size. A bucket has about the area of `image` and an aspect
    ratio of `BUCKET_ASPECT_RATIOS`. For clips, its number of frames is that of `image`, half of it, a quarter and so
    on. The rarest bucket is removed until each has at least `MIN_BUCKET_SHARE` of the samples, or one is left.
    """
    area, cell = math.prod(image[-2:]), patch[-2:]
    planes = [
        nearest_divisible_size((round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))), cell)
        for ratio in BUCKET_ASPECT_RATIOS
    ]
    clip_lengths = [(length,) for length in list_clip_lengths(image[0], patch[0])] if len(image) == 3 else [()]
    buckets = list(dict.fromkeys((*length, *plane) for length, plane in product(clip_lengths, planes)))
    unique_forms, counts = np.unique(forms, axis=0, return_counts=True)
    while True:
        bucket_counts = np.bincount(find_nearest_buckets(unique_forms, tuple(buckets), stride), counts, len(buckets))
        rarest = int(bucket_counts.argmin())
        if bucket_counts[rarest] >= MIN_BUCKET_SHARE * len(forms) or len(buckets) == 1:
            order = sorted(range(len(buckets)), key=lambda index: (-bucket_counts[index], buckets[index]))
            return tuple(buckets[index] for index in order)
        del buckets[rarest]


def list_clip_lengths(frames: int, patch: int) -> list[int]:
    """List the candidate numbers of frames of a bucket: `frames`, half of it and so on, down to `patch`, the frames of
    one patch. All but the first are multiples of `patch`."""
    halves = [frames]
    while halves[-1] > patch:
        halves.append(max(1, halves[-1] // 2 // patch) * patch)
    return halves


def parse_buckets(size_texts: tuple[str, ...], axes: int) -> tuple[tuple[int, ...], ...]:
    """Parse bucket sizes such as `64x48`, or `8x64x48` for 3 axes, and remove duplicates. Raises UsageError for invalid
    sizes."""
    form = "FRAMESxHEIGHTxWIDTH, as in 8x64x48" if axes == 3 else "HEIGHTxWIDTH, as in 64x48"
    sizes = []
    for size_text in size_texts:
        lengths = size_text.lower().split("x")
        if len(lengths) != axes or not all(length.isdecimal() and 0 < int(length) < 1 << 20 for length in lengths):
            raise UsageError(f"--buckets {size_text} is not a valid size", f"write {form}")
        sizes.append(tuple(map(int, lengths)))
    if len(set(sizes)) > MAX_BUCKETS:
        raise UsageError(f"{len(set(sizes))} buckets exceed the limit of {MAX_BUCKETS}", "use fewer sizes")
    return tuple(dict.fromkeys(sizes))


def measure_sample_forms(split: Split, workers: int = 0) -> np.ndarray:
    """Measure the form of each sample, (n, 3) int64, from file headers if possible. Unreadable samples get zeros."""
    chunks = [
        list(range(low, min(low + FORMS_CHUNK_SIZE, len(split)))) for low in range(0, len(split), FORMS_CHUNK_SIZE)
    ]
    measured = map_in_workers(SampleFormDataset(split), chunks, workers, np.array, 2 if workers else None)
    return np.concatenate([np.zeros((0, 3), np.int64), *measured])


class SampleFormDataset(Dataset):
    """Dataset that maps a sample index to the sample's form, or to zeros if the sample cannot be read."""

    def __init__(self, split: Split) -> None:
        self.split = split

    def __getitem__(self, sample: int) -> tuple[int, int, int]:
        try:
            return read_sample_form(open_sample(self.split, sample), self.split.name(sample))
        except DataError:
            return 0, 0, 0


def read_sample_form(raw: Any, name: str) -> tuple[int, int, int]:
    """Return the form (frames, height, width) of an opened clip, the bytes of an image file, or pixels (H, W[, C]).
    Raises DataError for an unreadable image."""
    if isinstance(raw, Clip):
        return len(raw), *raw.size
    if isinstance(raw, np.ndarray):
        return 1, raw.shape[0], raw.shape[1]
    width, height = read_upright_size(raw, name)
    if not width:
        width, height = decode_to_pillow(raw, 3, name).size
    return 1, height, width
