"""The target datasets of a study: those of --to, or subsets of the digits dataset, written as images.

Then pre-training uses the digits 0 to 4. The target datasets use the digits 5 to 9, labelled by value or as odd and
even, upright or rotated by 90 degrees.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vitreous.apps.studies.study import OtherDataset, Study
from vitreous.errors import DataError, UsageError, escape_unprintable
from vitreous.system.disk import remove_path

FIRST_DIGITS, DIGITS_VAL_SHARE = "0-4", 0.4  # pre-training subset; validation share of each class
#: target datasets: name, group, and rotation of the images in quarter turns
DIGIT_SUBSETS = (
    ("5-9", "upright", 0),
    ("5-9 turned", "turned", 1),
    ("odd or even", "upright", 0),
    ("odd or even turned", "turned", 1),
)


@dataclass(frozen=True)
class StudyData:
    """The training dataset of a study, in a form that `train` accepts, and its target datasets."""

    data: str
    other_datasets: tuple[OtherDataset, ...] = ()


def resolve_study_data(study: Study, data: str, dataset_specs: tuple[str, ...], parent_folder: Path) -> StudyData:
    """Resolve the training dataset and the target datasets of a study. `dataset_specs` are NAME=SOURCE or SOURCE; for
    studies of groups, folders of datasets. Without them, subsets of `digits` are written below `parent_folder`.

    Raises UsageError for missing or unsupported target datasets and duplicate names, DataError for a group without
    datasets.
    """
    if not study.other_data_kind:
        if dataset_specs:
            raise UsageError(f"the study {study.name} has no target datasets", "remove --to")
        return StudyData(data)
    if dataset_specs:
        return StudyData(
            data,
            parse_named_datasets(dataset_specs)
            if study.other_data_kind == "sets"
            else list_group_datasets(dataset_specs),
        )
    if data != "digits":
        example = "pets/ flowers/" if study.other_data_kind == "sets" else "vtab/natural vtab/structured"
        raise UsageError(f"the study {study.name} needs target datasets as well as {data}", f"add --to {example}")
    subsets = DIGIT_SUBSETS if study.other_data_kind == "groups" else DIGIT_SUBSETS[:2]
    return StudyData(
        write_digit_subset(parent_folder, FIRST_DIGITS, 0),
        tuple(
            OtherDataset(name, write_digit_subset(parent_folder, name, quarters), group)
            for name, group, quarters in subsets
        ),
    )


def parse_named_datasets(dataset_specs: tuple[str, ...], group: str = "") -> tuple[OtherDataset, ...]:
    """Parse datasets from NAME=SOURCE or SOURCE; the default name is that of the source's folder. Raises UsageError for
    duplicate names."""
    datasets = []
    for spec in dataset_specs:
        name, equals, source = spec.partition("=")
        source = source if equals else spec
        datasets.append(OtherDataset(name if equals else Path(source).name or source, os.fspath(source), group))
    duplicates = {dataset.name for dataset in datasets if [entry.name for entry in datasets].count(dataset.name) > 1}
    if duplicates:
        raise UsageError(f"--to has two datasets called {min(duplicates)}", "name them: --to NAME=FOLDER NAME=FOLDER")
    return tuple(datasets)


def list_group_datasets(dataset_specs: tuple[str, ...]) -> tuple[OtherDataset, ...]:
    """List the datasets in folders; each folder is a group of datasets. Raises DataError for a folder without
    datasets."""
    datasets: list[OtherDataset] = []
    for spec in dataset_specs:
        name, equals, folder = spec.partition("=")
        root = Path(folder if equals else spec)
        folders = sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
        if not folders:
            problem = f"{escape_unprintable(root)} contains no folders of datasets"
            raise DataError(problem, "use folders of datasets in --to, one per group")
        datasets += parse_named_datasets(tuple(map(os.fspath, folders)), name if equals else root.name)
    return tuple(datasets)


def write_digit_subset(parent_folder: Path, subset: str, quarters: int) -> str:
    """Write a subset of the digits, rotated by `quarters` times 90 degrees, as images in train/ and val/, and return
    its folder. An existing folder is kept."""
    from PIL import Image

    from vitreous.data.holdout import draw_stratified_splits
    from vitreous.data.layouts.named import load_digits_table

    folder = parent_folder / f"digits-{subset.replace(' ', '-')}"
    if folder.is_dir():
        return os.fspath(folder)
    table = load_digits_table()
    table = table[table[:, -1] < 5] if subset == FIRST_DIGITS else table[table[:, -1] >= 5]
    pixels = np.rint(np.rot90(table[:, :-1].reshape(-1, 8, 8), quarters, (1, 2)) * (255 / 16)).astype(np.uint8)
    labels = table[:, -1].astype(np.int64)
    names = np.where(labels % 2, "odd", "even") if subset.startswith("odd") else labels.astype(str)
    temporary = folder.with_name(f".{folder.name}.tmp")  # not synced, since it can be regenerated
    remove_path(temporary)
    for split, indices in draw_stratified_splits(labels, 0, {"val": DIGITS_VAL_SHARE}).items():
        for index in indices.tolist():
            class_folder = temporary / split / str(names[index])
            class_folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels[index]).save(class_folder / f"{index:04d}.png")
    temporary.rename(folder)
    return os.fspath(folder)
