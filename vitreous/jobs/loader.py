"""Batches of a dataset for a custom training loop: the function `vitreous.create_loader`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Unpack

import numpy as np
import torch

from vitreous.config import apply_keyword_options
from vitreous.data.augmentation.augment import Augment
from vitreous.data.batch import Batch
from vitreous.data.loader import EvalLoader, TrainLoader
from vitreous.data.modalities.base import Preprocess
from vitreous.data.sources import open_data
from vitreous.data.split import Data, is_labelled
from vitreous.errors import DataError, UsageError, check_path_argument, format_first_names
from vitreous.jobs.derive_run import derive_run
from vitreous.progress import NullListener
from vitreous.recipes.options import TrainOptions
from vitreous.training.batches import normalise_views

if TYPE_CHECKING:
    from vitreous.keywords import LoaderKeywords

#: parameters of `create_loader` that are not options of `train`
LOADER_ARGUMENTS = ("split", "batch_size", "augment", "preprocess", "drop_last", "seed", "workers")


class BatchLoader:
    """Iterates over the batches of a split, as dicts whose entries have the sample dimension first.

    - "images": (B, C, *image) float32, normalised, or the output of other views.
    - "labels": (B,) int64, or (B, K) float32 for multi-label data, if the dataset has labels.
    - "samples": (B,) int64, the indices of the samples in the split.

    Every iteration is the next epoch. Order and views depend only on the seed, the epoch and the sample, not on the
    number of workers. `classes` are the class names; `preprocess` converts images to the model's input.
    """

    data: Data
    reader: TrainLoader | EvalLoader
    batch_size: int
    drop_last: bool
    classes: tuple[str, ...]
    preprocess: Preprocess
    epoch: int

    def __init__(self, data: Data, reader: TrainLoader | EvalLoader, batch_size: int, drop_last: bool) -> None:
        self.data, self.reader, self.batch_size, self.drop_last = data, reader, batch_size, drop_last
        self.classes, self.preprocess, self.epoch = data.classes, reader.preprocess, 0
        names = data.targets or data.classes
        self.label_text = (
            f"{'targets' if data.targets else 'classes'}: {len(names):,} ({format_first_names(names, 12)})"
        )

    def __repr__(self) -> str:
        order = "train" if isinstance(self.reader, TrainLoader) else "in order"
        lines = [
            f"BatchLoader({self.data.name}, {order})",
            f"images: {len(self.reader.split):,} in {len(self):,} batches of {self.batch_size}",
            self.label_text,
            f"input: {self.preprocess.channels} channels of {' x '.join(map(str, self.preprocess.image))} pixels",
        ]
        return "\n  ".join(lines)

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        count = len(self.reader.split)
        return count // self.batch_size if self.drop_last else -(-count // self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, from 0, for example after resuming."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[Batch]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        if isinstance(self.reader, TrainLoader):
            return self.training_batches(self.reader, epoch)
        return self.evaluation_batches(self.reader)

    def training_batches(self, reader: TrainLoader, epoch: int) -> Iterator[Batch]:
        """Yield the batches of an epoch, augmented and in random order. Raises DataError for an unreadable image."""
        count = len(reader.split)
        start, stop = epoch * count, epoch * count + min(count, len(self) * self.batch_size)
        for batch in reader.iterate_batches(start, stop, self.batch_size):
            images = {
                name: normalise_views(self.preprocess, batch[name]) for name in ("images", "local") if name in batch
            }
            yield {**batch, **images}

    def evaluation_batches(self, reader: EvalLoader) -> Iterator[Batch]:
        """Yield the batches of all images in order, without augmentation. Raises DataError for an unreadable image."""
        for index, (samples, images) in enumerate(reader.iterate_batches(self.batch_size)):
            if index == len(self):
                return
            if errors := [image for image in images if isinstance(image, DataError)]:
                raise errors[0]
            views = self.preprocess.collate([image for image in images if not isinstance(image, DataError)])
            batch: Batch = {"images": normalise_views(self.preprocess, views), "samples": samples}
            if is_labelled(reader.split):
                batch["labels"] = torch.from_numpy(np.ascontiguousarray(reader.split.labels[samples.numpy()]))
            yield batch


def create_loader(
    data: str | os.PathLike[str],
    split: str = "train",
    batch_size: int = 64,
    augment: bool | None = None,
    preprocess: Preprocess | None = None,
    drop_last: bool = False,
    seed: int = 0,
    workers: int = 0,
    **options: Unpack[LoaderKeywords],
) -> BatchLoader:
    """Open a dataset, in any layout that `vitreous train` supports, for a custom training loop.

    Args:
        data: the path or name of the dataset.
        split: train, val or test. If the dataset has no val split, 10 % of train is held out, as in `train`.
        batch_size: the number of images of a batch.
        augment: whether images are augmented as in the recipe, in random order; otherwise they are preprocessed as in
            evaluation, in order. By default only train is augmented.
        preprocess: the preprocessing, such as `vitreous.load(RUN).card.preprocess`; by default derived from the options
            `image_size`, `model` or `init`, as in `train`.
        drop_last: whether a smaller last batch is dropped.
        seed: the seed of order and augmentation.
        workers: the number of processes that decode images; 0 decodes in this process.
        options: options of `vitreous.train`, such as `recipe`, `split_seed` and `group_by`.

    MixUp and CutMix need the whole batch and are left to the loop. Raises DataError for unreadable data or a missing
    split, UsageError for invalid options.
    """
    check_path_argument(data, "create_loader(data)")
    if batch_size < 1 or workers < 0:
        raise UsageError(
            f"batch_size={batch_size} or workers={workers} is too small", "use batch_size >= 1 and workers >= 0"
        )
    train_options = TrainOptions(os.fspath(data), seed=seed, workers=workers)
    (train_options,) = apply_keyword_options(
        "create_loader", dict(options), train_options, extra_names=LOADER_ARGUMENTS
    )
    dataset = open_data(
        train_options.data,
        train_options.split_seed or 0,
        train_options.group_by,
        axes=train_options.axes,
        ignore_index=train_options.ignore_index,
        targets=tuple(train_options.targets or ()),
    )
    if dataset.targets and train_options.recipe is None:
        train_options = replace(train_options, recipe="regression")
    data_split = dataset.split(split)
    run = derive_run(dataset, train_options, {}, NullListener(), None)
    transform = preprocess or run.preprocess
    if not (split == "train" if augment is None else augment):
        return BatchLoader(dataset, EvalLoader(data_split, transform, workers), batch_size, drop_last)
    views = run.views
    if isinstance(views, Augment):  # MixUp and CutMix are left to the loop
        views = replace(views, mixup=0.0, cutmix=0.0)
    reader = TrainLoader(
        data_split, transform, views, seed, workers=workers, exact=train_options.exact, batch_size=batch_size
    )
    return BatchLoader(dataset, reader, batch_size, drop_last)
