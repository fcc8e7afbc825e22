"""Load the batches of a run and prepare them for its objective: on the device, normalised, in the run's precision."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitreous.data.batch import Batch
from vitreous.data.loader import TrainLoader
from vitreous.data.modalities.base import Preprocess
from vitreous.data.split import Split
from vitreous.objectives.base import Objective
from vitreous.system.machine import DTYPES, copy_to_device
from vitreous.training.loop import SliceBatch, training_progress_at
from vitreous.training.run import Run
from vitreous.training.slices import StepSlice

PIXEL_ENTRIES = {"images", "local", "anchors"}  # entries of a batch that contain augmented views of images


@dataclass(frozen=True)
class RunInputs:
    """The images of a run.

    - `cached`: the images of `train` as (n, C, *image) uint8 if they are kept in memory, else None.
    - `train_indices`: if some images are unreadable, the indices of the images of `train` in the dataset's training
      split; None if `train` contains all of them.
    - `buckets`, (n,) int64: the index in `preprocess.buckets` of the size of each image of `train`; None if all images
      have one size.
    """

    train: Split
    val: Split | None = None
    cached: Tensor | None = None
    train_indices: np.ndarray | None = None
    _: KW_ONLY
    buckets: np.ndarray | None = None


def build_train_loader(run: Run, inputs: RunInputs, device: str) -> TrainLoader:
    """Build the loader of a run's training batches. It pins host memory if `device` is a GPU."""
    data = run.data
    return TrainLoader(
        inputs.train,
        run.preprocess,
        run.views,
        run.seed,
        workers=data.workers,
        cached=inputs.cached,
        sampling=data.sampling,
        repeats=data.repeats,
        repeat_threshold=data.repeat_threshold,
        exact=data.exact,
        pin=device.startswith("cuda"),
        buckets=inputs.buckets,
        batch_size=run.batch_size,
    )


def mean_sample_cost(run: Run, inputs: RunInputs) -> float:
    """Return the mean cost of a training sample relative to a sample of the model's native size: 1 without size
    buckets, else the ratio of multiply-adds."""
    if inputs.buckets is None:
        return 1.0
    costs = [run.model.with_options(image=size).macs() for size in run.preprocess.buckets]
    return float(np.array(costs, np.float64)[inputs.buckets].mean()) / run.model.macs()


def prepare_batches(
    run: Run, loader: TrainLoader, objective: Objective, device: str, steps: Iterable[list[StepSlice]]
) -> Iterator[SliceBatch]:
    """Yield every slice of `steps` with its batch, ready for the objective: on the device, normalised, in the run's
    precision.

    `objective.prepare` augments or masks the batch. In addition to the entries that the loader returns it receives
    "positions", (B,) int64: the positions of the samples in the run's stream. Empty slices have the batch {}.
    """
    dtype = DTYPES[run.precision]
    for step_slice, loaded in load_slices(loader, steps):
        if step_slice.is_empty:
            yield step_slice, {}
            continue
        batch: Batch = {
            name: entry if name == "samples" else move_entry(entry, device) for name, entry in loaded.items()
        }
        batch |= {name: normalise_views(run.preprocess, batch[name]) for name in PIXEL_ENTRIES & batch.keys()}
        batch["positions"] = torch.arange(step_slice.start, step_slice.stop)
        with torch.no_grad():
            batch = objective.prepare(batch, training_progress_at(run, step_slice.start // run.step_size))
        for name in PIXEL_ENTRIES & batch.keys():
            views = batch[name]
            batch[name] = [view.to(dtype) for view in views] if isinstance(views, list) else views.to(dtype)
        yield step_slice, {name: entry for name, entry in batch.items() if name != "positions"}


def load_slices(loader: TrainLoader, steps: Iterable[list[StepSlice]]) -> Iterator[SliceBatch]:
    """Yield every slice of `steps` with its batch as the loader returns it; {} for an empty slice.

    The loader prefetches: it requests slices ahead of the batches that it returns. Requested slices wait in a queue
    here.
    """
    pending: deque[StepSlice] = deque()

    def draw_spans() -> Iterator[tuple[int, int]]:
        """Yield the range of positions of each slice that is not empty, and queue all slices."""
        for slices in steps:
            pending.extend(slices)
            yield from ((step_slice.start, step_slice.stop) for step_slice in slices if not step_slice.is_empty)

    for batch in loader.iterate_spans(draw_spans()):
        while pending[0].is_empty:
            yield pending.popleft(), {}
        yield pending.popleft(), batch
        while pending and pending[0].is_empty:
            yield pending.popleft(), {}
    yield from ((step_slice, {}) for step_slice in pending)


def move_entry(entry: Tensor | list[Any], device: str) -> Tensor | list[Any]:
    """Move an entry of a batch to a device: a tensor (B, ...), or a list of B items of which only tensors are moved."""
    if isinstance(entry, Tensor):
        return copy_to_device(entry, device)
    return [copy_to_device(item, device) if isinstance(item, Tensor) else item for item in entry]


def normalise_views(preprocess: Preprocess, views: Tensor | list[Tensor]) -> Tensor | list[Tensor]:
    """Normalise views of images to the model's input, float32. `views` are a tensor (B, …, C, *image) with values from
    0 to the peak of the data type, or a list of B images (C, height, width) of different sizes."""
    if isinstance(views, list):
        return [preprocess.normalise(view[None])[0] for view in views]
    samples = views.shape[: views.ndim - 1 - len(preprocess.image)]
    return preprocess.normalise(views.flatten(0, len(samples) - 1)).unflatten(0, samples)
