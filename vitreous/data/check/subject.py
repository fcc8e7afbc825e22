"""The images to check: the splits of a data set, or the images of a folder that is not one."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from vitreous.data.annotations.learnable import find_unlearnable
from vitreous.data.annotations.masks import MaskFiles
from vitreous.data.annotations.target import AnnotatedFiles, axes_of, kind_of
from vitreous.data.copies.listing import as_made
from vitreous.data.copies.scan import Joined
from vitreous.data.decoding.clips import GIF, VIDEOS
from vitreous.data.decoding.decode import SUFFIXES
from vitreous.data.decoding.volumes import OWN
from vitreous.data.grouping import PARTED, expression, keys_of, straddling
from vitreous.data.layouts.folder import list_images
from vitreous.data.layouts.video import ClipFiles
from vitreous.data.layouts.volumes import ENDINGS, ArrayFiles
from vitreous.data.sources import detect_layout
from vitreous.data.split import Files, Split, no_labels
from vitreous.errors import DataError, printable

LOOSE = "images"  # the split of a folder that is not a data set
ANNOTATIONS = (".json", ".xml", ".txt", ".csv", ".yaml", ".yml")  # files that say what is where


@dataclass(frozen=True)
class Subject:
    """Splits by name, as the user made them: what `train` would draw from the training images is not drawn.

    `refused` is why the source is not a data set, `unlabelled` why its images have no labels, and thus no classes,
    `unlearnable` why nothing of their annotations can be learned.
    """

    name: str
    source: str
    splits: dict[str, Split]
    classes: tuple[str, ...]
    notes: list[str] = field(default_factory=list)
    refused: DataError | None = None
    unlabelled: DataError | None = None
    unlearnable: DataError | None = None
    column: str | None = None  # of a table, that names the group of each image

    @cached_property
    def pool(self) -> Joined:
        """All images, one split after the other."""
        return Joined(self.splits.values())

    def place(self, row: int) -> tuple[str, int]:
        """The split and the sample in it of a row of all images."""
        part, sample = self.pool.place(row)
        return list(self.splits)[part], sample

    def class_of(self, name: str, sample: int) -> str:
        """The class of an image, several with `|` between them; an empty string where there are no classes."""
        if not self.classes:
            return ""
        label = self.splits[name].labels[sample]
        return "|".join(self.classes[i] for i in (np.flatnonzero(label) if np.ndim(label) else [int(label)]))

    def counts(self, name: str) -> np.ndarray:
        """(K,) images of each class in a split."""
        labels = self.splits[name].labels
        return labels.sum(0).astype(np.int64) if labels.ndim == 2 else np.bincount(labels, minlength=len(self.classes))


def open_subject(
    source: str,
    split: str | None = None,
    group_by: str | None = None,
    axes: int | None = None,
    ignore_index: int | None = None,
) -> Subject:
    """Open a source, or a single split of it, and the groups of a table by the column `group_by`; `axes` and
    `ignore_index` as `open_data` has them. Raises DataError where there are no images, and for a column that is not
    there."""
    try:
        data = detect_layout(source, 0, group_by, axes=axes, ignore_index=ignore_index)
    except DataError as error:
        paths = list_images(Path(source)) if Path(source).is_dir() else []
        if not paths:
            raise
        return Subject(printable(source), source, {LOOSE: Files(paths, no_labels(len(paths)))}, (), refused=error)
    splits = as_made(data)
    if split is not None:
        splits = {split: data.split(split)}
    elif data.unsplit and not data.labelled:
        kind = kind_of(splits["train"])
        splits = {LOOSE if kind == "pictures" else kind: splits["train"]}
    return Subject(
        data.name,
        source,
        splits,
        tuple(map(printable, data.classes)),
        data.notes,
        unlabelled=data.unlabelled,
        unlearnable=find_unlearnable(data) if split is None else None,
        column=data.group_column,
    )


def parted(subject: Subject, group_by: str | None) -> list[dict[str, object]]:
    """Find groups in two splits: the splits, how many groups, their names. Raises as `vitreous.data.grouping` does."""
    notes = [note for note in subject.notes if PARTED in note]
    if group_by in (None, subject.column):
        return [{"splits": [], "groups": int(note.split()[0]), "names": []} for note in notes]
    pattern = expression(group_by)
    keys = {name: keys_of(split, pattern, subject.source) for name, split in subject.splits.items()}
    return [{"splits": list(pair), "groups": len(names), "names": names} for pair, names in straddling(keys).items()]


def left_out(subject: Subject) -> dict[str, int]:
    """Count files below a folder that no split has: `images` outside the layout, or clips, and other files by suffix,
    but for annotations."""
    root = Path(subject.source)
    if not root.is_dir() or not all(isinstance(split, Files) for split in subject.splits.values()):
        return {}
    others, images = Counter(), 0
    solid = any(axes_of(split) == 3 for split in subject.splits.values())
    endings = (*SUFFIXES, *(OWN if solid else ()))
    for split in subject.splits.values():
        endings = tuple(ENDINGS[split.axes]) if isinstance(split, ArrayFiles) else endings
    frames = set[str]()  # folders of them
    if any(isinstance(split, ClipFiles) for split in subject.splits.values()):
        endings = (GIF, *VIDEOS)
        frames = {
            path for split in subject.splits.values() if isinstance(split, Files) for path in map(str, split.paths)
        }
    for place, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        if place in frames:
            images += 1
            continue
        for name in files:
            suffix = os.path.splitext(name)[1].lower()
            if name.lower().endswith(endings) and not name.startswith("."):
                images += 1
            else:
                others[printable(suffix) or "no suffix"] += 1
    stores = [split.annotations for split in subject.splits.values() if isinstance(split, AnnotatedFiles)]
    for suffix in ANNOTATIONS if stores else ():
        others.pop(suffix, None)
    masks = {place for store in stores if isinstance(store, MaskFiles) for files in store.files for place in files}
    outside = images - len(subject.pool) - len(masks)
    return {**({"images": outside} if outside > 0 else {}), **dict(sorted(others.items()))}
