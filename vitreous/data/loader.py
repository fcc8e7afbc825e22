"""Data loaders: decode and augment the samples of a split, in this process or in worker processes, and collate them to
batches. A training run reads one endless stream of samples; positions count the samples of that stream."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from itertools import chain
from types import TracebackType
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vitreous.data.annotations.target import AnnotatedSplit, Target
from vitreous.data.augmentation.augment import ViewAugmentation
from vitreous.data.augmentation.scenes import SceneViews
from vitreous.data.augmentation.volumes import VolumeViews
from vitreous.data.batch import Batch
from vitreous.data.clip_views import ClipViews
from vitreous.data.decoding.spectral import DecodedSample
from vitreous.data.keys import derive_key, derive_keys
from vitreous.data.layouts.video import open_sample
from vitreous.data.modalities.base import Preprocess
from vitreous.data.modalities.clips import ClipPreprocess, open_as_clip
from vitreous.data.pairs import PairSplit
from vitreous.data.sampling import SampleOrder, compute_repeat_factors, get_stream_samples
from vitreous.data.shared_memory import limit_workers
from vitreous.data.split import Split, is_labelled
from vitreous.data.worker_deaths import WORKER_DEATHS, worker_error
from vitreous.errors import DataError
from vitreous.system.children import block_stop_signals, ignore_group_signals
from vitreous.system.machine import get_free_memory

WORKER_TIMEOUT = 120.0  # seconds without a result after which a worker is considered dead
MAX_PREFETCH_BATCHES = 4  # maximum batches that a worker prefetches, if memory allows it
PREFETCH_MEMORY_SHARE = 0.25  # share of free memory for prefetched batches

SCENE_CACHE_MEMORY_SHARE = 0.1  # share of free memory for cached images and targets


@dataclass(frozen=True)
class TrainLoader:
    """Loader of the training batches of a split. Each sample is augmented by `views`, such as `Augment` or `MultiCrop`.

    - `cached`: all images in memory, (n, C, *image) uint8; None: files are read on demand.
    - `sampling`: `balanced` shows every class equally often; `repeat-factor` oversamples images of classes that occur
      on less than a share `repeat_threshold` of the images.
    - `repeats`: number of views of an image in an epoch (see `SampleOrder`).
    - `exact`: never decode a JPEG at reduced resolution for a crop that is downscaled.
    - `pin`: return batches in pinned memory.
    - `buckets`, (n,) int64: the index in `preprocess.buckets` of each sample. Most batches of `batch_size` positions
      then have a single bucket; a requested span must have a single one.

    Raises UsageError for balanced sampling without exactly one class per image.
    """

    split: Split
    preprocess: Preprocess
    views: ViewAugmentation
    seed: int
    _: KW_ONLY
    workers: int = 0
    cached: Tensor | None = None
    sampling: Literal["even", "balanced", "repeat-factor"] = "even"
    repeats: int = 1
    repeat_threshold: float = 0.001
    exact: bool = False
    pin: bool = False
    buckets: np.ndarray | None = None
    batch_size: int = 1

    def __post_init__(self) -> None:
        _ = self.sample_order

    @cached_property
    def sample_order(self) -> SampleOrder:
        """The order in which the stream shows the samples."""
        labels = self.split.labels if self.sampling != "even" else None
        if labels is not None and self.sampling == "repeat-factor":
            return SampleOrder(
                len(self.split),
                self.seed,
                None,
                self.repeats,
                factors=compute_repeat_factors(labels, self.repeat_threshold),
            )
        return SampleOrder(
            len(self.split),
            self.seed,
            labels=labels,
            repeats=self.repeats,
            factors=None,
            buckets=self.buckets,
            batch=self.batch_size,
        )

    @cached_property
    def bucket_preprocesses(self) -> list[Preprocess]:
        """The preprocessing of each bucket."""
        return list(self.preprocess.at_buckets())

    @cached_property
    def has_annotations(self) -> bool:
        """Whether images are augmented together with their annotations, as scenes."""
        volumes = isinstance(self.views, VolumeViews) and isinstance(self.split, AnnotatedSplit)
        return volumes or isinstance(self.views, SceneViews)

    @cached_property
    def scene_reader(self) -> SceneReader:
        """The reader of scenes: images with their annotations."""
        assert isinstance(self.split, AnnotatedSplit), "objectives with SceneViews reject data without annotations"
        return SceneReader(self.split, self.preprocess)

    def iterate_batches(self, start: int, stop: int, size: int) -> Iterator[Batch]:
        """Yield batches of `size` samples for the positions [start, stop) of the stream; the last may be smaller."""
        return self.iterate_spans((low, min(low + size, stop)) for low in range(start, stop, size))

    def iterate_spans(self, spans: Iterable[tuple[int, int]]) -> Iterator[Batch]:
        """Yield a batch for each span (start, stop) of positions, with the views, `samples` and any `labels`.

        An empty span yields an empty batch. `spans` may be infinite: it is consumed lazily, a few spans ahead if there
        are worker processes.
        """
        if self.cached is not None:
            return (self.load_memory_batch(*span) for span in spans)
        return self.load_file_batches(spans)

    def load_memory_batch(self, start: int, stop: int) -> Batch:
        """Load the batch of the positions [start, stop) from the images in memory, and augment it in one call."""
        assert self.cached is not None
        samples, epochs, views = get_stream_samples(self.sample_order, start, stop)
        pixels = torch.from_numpy(self.cached.numpy()[samples])  # numpy copies whole images, torch single elements
        images = self.views.augment_batch(pixels, derive_keys(self.seed, epochs, samples, views))
        return self.build_batch(images.pin_memory() if self.pin else images, torch.from_numpy(samples))

    def load_file_batches(self, spans: Iterable[tuple[int, int]]) -> Iterator[Batch]:
        """Yield a batch for each span (start, stop) from files, decoded and augmented by the workers. Raises the
        DataError of the first unreadable sample of a batch."""
        key_lists = (
            list(zip(*(array.tolist() for array in get_stream_samples(self.sample_order, *span)), strict=True))
            for span in spans
        )
        for samples, images in load_batches(self, key_lists, self.workers, self.pin):
            if not isinstance(images, Tensor):
                if errors := [image for image in images if isinstance(image, DataError)]:
                    raise errors[0]
                if isinstance(self.views, SceneViews | VolumeViews) and self.has_annotations:
                    yield {**self.views.collate(images, self.preprocess), "samples": samples}
                    continue
                images = self.preprocess.collate(images)
            elif not self.preprocess.stacks:
                images = list(images)
            yield self.build_batch(images, samples)

    def build_batch(self, images: Tensor | list[Tensor], samples: Tensor) -> Batch:
        """Build a batch from the views of B samples (a tensor, or a list of images of different sizes) and their
        indices (B,) int64."""
        views = {"images": images} if isinstance(images, list) else self.views.unpack_batch(images, self.preprocess)
        batch: Batch = {**views, "samples": samples}
        if is_labelled(self.split):
            batch["labels"] = torch.from_numpy(self.split.labels[samples.numpy()])
        if isinstance(self.split, PairSplit) and self.split.has_tokens:
            batch["tokens"] = torch.from_numpy(self.split.take(samples.numpy()).tokens.astype(np.int64))
        return batch

    def load_sample(self, sample: int, epoch: int, view: int) -> Tensor | dict[str, Tensor]:
        """Load a sample, decoded and augmented: an image (C, *image) uint8, or a dict of an image and its annotations
        if `has_annotations`. `view` counts the repetitions of the sample in an epoch. Raises DataError."""
        preprocess = self.preprocess if self.buckets is None else self.bucket_preprocesses[self.buckets[sample]]
        sample_key = derive_key(self.seed, epoch, sample, view)
        if isinstance(self.views, SceneViews | VolumeViews) and self.has_annotations:
            return self.views.augment_scene(*self.scene_reader.read(sample), preprocess, sample_key)
        raw, name = open_sample(self.split, sample), self.split.name(sample)
        return self.views.augment_image(
            preprocess.open_view(raw, name, self.exact, self.views.takes_regions), preprocess, sample_key
        )


@dataclass(frozen=True)
class EvalLoader:
    """Evaluation loader: every sample once, in order, without augmentation; clips optionally as several views."""

    split: Split
    preprocess: Preprocess
    workers: int = 0
    views: ClipViews | None = None

    def iterate_batches(self, size: int) -> Iterator[tuple[Tensor, list[Tensor | DataError]]]:
        """Yield batches: sample indices (B,) and, for each sample, its image (C, *image) uint8, its views
        (V, C, *image) if `views` is set, or the DataError of an unreadable sample."""
        count = len(self.split)
        key_lists = ([(sample,) for sample in range(low, min(low + size, count))] for low in range(0, count, size))
        for samples, images in load_batches(self, key_lists, self.workers):
            yield samples, list(images)

    def load_sample(self, sample: int) -> Tensor:
        """Load a sample: a decoded image or the sampled frames of a clip, (C, *image) uint8, or the views of a clip
        (V, C, *image). Raises DataError."""
        split = self.split
        if self.views is not None:
            clip = open_as_clip(open_sample(split, sample), split.name(sample))
            assert isinstance(self.preprocess, ClipPreprocess)
            return torch.from_numpy(self.views.read_views(clip, self.preprocess))
        return self.preprocess.to_tensor(self.preprocess.decode(open_sample(split, sample), split.name(sample)))


class DecodingDataset(Dataset):
    """Dataset that maps a key, (sample, epoch, view) or (sample,), to the sample index and its image, or its
    DataError."""

    def __init__(self, reader: TrainLoader | EvalLoader) -> None:
        self.reader = reader

    def __getitem__(self, key: tuple[int, ...]) -> tuple[int, Tensor | dict[str, Tensor] | DataError]:
        try:
            return key[0], self.reader.load_sample(*key)
        except DataError as error:
            return key[0], error


class ConcatenatedTensors(NamedTuple):
    """Tensors of different sizes in one: `values` (n,) contains them flattened and concatenated; `shapes` has their
    shapes."""

    values: Tensor
    shapes: list[torch.Size]

    def split_tensors(self) -> list[Tensor]:
        """Return the original tensors, each of one of the `shapes`, as views of `values`."""
        flat_tensors = self.values.split([shape.numel() for shape in self.shapes])
        return [tensor.view(shape) for tensor, shape in zip(flat_tensors, self.shapes, strict=True)]


def collate_samples(items: list[tuple[int, Any]]) -> tuple[Tensor, Tensor | ConcatenatedTensors | list[Any]]:
    """Collate items of `DecodingDataset` to sample indices (B,) int64 and images.

    Images of equal size are stacked, (B, C, *image), others are concatenated. A batch with an error or with annotations
    stays a list. A worker passes a tensor to the main process as one shared-memory file, but a list as one file per
    tensor, which may exceed the limit of open files.
    """
    if not items:
        return torch.empty(0, dtype=torch.int64), []
    samples, images = zip(*items, strict=True)
    if not all(isinstance(image, Tensor) and image.dtype == images[0].dtype for image in images):
        return torch.tensor(samples), list(images)
    if all(image.shape == images[0].shape for image in images):
        return torch.tensor(samples), torch.stack(images)
    concatenated = ConcatenatedTensors(
        torch.cat([image.flatten() for image in images]), [image.shape for image in images]
    )
    return torch.tensor(samples), concatenated


def init_worker(worker: int) -> None:
    """Ignore stop signals in a worker process: the main process saves a checkpoint and then ends its workers."""
    ignore_group_signals()
    sys.excepthook = ignore_closed_connection


def ignore_closed_connection(
    error_type: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Suppress a worker's traceback if the main process stops while a thread transfers a batch."""
    if not isinstance(error, ConnectionError | EOFError):
        sys.__excepthook__(error_type, error, trace)


