"""vitreous at work, as its verbs do it."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn

from vitreous.bench.work import Turn, Work
from vitreous.data.augment import Augment
from vitreous.data.layouts.folder import list_images
from vitreous.data.loader import Feed
from vitreous.data.preprocess import HALF, Preprocess
from vitreous.data.split import Files
from vitreous.evaluation.engine import How, make_engine
from vitreous.machine import DTYPES, default_workers, pick_precision, settle_allocator
from vitreous.models.zoo import Model, create
from vitreous.objectives.supervised import Supervised
from vitreous.serving.predict import load
from vitreous.training.flat import Flat
from vitreous.training.optimizer import Optimizers
from vitreous.training.peak import synchronise
from vitreous.training.run import Optimizer
from vitreous.training.shards import Shards, default_shards
from vitreous.weights.bundle import Bundle

CLASSES = 1000


def answering(work: Work) -> tuple[Model, Preprocess]:
    """A model with random weights whose answers differ, and its preprocessing."""
    torch.manual_seed(0)
    model = create(work.model, work.image_size, CLASSES)
    nn.init.normal_(model.head.weight, std=0.02)  # type: ignore[arg-type]
    return model, Preprocess((work.image_size, work.image_size), share=0.9)


def inference(work: Work, precision: str = "auto", engine: str = "auto") -> Turn:
    """Bytes to logits."""
    pixels = torch.randint(0, 256, (work.batch_size, 3, work.image_size, work.image_size), dtype=torch.uint8)
    made = make_engine(*answering(work), How(work.device, precision, engine), lambda: pixels[torch.arange(32) % len(pixels)])

    def turn() -> float:
        made(pixels)
        return work.batch_size

    return turn


def train(work: Work, precision: str = "auto", shards: int | None = None) -> Turn:
    """Forward, backward, clipping, AdamW: a step of the loop."""
    settle_allocator()
    torch.manual_seed(0)
    dtype, device = DTYPES[pick_precision(precision, work.device)], torch.device(work.device)
    objective = Supervised(create(work.model, work.image_size, CLASSES))
    flat = Flat(objective, dtype, device, shards=shards or default_shards(work.device, work.batch_size))
    optimizers, compute = Optimizers(Optimizer(), flat), Shards(objective, flat)
    images = torch.randn(work.batch_size, 3, work.image_size, work.image_size, device=device).to(dtype)
    batch = {"images": images, "labels": torch.randint(0, CLASSES, (work.batch_size,), device=device)}

    def turn() -> float:
        flat.zero()
        compute.backward(batch, 1.0)
        flat.collect()
        flat.clip(1.0)
        optimizers.step(1.0)
        flat.publish(1)
        synchronise(work.device)
        return work.batch_size

    return turn


def predict(work: Work, precision: str = "auto") -> Turn:
    """Files to names and probabilities, the model already loaded."""
    files, (model, preprocess) = list_images(Path(work.images or ".")), answering(work)
    with tempfile.TemporaryDirectory() as scratch:
        Bundle(model, tuple(map(str, range(CLASSES))), preprocess).save(Path(scratch) / "model")
        predictor = load(Path(scratch) / "model", How(work.device, precision))

    def turn() -> float:
        return len(predictor.predict(files))

    return turn


def loader(work: Work) -> Turn:
    """Files to augmented batches: random resized crop and flip, decoded by as many processes as there are cores."""
    files = list_images(Path(work.images or "."))
    split = Files(files, np.zeros(len(files), dtype=np.int64))
    preprocess = Preprocess((work.image_size, work.image_size), mean=HALF[0], std=HALF[1])
    feed = Feed(split, preprocess, Augment(crop=(0.08, 1.0), flip=0.5), 0, default_workers())
    batches = feed.batches(0, 20_000 * work.batch_size, work.batch_size)

    def turn() -> float:
        return len(preprocess.normalise(next(batches)["images"]))

    return turn
