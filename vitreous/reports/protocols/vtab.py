"""The protocol `vtab`: a linear classifier on frozen features for each of the tasks of VTAB-1k
(arXiv:1910.04867)."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from vitreous.data.keys import draw_permutation
from vitreous.data.sources import open_data
from vitreous.data.split import Data
from vitreous.errors import DataError, UsageError, escape_unprintable
from vitreous.evaluation.linear import LabelledFeatures, fit_linear_classifier
from vitreous.evaluation.vtab import (
    DEV_IMAGES,
    TRAIN_IMAGES,
    VTAB_TASKS,
    VTABTask,
    average_by_group,
    map_to_task_classes,
)
from vitreous.inference.features import hash_split_images, model_cache_fields
from vitreous.reports.answers import EvaluationSettings
from vitreous.reports.protocols.answer_sets import normalise_class_name
from vitreous.reports.protocols.probes import sweep_l2_penalties
from vitreous.reports.protocols.task import ProtocolOptions, ProtocolTask, build_mean_report
from vitreous.reports.readings import build_evaluation_document, record_evaluation, slugify_name
from vitreous.system.disk import write_text_atomic
from vitreous.tasks.classification_metrics import evaluate_classification
from vitreous.tasks.features import FeatureExtraction
from vitreous.weights.bundle import Bundle

VTAB_CACHE_VERSION = 1  # increase if a code change alters results
TASK_NAME_PREFIX = re.compile(r"^(wds_)?(vtab_)?(1k_)?")


def evaluate_vtab(
    run: str,
    data: str | os.PathLike[str] | None,
    bundle: Bundle,
    options: ProtocolOptions,
    evaluation_settings: EvaluationSettings,
) -> dict[str, Any]:
    """Evaluate a model on the VTAB tasks in DATA/TASK, in any layout; the document lists missing tasks.

    A classifier is trained on 800 images of each task, and 200 images select the L2 penalty, unless --l2 sets it. The
    classifier is then trained on all 1,000 images, and top-1 is computed on the test split. Images are resized without
    cropping, as in the benchmark. Finished tasks are cached in RUN/vtab.json while model, data and options are
    unchanged. Raises UsageError if `data` is not a folder, DataError if no task is found or can be evaluated.
    """
    if data is None or not os.path.isdir(data):
        hint = f"name its subfolders {', '.join(VTAB_TASKS)}"
        raise UsageError("--protocol vtab needs a folder with a subfolder for each task", hint)
    start_time, root, listener = time.perf_counter(), Path(data), evaluation_settings.listener
    task_folders = find_task_folders(root)
    missing = [name for name in VTAB_TASKS if name not in task_folders]
    if not task_folders:
        raise DataError(f"{escape_unprintable(root)} has no VTAB task", f"name its folders {', '.join(VTAB_TASKS)}")
    if missing:
        listener.note(f"{len(missing)} of {len(VTAB_TASKS)} tasks are missing: {', '.join(missing)}")
    squashed = replace(bundle, preprocess=replace(bundle.preprocess, fit="squash"))
    cache_path = (
        Path(run) / "vtab.json" if os.path.isdir(run) else Path(f"vtab-{slugify_name(Path(run).stem)[:60]}.json")
    )
    tasks, failed = evaluate_vtab_tasks(
        run,
        squashed,
        task_folders=task_folders,
        cache_path=cache_path,
        options=options,
        evaluation_settings=evaluation_settings,
    )
    if not tasks:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in failed.items())
        raise DataError(f"none of the tasks in {escape_unprintable(root)} can be evaluated: {reasons}")
    averages = average_by_group({name: result["top1"] for name, result in tasks.items()})
    images, unreadable = (sum(result[key] for result in tasks.values()) for key in ("images", "unreadable"))
    report = build_mean_report(images, unreadable, averages["mean"])
    headline = {"protocol": "vtab", **averages}
    record_evaluation(run, os.fspath(data), "test", headline | {"tasks": len(tasks), **report.summary()})
    bundle, seconds = replace(squashed, task=FeatureExtraction()), time.perf_counter() - start_time
    extra = {"results": list(tasks.values()), "missing": missing, "failed": failed, "cache_file": os.fspath(cache_path)}
    return (
        build_evaluation_document(bundle, report, split="test", source=os.fspath(data), run=run, seconds=seconds)
        | headline
        | extra
    )


def find_task_folders(root: Path) -> dict[str, Path]:
    """Map each task to its subfolder of `root`, in the order of `VTAB_TASKS`; a subfolder may have any name of the
    task."""
    entries = [entry for entry in os.scandir(root) if entry.is_dir()]
    folders = {TASK_NAME_PREFIX.sub("", normalise_class_name(entry.name)): Path(entry.path) for entry in entries}
    folder_names = {
        name: next((n for n in (name, *task.names) if n in folders), "") for name, task in VTAB_TASKS.items()
    }
    return {name: folders[folder] for name, folder in folder_names.items() if folder}


def evaluate_vtab_tasks(
    run: str,
    bundle: Bundle,
    task_folders: dict[str, Path],
    cache_path: Path,
    options: ProtocolOptions,
    evaluation_settings: EvaluationSettings,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Evaluate each task that is not in the cache, and store it there.

    Returns the result of each task, and the error message of each failed task.
    """
    cached, done, failed = read_vtab_cache(cache_path), {}, {}
    cache_fields = model_cache_fields(bundle.model, bundle.preprocess, evaluation_settings.inference_options)
    for name, task_folder in task_folders.items():
        try:
            data, note = prepare_task_data(VTAB_TASKS[name], open_data(task_folder), options.seed)
            task = ProtocolTask(
                run,
                os.fspath(task_folder),
                data=data,
                split="test",
                bundle=bundle,
                options=options,
                evaluation_settings=evaluation_settings,
            )
            key = compute_task_key(cache_fields, task)
            if cached.get(name, {}).get("key") == key:
                evaluation_settings.listener.note(f"{name}: {cached[name]['top1']:.1%}, cached")
            else:
                cached[name] = {"task": name, "key": key, **evaluate_vtab_task(name, task, note)}
                write_text_atomic(cache_path, json.dumps(cached, indent=1, ensure_ascii=False) + "\n")
                evaluation_settings.listener.note(f"{name}: {cached[name]['top1']:.1%}")
            done[name] = cached[name]
        except (DataError, UsageError) as error:
            failed[name] = error.message
            evaluation_settings.listener.note(f"{name} cannot be evaluated: {error.message}")
    return done, failed