def load_batches(
    reader: TrainLoader | EvalLoader, key_lists: Iterable[list[tuple[int, ...]]], workers: int, pin: bool = False
) -> Iterator[tuple[Tensor, Tensor | list[Any]]]:
    """Load a batch for each list of sample keys, in order, in `workers` processes.

    Yields sample indices (B,) int64 and images: a tensor (B, C, *image), or a list if sizes differ, images are
    annotated, or one is unreadable. Raises ResourceError if a worker dies or hangs.
    """
    prefetch = None
    if workers:
        key_lists = iter(key_lists)
        first_keys = next(key_lists, [])
        key_lists = chain([first_keys], key_lists) if first_keys else key_lists
        views = reader.views.count if isinstance(reader, EvalLoader) and reader.views else 1
        size = len(first_keys) * views * reader.preprocess.nbytes
        workers = limit_workers(workers, size)
        prefetch = choose_prefetch_factor(size, workers) if workers else None
    for samples, images in map_in_workers(
        DecodingDataset(reader), key_lists, workers=workers, collate=collate_samples, prefetch=prefetch, pin=pin
    ):
        yield samples, images.split_tensors() if isinstance(images, ConcatenatedTensors) else images


def map_in_workers(
    items: Any,
    key_lists: Iterable[Any],
    workers: int,
    collate: Callable[[list[Any]], Any],
    prefetch: int | None,
    pin: bool = False,
) -> Iterator[Any]:
    """Yield collated items of the dataset `items` for each list of keys, in order, loaded by `workers` processes.

    `prefetch` is the number of lists that each process loads in advance; it has no effect without workers. Raises
    ResourceError if a worker dies or hangs.
    """
    workers = limit_workers(workers)
    options: dict[str, Any] = {"num_workers": workers, "collate_fn": collate, "pin_memory": pin}
    if workers:
        options |= {"timeout": WORKER_TIMEOUT, "prefetch_factor": prefetch, "worker_init_fn": init_worker}
    try:
        with block_stop_signals():  # also protects the moment before a worker has started
            batches = iter(DataLoader(items, batch_sampler=key_lists, **options))
        yield from WORKER_DEATHS.watch(batches) if workers else batches
    except RuntimeError as error:
        if "DataLoader" not in str(error):
            raise
        raise worker_error(error) from None


