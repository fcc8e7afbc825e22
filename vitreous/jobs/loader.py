"""Batches of a data set for somebody else's training loop: `vitreous.create_loader`."""

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

LOADER_ARGUMENTS = ("split", "batch_size", "augment", "preprocess", "drop_last", "seed", "workers")


class BatchLoader:
    """Batches of one split, as dicts in which every entry has the samples first.

    `images` (B, C, *image) float32, normalised, or what other views give; `labels` (B,) int64, or (B, K) float32 where
    an image may have several, if the data have any; `samples` (B,) int64, their numbers in the split. Every pass over
    it is the next epoch; order and views are functions of the seed, the epoch and the sample alone, however many
    workers there are. `classes` are the names of the labels, `preprocess` says how images are read.
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
        kind = "train" if isinstance(self.reader, TrainLoader) else "in order"
        lines = [
            f"BatchLoader({self.data.name}, {kind})",
            f"images: {len(self.reader.split):,} in {len(self):,} batches of {self.batch_size}",
            self.label_text,
            f"input: {self.preprocess.channels} channels of {' x '.join(map(str, self.preprocess.image))} pixels",
        ]
        return "\n  ".join(lines)

    def __len__(self) -> int:
        """Batches of an epoch."""
        count = len(self.reader.split)
        return count // self.batch_size if self.drop_last else -(-count // self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Have the next pass be that epoch, counted from 0, as after a resumption."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[Batch]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        if isinstance(self.reader, TrainLoader):
            return self.training_batches(self.reader, epoch)
        return self.evaluation_batches(self.reader)

    def training_batches(self, reader: TrainLoader, epoch: int) -> Iterator[Batch]:
        """The batches of one epoch, augmented and in random order. Raises DataError for an image that cannot be
        read."""
        count = len(reader.split)
        start, stop = epoch * count, epoch * count + min(count, len(self) * self.batch_size)
        for batch in reader.batches(start, stop, self.batch_size):
            images = {
                name: normalise_views(self.preprocess, batch[name]) for name in ("images", "local") if name in batch
            }
            yield {**batch, **images}

    def evaluation_batches(self, reader: EvalLoader) -> Iterator[Batch]:
        """Every image once, in order, without chance. Raises DataError for an image that cannot be read."""
        for number, (samples, images) in enumerate(reader.batches(self.batch_size)):
            if number == len(self):
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
    """Open a data set, in any layout that `vitreous train` reads, for a training loop of your own.

    `split`: train, val or test; where the data have no val, a tenth is held out, as `train` does. `augment`: the views
    of the recipe in random order (the default for train), or the images as they are judged, in order. `preprocess`: how
    a picture becomes the input, as `vitreous.load(RUN).card.preprocess` has it; else as `train` would have it for
    `image_size`, `model` or `init`, which are among the `options` of `vitreous.train`, as `recipe`, `split_seed`,
    `group_by` are. `workers` are processes that decode.

    Mixing (MixUp, CutMix) needs the whole batch and is left to the loop. Raises DataError for data that cannot be read
    or lack the split, UsageError for options that cannot be meant.
    """
    check_path_argument(data, "create_loader(data)")
    if batch_size < 1 or workers < 0:
        raise UsageError(
            f"batch_size={batch_size} with workers={workers} cannot be", "give 1 image or more, 0 workers or more"
        )
    chosen = TrainOptions(os.fspath(data), seed=seed, workers=workers)
    (chosen,) = apply_keyword_options("create_loader", dict(options), chosen, known=LOADER_ARGUMENTS)
    opened = open_data(
        chosen.data,
        chosen.split_seed or 0,
        chosen.group_by,
        axes=chosen.axes,
        ignore_index=chosen.ignore_index,
        targets=tuple(chosen.targets or ()),
    )
    if opened.targets and chosen.recipe is None:
        chosen = replace(chosen, recipe="regression")
    part = opened.split(split)
    run = derive_run(opened, chosen, {}, NullListener(), None)
    read = preprocess or run.preprocess
    if not (split == "train" if augment is None else augment):
        return BatchLoader(opened, EvalLoader(part, read, workers), batch_size, drop_last)
    views = run.views
    if isinstance(views, Augment):  # what is drawn for a whole batch is the loop's
        views = replace(views, mixup=0.0, cutmix=0.0)
    reader = TrainLoader(part, read, views, seed, workers=workers, exact=chosen.exact, batch_size=batch_size)
    return BatchLoader(opened, reader, batch_size, drop_last)
