"""The verb `bench`: races over tasks, models and batch sizes."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from vitreous.apps.bench.contenders import TASKS, contenders, limits
from vitreous.apps.bench.race import race
from vitreous.apps.bench.report import Race
from vitreous.apps.bench.work import SIDE, Timing, Work
from vitreous.data.layouts.folder import list_images
from vitreous.errors import DataError, UsageError
from vitreous.models.names import configure
from vitreous.nn.sizes import nearby
from vitreous.system.machine import pick_device

GENERATING = ("dit", "sample")  # tasks of models that make images
TIMING = Timing()
FILES = ("loader", "predict")  # tasks that read photographs


def bench(
    tasks: Sequence[str] = ("inference", "train"),
    models: Sequence[str] = ("ViT-S/16",),
    batch_sizes: Sequence[int] = (16,),
    image_size: int | None = None,
    images: str | None = None,
    only: Sequence[str] = ("*",),
    timing: Timing = TIMING,
    device: str = "auto",
    on_round: Callable[[str, int, int, str], None] = lambda title, done, total, label: None,
) -> list[Race]:
    """Race whoever is installed and matches a pattern of `only` (`vitreous*`, `timm, best*`) at every task and size.

    `predict` takes all files at once, so it runs once a model. Raises UsageError for impossible options, DataError for
    a folder without images.
    """
    device = pick_device(device)
    wrong = [task for task in tasks if task not in TASKS]
    if wrong:
        raise UsageError(f"no task {', '.join(wrong)}", f"there are {', '.join(TASKS)}")
    if timing.rounds < 1 or timing.seconds <= 0 or min(batch_sizes, default=0) < 1:
        raise UsageError("rounds and batch sizes must be at least 1, seconds above 0")
    if timing.profile and device != "cpu":
        raise UsageError(f"--profile records what a CPU does, and this is {device}", "add --device cpu")
    if timing.profile:  # before a contender's process loads PyTorch, whose recorder tells stderr that there is no GPU
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    if set(tasks) & set(FILES):
        check_images(images)
    for task, model in itertools.product(tasks, models):
        check_model(task, model)
    works = []
    for task, model in itertools.product(tasks, models):
        size = (image_size or SIDE) if task == "memory" else size_of(model, image_size)
        counts = batch_sizes[:1] if task == "predict" else batch_sizes
        works += [
            Work(task, model, image_size=size, batch_size=count, device=device, images=images) for count in counts
        ]
    races = []
    for work in works:
        able = contenders(work.task, device)
        chosen = [c for c in able if any(fnmatchcase(c.label, f"{p}*") for p in only)]
        if not chosen:
            raise UsageError(f"nobody matches {', '.join(only)}", "they are " + "; ".join(c.label for c in able))
        bounds = limits(work.task, device)

        def tell(done: int, label: str, work: Work = work) -> None:
            on_round(work.title(), done, timing.rounds, label)

        lanes = race(work, [*bounds, *chosen], timing, tell)
        races.append(Race(work, lanes[len(bounds) :], lanes[: len(bounds)]))
    return races


def check_model(task: str, model: str) -> None:
    """Raise UsageError for a task of another kind of model."""
    if (task in GENERATING) != configure(model).generates_images:
        makes = "makes no images" if task in GENERATING else "makes images"
        hint = f"use --models DiT-S/2, or --tasks {'train' if task in GENERATING else 'dit'}"
        raise UsageError(f"the task {task} cannot be measured: {model} {makes}", hint)


def size_of(model: str, image_size: int | None) -> int:
    """Return the image size to measure at: as said, else the model's own. Raises UsageError for no multiple of the
    patch."""
    own = configure(model)
    if image_size is None:
        return own.image[0]
    if image_size % own.patch[0]:
        problem = f"image size {image_size} is not a multiple of patch {own.patch[0]} for {model}"
        raise UsageError(problem, f"use {nearby((image_size,) * 2, own.patch)[0]}")
    return image_size


def check_images(images: str | None) -> None:
    """Raise UsageError where no folder is named, DataError where it has no photographs."""
    if images is None:
        raise UsageError("loader and predict read photographs", "name a folder of them with --images")
    if not Path(images).is_dir() or not list_images(Path(images)):
        raise DataError(f"no images in {images}", "name a folder of photographs with --images")
