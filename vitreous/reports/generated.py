"""A model that makes images, judged: how near its images come to those of a split, in a feature space that is named."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitreous.cores import default_workers
from vitreous.data.loader import EvalLoader
from vitreous.data.preprocess import Preprocess
from vitreous.data.split import Arrays, Split
from vitreous.disk import atomic_path
from vitreous.errors import DataError, UsageError, VitreousError
from vitreous.evaluation.engine import logits_of, make_engine
from vitreous.evaluation.features import features_of
from vitreous.evaluation.frechet import copies, density_coverage, frechet_distance, precision_recall
from vitreous.evaluation.sampling import ImageSampler
from vitreous.generation.settings import SamplingOptions, in_turn
from vitreous.progress import Listener
from vitreous.reports.answers import Computing, progress_counter
from vitreous.reports.opening import choose_split, data_for, open_bundle, open_generator
from vitreous.reports.pages.picture_grid import SAMPLES_FILE, grid_of, picture_of
from vitreous.reports.readings import record
from vitreous.training.folder import Folder
from vitreous.weights.bundle import Bundle
from vitreous.weights.tasks import Generation

PIXELS = "pixels"
SAMPLES = 1000
SHOWN, GUIDANCE = 8, 1.5  # of a run that has ended: classes, and images of each
LEAST = 10  # real images
Featurise = Callable[[np.ndarray], np.ndarray]  # (n, H, W, C) uint8 -> (n, d) float32


@dataclass(frozen=True)
class GenerationOptions(SamplingOptions):
    """How a generator is judged: by so many `samples`, evenly of all classes, in a feature space, `pixels` or that of a
    run, a bundle or weights. Raises UsageError for too few samples."""

    samples: int = SAMPLES
    features: str = PIXELS

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 2 <= self.samples <= 1_000_000:
            raise UsageError(f"--samples must be 2 to 1,000,000, not {self.samples}")


def judge_generator(
    run: str | os.PathLike[str],
    data: str | os.PathLike[str] | None,
    split: str | None,
    options: GenerationOptions,
    computing: Computing,
) -> dict[str, Any]:
    """Make images and compare them with those of a split, of `data` or of the run's own; returns the document of
    `evaluate --json`.

    `frechet_distance_of_train` is that of the split to as many training images, by which the distance is to be read.
    `recognised`: the share of images whose class the model of the features names, where it knows the classes. Raises
    UsageError, DataError and WeightsError as `evaluate`.
    """
    began, listener = time.perf_counter(), computing.listener
    bundle = open_generator(run, listener.note)
    source, opened = data_for(run, data, split, labelled=False)
    name = choose_split(opened, split, listener.note)
    real = images_of(opened.split(name), bundle.preprocess, computing)
    train = images_of(opened.splits["train"], bundle.preprocess, computing) if "train" in opened.splits else None
    if len(real) < LEAST:
        raise DataError(f"{len(real)} images are too few to compare with", f"at least {LEAST} are needed")
    labels, images = make_images(bundle, options, computing)
    space, featurise, judge = feature_space(options.features, computing)
    ours, theirs = featurise(images), featurise(real)
    precision, recall = precision_recall(theirs, ours)
    density, coverage = density_coverage(theirs, ours)
    figures: dict[str, float | None] = {
        "frechet_distance": frechet_distance(theirs, ours),
        "frechet_distance_of_train": None,
        "precision": precision,
        "recall": recall,
        "density": density,
        "coverage": coverage,
        "copies": None,
        "recognised": judge(images, labels, bundle.generated_classes) if judge else None,
    }
    if train is not None and name != "train":
        of_train = featurise(train)
        as_many = np.linspace(0, len(of_train) - 1, min(len(of_train), len(ours))).astype(np.int64)
        figures["frechet_distance_of_train"] = frechet_distance(theirs, of_train[as_many])
        figures["copies"] = copies(of_train, ours)[0]
    judged = {**figures, "images": len(real), "samples": len(images), "features": space, "dimensions": ours.shape[1]}
    judged |= {"leading": "frechet_distance", "better": "lower"}
    sampler, steps = options.sampler_of(bundle.task.process)  # type: ignore[union-attr]
    ways = {"guidance": options.guidance, "sampler": sampler, "steps": steps, "seed": options.seed}
    if (Path(run) / "config.yaml").is_file():
        record(Path(run), source, name, judged | ways)
    document = {"run": os.fspath(run), "data": source, "split": name, name: judged, **ways}
    return {**document, "seconds": time.perf_counter() - began}


def sampler_of(bundle: Bundle, device: str = "auto", precision: str = "auto") -> ImageSampler:
    """The sampler of a bundle as `open_generator` gives it. Raises UsageError for a device or a precision that there is
    not."""
    task = bundle.task
    assert isinstance(task, Generation), "open_generator refuses others"
    return ImageSampler(bundle.model, task.process, len(task.classes), bundle.preprocess, device, precision)


def images_of(split: Split, preprocess: Preprocess, computing: Computing) -> np.ndarray:
    """(n, H, W, C) uint8: the images of a split as the generator was shown them. Raises the first DataError."""
    images: list[torch.Tensor] = []
    workers = default_workers() if computing.workers is None else computing.workers
    for _, batch in EvalLoader(split, preprocess, workers).batches(computing.batch_size):
        for image in batch:
            if isinstance(image, DataError):
                if computing.bad_images == "stop":
                    raise image
            else:
                images.append(image)
    if not images:
        raise DataError("no image of the split can be read")
    return torch.stack(images).movedim(1, -1).numpy()


def make_images(bundle: Bundle, options: GenerationOptions, computing: Computing) -> tuple[np.ndarray, np.ndarray]:
    """-> (m,) int64 classes in turn, and (m, H, W, C) uint8 images of them."""
    labels, numbers = torch.tensor(in_turn(options.samples, len(bundle.generated_classes))).unbind(1)
    sampler = sampler_of(bundle, computing.how.device, computing.how.precision)
    step, done = progress_counter(computing.listener, "sample", options.samples), [0.0]

    def count(images: float) -> None:
        before, done[0] = int(done[0]), done[0] + images
        step(int(done[0]) - before)

    images = sampler.sample(labels, numbers, options, count)
    return labels.numpy(), images.movedim(1, -1).numpy()


def feature_space(
    features: str, computing: Computing
) -> tuple[str, Featurise, Callable[[np.ndarray, np.ndarray, tuple[str, ...]], float | None] | None]:
    """-> the name of a space, what turns images (n, H, W, C) uint8 into features (n, d) of it, and of a model that
    names classes what says which share of images is recognised."""
    if features == PIXELS:
        return PIXELS, lambda images: images.reshape(len(images), -1).astype(np.float32) / 255, None
    bundle = open_bundle(features, headless=True, note=computing.listener.note)
    of_arrays = partial(features_of, bundle.model, bundle.preprocess, how=computing.how, workers=0, keep=False)

    def featurise(images: np.ndarray) -> np.ndarray:
        return np.array(of_arrays(as_split(images)).rows)

    def recognise(images: np.ndarray, labels: np.ndarray, classes: tuple[str, ...]) -> float | None:
        if not classes or not set(classes) <= set(bundle.classes):
            return None
        engine = make_engine(bundle.model, bundle.preprocess, computing.how)
        logits, _ = logits_of(engine, EvalLoader(as_split(images), bundle.preprocess))
        order = [bundle.classes.index(one) for one in classes]
        return float((logits[:, order].argmax(1) == labels).mean())

    return os.fspath(features), featurise, recognise if bundle.classes else None


def write_samples(folder: Folder, listener: Listener) -> None:
    """Write `SHOWN` images of each of as many classes of a run that has ended to its samples.png, a row for each class.
    A failure is noted and raises nothing."""
    try:
        bundle = open_generator(folder.path)
        last = max(0, len(bundle.generated_classes) - 1)
        classes = np.unique(np.linspace(0, last, SHOWN).astype(np.int64))
        labels, numbers = torch.from_numpy(classes).repeat_interleave(SHOWN), torch.arange(SHOWN).repeat(len(classes))
        images = sampler_of(bundle).sample(labels, numbers, SamplingOptions(guidance=GUIDANCE)).movedim(1, -1).numpy()
        grid = grid_of([picture_of(image) for image in images], SHOWN)
        with atomic_path(folder.path / SAMPLES_FILE) as temporary:
            grid.save(temporary, "PNG")
    except (OSError, VitreousError) as error:
        listener.note(f"no {SAMPLES_FILE}: {error}")


def as_split(images: np.ndarray) -> Arrays:
    """Images (n, H, W, C) uint8 as a split without labels."""
    pixels = images[..., 0] if images.shape[-1] == 1 else images
    return Arrays(pixels, np.zeros((len(images), 0), np.float32))