def read_vtab_cache(cache_path: Path) -> dict[str, Any]:
    """Read the results of finished tasks; an empty dict if the cache cannot be read."""
    try:
        document = json.loads(cache_path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return (
        {name: result for name, result in document.items() if isinstance(result, dict)}
        if isinstance(document, dict)
        else {}
    )


def compute_task_key(cache_fields: dict[str, Any], task: ProtocolTask) -> str:
    """Return a hash of everything that affects the result of a task: model, options and data."""
    key_fields: list[Any] = [
        VTAB_CACHE_VERSION,
        cache_fields,
        task.options.l2,
        task.options.seed,
        task.evaluation_settings.bad_images,
    ]
    for split in task.data.splits.values():
        key_fields += [hash_split_images(split), hashlib.sha256(split.labels.tobytes()).hexdigest()]
    return hashlib.sha256(json.dumps(key_fields, sort_keys=True).encode()).hexdigest()


def prepare_task_data(task: VTABTask, data: Data, seed: int) -> tuple[Data, str]:
    """Return data with the splits and classes of a VTAB task, and a note to log.

    The task's rule maps raw labels to classes. If the data have at most 800 `train` and 200 `val` images, these are
    used; otherwise 1,000 training images are drawn by the seed. Raises UsageError for multi-label data, DataError for
    labels that the task does not have.
    """
    data.label_kind.require_single_label("its images have several labels", "use single-label data")
    test, notes = data.split("test"), []
    train, dev = data.split("train"), data.splits.get("val")
    if dev is None or len(train) > TRAIN_IMAGES or len(dev) > DEV_IMAGES:
        pool = data.full_train_split or train
        samples = draw_permutation(len(pool), seed, 0)[: TRAIN_IMAGES + DEV_IMAGES]
        num_train = round(len(samples) * TRAIN_IMAGES / (TRAIN_IMAGES + DEV_IMAGES))
        train, dev = pool.take(samples[:num_train]), pool.take(samples[num_train:])
        notes.append(f"{len(samples)} of {len(pool)} training images drawn with seed {seed}, not the published ones")
    classes, class_map = data.classes, map_to_task_classes(task, data.classes)
    if class_map is not None:
        if class_map.min() < 0 or class_map.max() >= task.classes:
            labels = f"labels {classes[int(class_map.argmin())]} to {classes[int(class_map.argmax())]}"
            raise DataError(f"{labels} do not belong to the task's {task.classes} classes")
        classes = tuple(map(str, range(task.classes)))
        train, dev, test = (split.take(np.arange(len(split)), class_map[split.labels]) for split in (train, dev, test))
    if len(classes) != task.classes:
        notes.append(f"{len(classes)} classes instead of the task's {task.classes}")
    splits = {"train": train, "val": dev, "test": test}
    return replace(data, classes=classes, splits=splits, full_train_split=None, groups=None), "; ".join(notes)


def evaluate_vtab_task(name: str, task: ProtocolTask, note: str) -> dict[str, Any]:
    """Train and evaluate the classifier of a task. Returns its metrics, settings and sizes; `note` is logged."""
    start_time = time.perf_counter()
    if note:
        task.evaluation_settings.listener.note(f"{name}: {note}")
    train, dev, test = (task.features(f"{name} {split}", task.data.split(split)) for split in ("train", "val", "test"))
    labels = np.concatenate([task.data.split("train").labels, task.data.split("val").labels])
    is_readable = np.concatenate([train.is_readable, dev.is_readable])
    features = np.concatenate([train.features, dev.features])
    train_features = LabelledFeatures(
        features, labels, np.flatnonzero(is_readable), task.num_classes, device=task.device
    )
    l2, selection, is_dev = task.options.l2, None, train_features.sample_indices >= len(train.features)
    if not l2:
        fit_features, held_out = (
            train_features.with_rows(train_features.sample_indices[subset_mask]) for subset_mask in (~is_dev, is_dev)
        )
        l2, selection = sweep_l2_penalties(task, fit_features, held_out, f"{name} penalty")
    report = evaluate_classification(
        fit_linear_classifier(train_features, l2).logits(test.features),
        task.evaluated_split.labels,
        task.data.classes,
        test.is_readable,
    )
    return {
        "group": VTAB_TASKS[name].group,
        "data": task.source,
        "classes": task.num_classes,
        "train_images": len(train_features.sample_indices),
        "l2": l2,
        "held_out": selection,
        "note": note,
        "wall_seconds": time.perf_counter() - start_time,
        **report.summary(),
    }
