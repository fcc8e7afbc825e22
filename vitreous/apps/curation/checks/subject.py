"""The images that `data check` reads: the splits of a dataset, or the images of a folder without a known layout."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from vitreous.apps.curation.checks.pairs import keep_images_of_pairs, summarise_pairs
from vitreous.apps.curation.copies.scan import ConcatenatedSplits
from vitreous.data.annotations.learnable import find_unlearnable
from vitreous.data.annotations.masks import MaskAnnotations
from vitreous.data.annotations.target import AnnotatedFiles, get_sample_axes, get_sample_noun
from vitreous.data.decoding.clips import GIF_SUFFIX, VIDEO_SUFFIXES
from vitreous.data.decoding.decode import IMAGE_FILE_SUFFIXES
from vitreous.data.decoding.volumes import VOLUME_ONLY_SUFFIXES
from vitreous.data.exclusions import restore_original_splits
from vitreous.data.grouping import SHARED_GROUPS_NOTE, compile_group_pattern, extract_group_keys, find_shared_groups
from vitreous.data.layouts.folder import list_images
from vitreous.data.layouts.video import ClipFiles
from vitreous.data.layouts.volumes import SUFFIXES_BY_AXES, ArrayFiles
from vitreous.data.sources import find_inner_source, open_by_layout
from vitreous.data.split import FileSplit, Split, create_empty_labels
from vitreous.data.values import are_measurements, with_targets
from vitreous.errors import DataError, escape_unprintable

LOOSE_SPLIT = "images"  # name of the only split of a folder that is not a dataset
ANNOTATION_SUFFIXES = (".json", ".xml", ".txt", ".csv", ".yaml", ".yml")  # annotation files


@dataclass(frozen=True)
class CheckedDataset:
    """A dataset to check, with its splits as stored: no validation split is drawn from the training images.

    `open_error` is the error of opening a source that is not a dataset. `unlabelled` is the error of training on images
    without labels, and thus without classes. `unlearnable` is the error of training on these annotations. Each is None
    if it does not apply.
    """

    name: str
    source: str
    splits: dict[str, Split]
    classes: tuple[str, ...]
    notes: list[str] = field(default_factory=list)
    open_error: DataError | None = None
    unlabelled: DataError | None = None
    unlearnable: DataError | None = None
    column: str | None = None  # table column with the group of each image
    targets: tuple[str, ...] = ()  # names of numeric targets instead of classes
    pairs: dict[str, Any] | None = None  # summary of image-text pairs, whose images are in the splits once

    @cached_property
    def pool(self) -> ConcatenatedSplits:
        """Return the images of all splits, one split after the other. An index into the pool identifies an image."""
        return ConcatenatedSplits(self.splits.values())

    def locate_sample(self, pool_index: int) -> tuple[str, int]:
        """Return the split name and the index in that split of an image of the pool."""
        split_index, sample = self.pool.locate_sample(pool_index)
        return list(self.splits)[split_index], sample

    def describe_label(self, name: str, sample: int) -> str:
        """Format the label of an image: its class, several classes joined by `|`, or its target values. Return an empty
        string without labels."""
        if self.targets:
            values = self.splits[name].labels[sample].tolist()
            return ", ".join(f"{target} {value:.6g}" for target, value in zip(self.targets, values, strict=False))
        if not self.classes:
            return ""
        label = self.splits[name].labels[sample]
        return "|".join(self.classes[i] for i in (np.flatnonzero(label) if np.ndim(label) else [int(label)]))

    def labels_differ(self, locations: list[tuple[str, int]], tolerance: float = 0.0) -> bool:
        """Return whether the images at (split name, index) `locations` have different classes, or target values more
        than `tolerance` standard deviations apart."""
        if not self.targets:
            return len({self.describe_label(*location) for location in locations}) > 1
        values = np.array([self.splits[name].labels[sample] for name, sample in locations if self.has_values(name)])
        if len(values) < 2:
            return False
        with np.errstate(invalid="ignore"):
            value_ranges = np.fmax.reduce(values) - np.fmin.reduce(values)
        return bool((value_ranges > tolerance * self.target_stds).any())

    def has_values(self, name: str) -> bool:
        """Return whether a split contains values of the numeric targets."""
        return self.splits[name].labels.shape[1] > 0

    @cached_property
    def target_stds(self) -> np.ndarray:
        """Return the (T,) standard deviations of the target values over all images."""
        values = [split.labels for name, split in self.splits.items() if self.has_values(name)]
        return np.nanstd(np.concatenate(values), 0)

    def count_classes(self, name: str) -> np.ndarray:
        """Count the images of each class in a split, (K,)."""
        labels = self.splits[name].labels
        return labels.sum(0).astype(np.int64) if labels.ndim == 2 else np.bincount(labels, minlength=len(self.classes))


def open_checked_dataset(
    source: str,
    split: str | None = None,
    group_by: str | None = None,
    axes: int | None = None,
    ignore_index: int | None = None,
    targets: tuple[str, ...] = (),
) -> CheckedDataset:
    """Open a dataset to check, or only its split `split`. `group_by` is the table column with the group of each image.
    `axes`, `ignore_index` and `targets` are those of `open_data`. Raises DataError if there are no images, or no such
    column."""
    try:
        data = open_by_layout(source, 0, group_by, axes=axes, ignore_index=ignore_index, targets=targets)
        if not targets and are_measurements(data):
            targets = (data.label_column,)
        data = with_targets(data, targets, 0)
    except DataError as error:
        paths = list_images(Path(source)) if Path(source).is_dir() else []
        if not paths:
            raise
        return CheckedDataset(
            escape_unprintable(source),
            source,
            {LOOSE_SPLIT: FileSplit(paths, create_empty_labels(len(paths)))},
            (),
            open_error=error,
        )
    splits, open_error, notes = restore_original_splits(data), None, list(data.notes)
    if data.unread_annotations is not None:
        notes.append(f"the annotations in {data.unread_annotations} are not used: `train` needs --recipe")
    if split is not None:
        splits = {split: data.split(split)}
    elif data.unsplit and not data.labelled:
        if data.unlabelled is not None and find_inner_source(Path(source)) is not None:
            open_error = data.unlabelled  # this error contains the source
        noun = get_sample_noun(splits["train"])
        splits = {LOOSE_SPLIT if noun == "images" else noun: splits["train"]}
    return CheckedDataset(
        data.name,
        source,
        splits=keep_images_of_pairs(splits),
        classes=tuple(map(escape_unprintable, data.classes)),
        notes=notes,
        open_error=open_error,
        unlabelled=data.unlabelled if open_error is None else None,
        unlearnable=find_unlearnable(data) if split is None else None,
        column=data.group_column,
        targets=data.targets,
        pairs=summarise_pairs(splits),
    )


def find_leaking_groups(subject: CheckedDataset, group_by: str | None) -> list[dict[str, object]]:
    """Find groups with images in more than one split: one entry per pair of splits, with the number of groups and their
    names. Raises the errors of `vitreous.data.grouping`."""
    notes = [note for note in subject.notes if SHARED_GROUPS_NOTE in note]
    if group_by in (None, subject.column):
        return [{"splits": [], "groups": int(note.split()[0]), "names": []} for note in notes]
    pattern = compile_group_pattern(group_by)
    keys = {name: extract_group_keys(split, pattern, subject.source) for name, split in subject.splits.items()}
    return [
        {"splits": list(pair), "groups": len(names), "names": names} for pair, names in find_shared_groups(keys).items()
    ]


def count_unused_files(subject: CheckedDataset) -> tuple[dict[str, int], dict[str, str]]:
    """Count the files below the dataset's folder that it does not use: `images` for images or clips outside of the
    layout, and other files by suffix, except annotations.

    Also return the first example of both: `ignored_images` and `ignored_files`.
    """
    if not (listing := list_folder_files(subject)):
        return {}, {}
    images, other_files, used_paths = listing
    count = len(images) - len(used_paths)
    outside_images = sorted(set(images) - used_paths) if count > 0 else []
    examples = {
        "ignored_images": outside_images[:1],
        "ignored_files": sorted(file for files in other_files.values() for file in files)[:1],
    }
    counts = {**({"images": count} if count > 0 else {}), **{key: len(files) for key, files in other_files.items()}}
    return counts, {key: escape_unprintable(files[0]) for key, files in examples.items() if files}


def list_folder_files(subject: CheckedDataset) -> tuple[list[str], dict[str, list[str]], set[str]] | None:
    """List the files below the dataset's folder as absolute paths: images or clips; other files by suffix, except
    annotations; and the images, masks and clips that the splits use. None for data that are not files of a folder."""
    root = Path(subject.source)
    splits = [split for split in subject.splits.values() if isinstance(split, FileSplit)]
    if not root.is_dir() or len(splits) < len(subject.splits):
        return None
    other_files, images = defaultdict[str, list[str]](list), list[str]()
    used_paths = {os.path.abspath(path) for split in splits for path in map(str, split.paths)}
    suffixes = (
        *IMAGE_FILE_SUFFIXES,
        *(VOLUME_ONLY_SUFFIXES if any(get_sample_axes(split) == 3 for split in splits) else ()),
    )
    for split in splits:
        suffixes = tuple(SUFFIXES_BY_AXES[split.axes]) if isinstance(split, ArrayFiles) else suffixes
    clips = any(isinstance(split, ClipFiles) for split in splits)
    suffixes = (GIF_SUFFIX, *VIDEO_SUFFIXES) if clips else suffixes
    for location, folders, files in os.walk(root.absolute()):
        folders[:] = [name for name in folders if not name.startswith(".")]
        if clips and location in used_paths:  # a folder of frames
            images.append(location)
            continue
        for name in files:
            if name.lower().endswith(suffixes) and not name.startswith("."):
                images.append(os.path.join(location, name))
            else:
                other_files[escape_unprintable(os.path.splitext(name)[1].lower()) or "no suffix"].append(
                    os.path.join(location, name)
                )
    annotation_stores = [split.annotations for split in splits if isinstance(split, AnnotatedFiles)]
    for suffix in ANNOTATION_SUFFIXES if annotation_stores else ():
        other_files.pop(suffix, None)
    masks = (
        location
        for annotation_store in annotation_stores
        if isinstance(annotation_store, MaskAnnotations)
        for files in annotation_store.files
        for location in files
    )
    return images, dict(sorted(other_files.items())), used_paths | set(map(os.path.abspath, masks))