def choose_prefetch_factor(size: int, workers: int) -> int:
    """Choose the number of batches of `size` bytes that each worker prefetches: 1 to MAX_PREFETCH_BATCHES, limited by
    free memory. Prefetched batches are in shared memory, which is small in many containers."""
    free_memory = get_free_memory("cpu")
    if os.path.isdir("/dev/shm"):
        status = os.statvfs("/dev/shm")
        free_shared = status.f_bavail * status.f_frsize
        free_memory = min(free_memory or free_shared, free_shared)
    return (
        max(1, min(MAX_PREFETCH_BATCHES, int(PREFETCH_MEMORY_SHARE * free_memory) // max(1, size * workers)))
        if free_memory
        else MAX_PREFETCH_BATCHES
    )


class SceneReader:
    """Reader of scenes: images of a split with their annotations. Scenes are cached in memory until the cache is
    full."""

    def __init__(self, split: AnnotatedSplit, preprocess: Preprocess) -> None:
        self.split, self.preprocess = split, preprocess
        self.scenes: dict[int, tuple[DecodedSample, Target]] = {}
        self.free_cache_bytes = SCENE_CACHE_MEMORY_SHARE * (get_free_memory("cpu") or 0)

    def read(self, sample: int) -> tuple[DecodedSample, Target]:
        """Read an image and its annotations, which are reduced to the class map if there is one. Raises DataError."""
        if sample in self.scenes:
            return self.scenes[sample]
        name = self.split.name(sample)
        image, target = self.preprocess.decode(self.split.raw(sample), name), self.split.target(sample)
        if target.classes is not None:
            target = target.without_masks().take(np.zeros(0, np.int64))
        size = count_decoded_bytes(image) + target.nbytes
        if size <= self.free_cache_bytes:
            self.free_cache_bytes -= size
            self.scenes[sample] = image, target
        return image, target

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a worker process, without the cache, which would take time to transfer."""
        return self.__dict__ | {"scenes": {}}


def count_decoded_bytes(image: DecodedSample) -> int:
    """Return the size in bytes of a decoded image: pixels, a PIL image, or a tuple of one PIL image per channel."""
    if isinstance(image, np.ndarray):
        return image.nbytes
    bands = image if isinstance(image, tuple) else (image,)
    return sum(band.width * band.height * {"L": 1, "RGB": 3}.get(band.mode, 4) for band in bands)
