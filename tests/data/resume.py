"""Check that the sample stream of a data source continues from any position, for any number of workers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from vitreous.data.augmentation.augment import Augment
from vitreous.data.loader import TrainLoader
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.data.split import Split

NUM_STARTS = 50
NUM_EPOCHS = 3
BATCH_SIZE, NUM_CHECKED_IMAGES = 3, 7  # batch size after a restart, and number of images compared


def assert_continues(reopen: Callable[[], Split], workers: int, starts: int = NUM_STARTS) -> None:
    """Assert that a reopened source continues the stream bit for bit from `starts` random positions in three epochs.

    `reopen` opens the source as a new process would, and is called for every start. The reference stream is read once,
    without workers, in batches of another size.
    """
    preprocess, augment = ImagePreprocess((16, 16)), Augment(crop=(0.3, 1.0), flip=0.5)
    split = reopen()
    end = NUM_EPOCHS * len(split)
    reference_batches = list(TrainLoader(split, preprocess, augment, seed=5).iterate_batches(0, end, 8))
    samples, images, labels = (
        torch.cat([batch[name] for batch in reference_batches]) for name in ("samples", "images", "labels")
    )
    assert len({image.numpy().tobytes() for image in images}) > 1
    assert len(samples.unique()) == len(split)
    for start in np.random.default_rng(workers).integers(0, end - 1, starts).tolist():
        stop = min(start + NUM_CHECKED_IMAGES, end)
        after = list(
            TrainLoader(reopen(), preprocess, augment, seed=5, workers=workers).iterate_batches(start, stop, BATCH_SIZE)
        )
        assert torch.equal(torch.cat([batch["samples"] for batch in after]), samples[start:stop]), start
        assert torch.equal(torch.cat([batch["labels"] for batch in after]), labels[start:stop]), start
        assert torch.equal(torch.cat([batch["images"] for batch in after]), images[start:stop]), start
