"""The verb `bench`: run races over tasks, models and batch sizes."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from vitreous.apps.bench.contenders import TASKS, list_contenders, list_limit_contenders
from vitreous.apps.bench.race import run_race
from vitreous.apps.bench.report import RaceResult
from vitreous.apps.bench.work import CIFAR_IMAGE_SIZE, Timing, Workload
from vitreous.data.layouts.folder import list_images
from vitreous.errors import DataError, UsageError
from vitreous.models.names import config_from_name
from vitreous.nn.sizes import nearest_divisible_size
from vitreous.system.machine import pick_device

GENERATIVE_TASKS = ("dit", "sample")  # tasks of generative models
DEFAULT_TIMING = Timing()
IMAGE_FILE_TASKS = ("loader", "predict")  # tasks that read photographs


def run_benchmarks(
    tasks: Sequence[str] = ("inference", "train"),
    models: Sequence[str] = ("ViT-S/16",),
    batch_sizes: Sequence[int] = (16,),
    image_size: int | None = None,
    images: str | None = None,
    only: Sequence[str] = ("*",),
    timing: Timing = DEFAULT_TIMING,
    device: str = "auto",
    on_round: Callable[[str, int, int, str], None] = lambda title, done, total, label: None,
) -> list[RaceResult]:
    """Run a race for every task, model and batch size among the installed contenders that match a pattern of `only`,
    such as `vitreous*` or `timm, best*`.

    `predict` processes all files in one call, so it runs once per model. `on_round` receives the title of the race, the
    finished rounds, all rounds, and the contender's label. Raises UsageError for unsupported options, DataError for a
    folder without images.
    """
    device = pick_device(device)
    unknown_tasks = [task for task in tasks if task not in TASKS]
    if unknown_tasks:
        raise UsageError(f"unknown task {', '.join(unknown_tasks)}", f"use {', '.join(TASKS)}")
    if timing.rounds < 1 or timing.seconds <= 0 or min(batch_sizes, default=0) < 1:
        values = f"{timing.rounds}, {min(batch_sizes, default=0)} and {timing.seconds:g}"
        raise UsageError(f"--rounds and --batch-sizes must be at least 1, and --seconds above 0, not {values}")
    if timing.profile and device != "cpu":
        raise UsageError(f"--profile supports only the CPU, not {device}", "add --device cpu")
    if timing.profile:  # must precede the import of PyTorch, whose profiler logs missing GPUs to stderr
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    if set(tasks) & set(IMAGE_FILE_TASKS):
        require_photographs(images)
    for task, model in itertools.product(tasks, models):
        check_task_model(task, model)
    workloads = []
    for task, model in itertools.product(tasks, models):
        size = (image_size or CIFAR_IMAGE_SIZE) if task == "memory" else choose_image_size(model, image_size)
        task_batch_sizes = batch_sizes[:1] if task == "predict" else batch_sizes
        workloads += [
            Workload(task, model, image_size=size, batch_size=batch_size, device=device, images=images)
            for batch_size in task_batch_sizes
        ]
    races = []
    for workload in workloads:
        available = list_contenders(workload.task, device)
        selected = [
            contender for contender in available if any(fnmatchcase(contender.label, f"{pattern}*") for pattern in only)
        ]
        if not selected:
            raise UsageError(
                f"no contender matches {', '.join(only)}",
                "use " + "; ".join(contender.label for contender in available),
            )
        limits = list_limit_contenders(workload.task, device)

        def report_round(done: int, label: str, workload: Workload = workload) -> None:
            """Report a finished round of this race to `on_round`."""
            on_round(workload.title(), done, timing.rounds, label)

        results = run_race(workload, [*limits, *selected], timing, report_round)
        races.append(RaceResult(workload, results[len(limits) :], results[: len(limits)]))
    return races


def check_task_model(task: str, model: str) -> None:
    """Raise UsageError if the task needs a generative model and `model` is not one, or the reverse."""
    if (task in GENERATIVE_TASKS) != config_from_name(model).generates_images:
        mismatch = "is not generative" if task in GENERATIVE_TASKS else "is generative"
        hint = f"use --models DiT-S/2, or --tasks {'train' if task in GENERATIVE_TASKS else 'dit'}"
        raise UsageError(f"the task {task} cannot be measured: {model} {mismatch}", hint)


def choose_image_size(model: str, image_size: int | None) -> int:
    """Return `image_size`, or the model's image size if it is None. Raises UsageError if the patch size does not divide
    it."""
    model_config = config_from_name(model)
    if image_size is None:
        return model_config.image[0]
    if image_size % model_config.patch[0]:
        problem = f"image size {image_size} is not divisible by patch size {model_config.patch[0]} ({model})"
        nearest = nearest_divisible_size((image_size,) * 2, model_config.patch)[0]
        raise UsageError(problem, f"use --image-size {nearest}")
    return image_size


def require_photographs(images: str | None) -> None:
    """Raise UsageError if no folder of photographs is set, DataError if the folder has no images."""
    if images is None:
        raise UsageError("the tasks loader and predict need photographs", "add --images FOLDER")
    if not Path(images).is_dir() or not list_images(Path(images)):
        raise DataError(f"no images in {images}", "use another folder with --images")
