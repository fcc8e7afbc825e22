"""Zero-shot evaluation: the class names of a dataset are the labels of a classifier."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from dataclasses import replace

from vitreous.data.run_data import open_run_data
from vitreous.data.text_files import read_text
from vitreous.errors import DataError, UsageError
from vitreous.reports.options import EvaluateOptions
from vitreous.weights.options import WeightsSource


def label_dataset_classes(
    run: str | os.PathLike[str], data: str | os.PathLike[str] | None, split: str | None, options: EvaluateOptions
) -> str | os.PathLike[str]:
    """Return the source of the zero-shot classifier of a dataset's classes, or the run itself without
    `options.zero_shot`. Labels are class names with spaces instead of underscores, or those of `options.class_labels`.

    Raises UsageError for --calibrate, and for options of labels without `zero_shot`; DataError for a dataset without
    classes and for an invalid file of labels.
    """
    if not options.zero_shot:
        if options.templates or options.class_labels:
            raise UsageError("--templates and --class-labels need --zero-shot", "add --zero-shot, or leave them out")
        return run
    if options.calibrate:
        raise UsageError(
            "a zero-shot classifier has no bundle for the temperature of --calibrate",
            "save one first: vitreous convert MODEL OUT --labels LABEL...",
        )
    source, dataset = open_run_data(run, data, split)
    if not dataset.classes:
        raise DataError(f"{source} has no class names", "use a dataset for classification")
    labels = [name.replace("_", " ") for name in dataset.classes]
    if options.class_labels is not None:
        labels = read_class_labels(options.class_labels, dataset.classes)
    base = run if isinstance(run, WeightsSource) else WeightsSource(os.fspath(run))
    is_multilabel = next(iter(dataset.splits.values())).labels.ndim == 2
    return replace(
        base,
        labels=tuple(labels),
        templates=options.templates,
        multilabel=is_multilabel,
        class_names=tuple(dataset.classes),
    )


def read_class_labels(path: str | os.PathLike[str], classes: Sequence[str]) -> list[str]:
    """Read a CSV file with lines `class,label`, and return the label of each class. Raises DataError for a file that
    cannot be read, a line without two cells, and a class without a label."""
    labels: dict[str, str] = {}
    for number, cells in enumerate(csv.reader(io.StringIO(read_text(path))), 1):
        if cells and len(cells) != 2:
            raise DataError(
                f"{path}, line {number}: {len(cells)} cells instead of 2", "use lines such as: n02123045,tabby"
            )
        labels |= dict([(cells[0].strip(), cells[1].strip())] if cells else [])
    if missing := [name for name in classes if name not in labels]:
        raise DataError(f"{path} has no label for {missing[0]}", "add one line per class: class,label")
    return [labels[name] for name in classes]
