"""WebDataset archives: images or clips in tar files, read without unpacking.

A source is DIR/*.tar with the split in all file names (`train-000.tar`) or in none, DIR/{train,val,test}/*.tar,
`DIR/shard-{000000..000127}.tar`, or one file. `classes.txt` (a name per line) or `dataset.json` (`{"classes": [...]}`),
next to the archives or above their split folders, names the classes of integer labels. If no sample has a label, or all
have the same label, the images are unlabelled. If all samples are video files and animated GIFs, the data are clips;
videos among images are ignored. If no sample has a label, but images have captions (NAME.txt, or `caption` in
NAME.json), the data are image-text pairs.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitreous.data.decoding.clips import GIF_SUFFIX, VIDEO_SUFFIXES, is_animated_gif
from vitreous.data.decoding.decode import is_image_file
from vitreous.data.layouts.classes import (
    build_label_array,
    natural_sort_key,
    one_class_note,
    sort_class_names,
    too_few_classes_error,
)
from vitreous.data.layouts.split_names import (
    SPLIT_NAMES,
    find_split_folders,
    find_split_word,
    parse_split_name,
    role_names_note,
)
from vitreous.data.layouts.video import StoredClips, choose_probe_indices, clips_note
from vitreous.data.pairs import build_pair_data
from vitreous.data.split import Data, Split, StoreSplit, create_empty_labels, ensure_val_split
from vitreous.data.stores.tarindex import ORPHAN_LABELS_NOTE, ArchiveIndex, LabelWord, open_archive_index
from vitreous.data.text_files import read_lines, read_text
from vitreous.errors import DataError, escape_unprintable, format_first_lines

ARCHIVE_FORMAT_HINT = (
    "use DIR/*.tar or DIR/{train,val,test}/*.tar with samples NAME.jpg (or .mp4) and NAME.cls, or CLASS/NAME.jpg"
)
COMPRESSED_SUFFIXES = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst", ".tar.lz4")
CLASS_NAME_FILES = ("pack.json", "dataset.json", "classes.txt", "classnames.txt")
MAX_VIDEO_SUFFIX_LENGTH = max(map(len, VIDEO_SUFFIXES))  # characters
MAX_ARCHIVES = 100_000  # maximum number of archives that a pattern expands to


def open_webdataset(source: Path, split_seed: int = 0) -> Data:
    """Open the dataset in a folder of archives, in the archives of a pattern, or in one archive.

    Labels are (n,) int64 if every sample has one; else (n, K) float32, K = 0 without labels. If there is no `val`, a
    tenth of `train` is held out. Classes are in the order of the file that names them, else in natural order. Raises
    DataError for missing or damaged archives, unlabelled samples among labelled samples, and classes that `train` does
    not have.
    """
    name = escape_unprintable(source)
    archives = find_archives(source)
    paths = [path for split_archives in archives.values() for path in split_archives]
    archive_index = open_archive_index(paths)
    if not len(archive_index.samples):
        raise DataError(f"no images in {len(paths)} archives of {name}", ARCHIVE_FORMAT_HINT)
    ends = np.cumsum([len(split_archives) for split_archives in archives.values()])
    sample_splits = np.searchsorted(ends, archive_index.samples["archive"], side="right")
    distinct_labels, codes, split_of_sample = read_index_labels(archive_index)
    unsplit = "" in archives and not (split_of_sample >= 0).any()
    if "" in archives:
        sample_splits = np.maximum(split_of_sample, 0)
    indices_by_split = {
        split: np.flatnonzero(sample_splits == n) for n, split in enumerate(SPLIT_NAMES if "" in archives else archives)
    }
    clips, videos = detect_clips(archive_index)
    if not clips and videos.any():
        indices_by_split = {
            split: split_indices[~videos[split_indices]] for split, split_indices in indices_by_split.items()
        }
    indices_by_split = {
        split: split_indices
        for split, split_indices in indices_by_split.items()
        if len(split_indices) or "" not in archives
    }
    if "train" not in indices_by_split:
        raise DataError(f"{name} has {', '.join(indices_by_split)} but no training images", ARCHIVE_FORMAT_HINT)
    notes = [f"{count} {text}" for text, count in archive_index.notes.items()]
    if (codes < 0).all() and not clips and archive_index.samples["text_size"].any():
        return open_archive_pairs(name, archive_index, indices_by_split, split_seed, notes, unsplit=unsplit)
    unlabelled_splits = find_unlabelled_splits(archive_index, name, codes, indices_by_split)
    notes[:0] = [clips_note(len(archive_index.samples))] if clips else []
    notes += [f"{videos.sum():,} videos among images are ignored"] if not clips and videos.any() else []
    labelled = {
        split: split_indices for split, split_indices in indices_by_split.items() if split not in unlabelled_splits
    }
    labels, classes, unlabelled = encode_split_labels(
        name,
        distinct_labels,
        codes=codes,
        indices_by_split=labelled,
        class_names=read_nearby_class_names(source),
        notes=notes,
    )
    labels |= {split: create_empty_labels(len(indices_by_split[split])) for split in unlabelled_splits}
    split_class = StoredClips if clips else StoreSplit
    splits: dict[str, Split] = {
        split: split_class(archive_index, split_indices, labels[split])
        for split, split_indices in indices_by_split.items()
    }
    splits, full_train = ensure_val_split(splits, split_seed, notes)
    return Data(
        name, classes, splits=splits, notes=notes, unsplit=unsplit, full_train_split=full_train, unlabelled=unlabelled
    )


def open_archive_pairs(
    name: str,
    archive_index: ArchiveIndex,
    indices_by_split: dict[str, np.ndarray],
    split_seed: int,
    notes: list[str],
    *,
    unsplit: bool,
) -> Data:
    """Open the image-text pairs of archives. `indices_by_split` are the samples of each split, (n,) int64. Captions are
    read into memory. Raises DataError for captions that are not UTF-8."""
    samples = np.sort(np.concatenate(list(indices_by_split.values())))
    return build_pair_data(
        name,
        StoreSplit(archive_index, samples, create_empty_labels(len(samples))),
        np.arange(len(samples)),
        [archive_index.read_caption(int(sample)) for sample in samples],
        pairs_by_split={split: np.searchsorted(samples, indices) for split, indices in indices_by_split.items()},
        split_seed=split_seed,
        notes=notes,
        unsplit=unsplit,
    )


def detect_clips(archive_index: ArchiveIndex) -> tuple[bool, np.ndarray]:
    """Detect clips by the suffixes of the samples. Returns whether all samples are clips, and which are video files,
    (n,) bool. If all samples are GIFs, they must be animated. Raises DataError for an unreadable GIF."""
    tail_positions = np.maximum(archive_index.samples["end"][:, None] + np.arange(-MAX_VIDEO_SUFFIX_LENGTH, 0), 0)
    tails, inverse = np.unique(
        (archive_index.names[tail_positions] | 0x20).view(f"S{MAX_VIDEO_SUFFIX_LENGTH}").ravel(), return_inverse=True
    )
    videos, gifs = (
        np.array([tail.endswith(tuple(map(os.fsencode, suffixes))) for tail in tails.tolist()])[inverse]
        for suffixes in (VIDEO_SUFFIXES, [GIF_SUFFIX])
    )
    if not (videos | gifs).all():
        return False, videos
    return bool(videos.any()) or all(
        is_animated_gif(archive_index.read(index)) for index in choose_probe_indices(len(videos))
    ), videos


def encode_split_labels(
    name: str,
    distinct_labels: Sequence[tuple[LabelWord, ...]],
    codes: np.ndarray,
    indices_by_split: dict[str, np.ndarray],
    class_names: Sequence[str],
    notes: list[str],
) -> tuple[dict[str, np.ndarray], tuple[str, ...], DataError | None]:
    """Encode the labels of the samples in archives.

    Returns the labels of each split, (n,) int64, (n, K) float32 or (n, 0); the classes; and, if there are fewer than
    two classes, the error that explains why the data have no labels.

    `codes`, (n,), are the indices of the samples' labels in `distinct_labels`, -1 for none. `class_names` are those of
    a file next to the archives. Appends to `notes`. Raises DataError for classes that `train` does not have.
    """
    unlabelled, classes = None, tuple(class_names)
    names = [tuple(resolve_class_name(label_word, class_names) for label_word in label) for label in distinct_labels]
    if (codes < 0).all():
        unlabelled = DataError(f"{name}: no sample has a label", ARCHIVE_FORMAT_HINT)
    elif not class_names:
        used_codes = np.unique(codes[indices_by_split["train"]]).tolist()
        classes = tuple(sort_class_names(list({class_name for code in used_codes for class_name in names[code]})))
    multilabel = any(len(distinct_labels[code]) != 1 for code in np.unique(codes).tolist() if code >= 0)
    if unlabelled is None and len(classes) < (1 if multilabel else 2):
        unlabelled = too_few_classes_error(name, classes, ARCHIVE_FORMAT_HINT)
        notes += one_class_note(classes)
    if unlabelled is not None:
        return {split: create_empty_labels(len(indices)) for split, indices in indices_by_split.items()}, (), unlabelled
    labels = {
        split: build_label_array(
            f"{name}: {split}",
            names,
            label_indices=codes[indices],
            classes=classes,
            multilabel=multilabel,
            listed=len(class_names) > 0,
        )
        for split, indices in indices_by_split.items()
    }
    counts = labels["train"].sum(0) if multilabel else np.bincount(labels["train"], minlength=len(classes))
    if absent := int((counts == 0).sum()):
        notes.append(f"{absent} of {len(classes)} classes have no training image")
    notes += role_names_note(classes)
    return labels, classes, None


def has_tar_archives(folder: Path) -> bool:
    """Return whether a folder, or a split folder in it, has tar archives, and no folders of images next to them."""
    if split_folders := find_split_folders(folder):
        return any(map(list_archives, split_folders.values()))
    entries = list(os.scandir(folder))
    if not list_archives(folder) and not any(entry.name.lower().endswith(COMPRESSED_SUFFIXES) for entry in entries):
        return False
    subfolders = [entry.path for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    return not any(is_image_file(Path(entry.path)) for subfolder in subfolders for entry in os.scandir(subfolder))


def list_archives(folder: Path) -> list[Path]:
    """List the uncompressed archives in a folder, in natural order."""
    names = sorted((entry.name for entry in os.scandir(folder) if not entry.name.startswith(".")), key=natural_sort_key)
    return [folder / name for name in names if name.lower().endswith(".tar")]


def find_archives(source: Path) -> dict[str, list[Path]]:
    """Return {split: archives in natural order} of a folder, file or pattern; the split is "" if no name contains a
    split. Raises DataError for missing or compressed archives, for splits without `train`, and if only some names
    contain a split."""
    if source.is_dir():
        if archives_by_split := {
            split: split_archives
            for split, folder in find_split_folders(source).items()
            if (split_archives := list_archives(folder))
        }:
            return archives_by_split
        paths = list_archives(source)
    else:
        paths = [source] if os.path.lexists(source) else expand_braces(os.fspath(source))
    if not paths or any(path.name.lower().endswith(COMPRESSED_SUFFIXES) for path in paths):
        problem = f"{escape_unprintable(source)}: compressed archives do not allow random access"
        raise DataError(problem, "unpack them to .tar (gunzip *.gz)")
    if missing := [path for path in paths if not os.path.lexists(path)]:
        names = format_first_lines(map(escape_unprintable, missing), len(missing))
        raise DataError(f"{len(missing)} of {len(paths)} archives are missing:{names}", ARCHIVE_FORMAT_HINT)
    archives: dict[str, list[Path]] = {}
    for path in paths:
        archives.setdefault(find_split_word(path.stem) or "", []).append(path)
    if "" in archives and len(archives) > 1:
        first_archive = escape_unprintable(archives[""][0])
        problem = f"the name of {first_archive} has no split, but those of other archives have"
        raise DataError(problem, "name it train-..., val-... or test-...")
    if "train" not in archives and len(paths) > 1 and "" not in archives:
        raise DataError(
            f"{escape_unprintable(source)} has {', '.join(archives)} but no training archives", ARCHIVE_FORMAT_HINT
        )
    return archives if "" in archives or "train" in archives else {"": paths}


def expand_braces(pattern: str) -> list[Path]:
    """Expand the braces of a pattern to paths: `x-{00..03}.tar` to four, `{a,b}` to two, several braces to all
    combinations. Raises DataError for more than MAX_ARCHIVES."""
    choices: list[Sequence[str]] = []
    for index, piece in enumerate(re.split(r"\{([^{}]*)\}", pattern)):
        range_match = re.fullmatch(r"(\d+)\.\.(\d+)", piece) if index % 2 else None
        if range_match:
            low, high = int(range_match[1]), int(range_match[2])
            if not low <= high < low + MAX_ARCHIVES:
                problem = f"{{{piece}}} expands to no archive, or to more than {MAX_ARCHIVES:,}"
                raise DataError(f"{escape_unprintable(pattern)}: {problem}", "correct the numbers in the braces")
            choices.append([str(value).zfill(len(range_match[1])) for value in range(low, high + 1)])
        else:
            choices.append(piece.split(",") if index % 2 else [piece])
    if math.prod(map(len, choices)) > MAX_ARCHIVES:
        raise DataError(
            f"{escape_unprintable(pattern)} expands to more than {MAX_ARCHIVES:,} archives", "use smaller ranges"
        )
    return [Path("".join(pieces)) for pieces in itertools.product(*choices)]


def read_index_labels(archive_index: ArchiveIndex) -> tuple[Sequence[tuple[LabelWord, ...]], np.ndarray, np.ndarray]:
    """Return the distinct labels of archives, the index of each sample's label among them, (n,) int64, and the index in
    SPLIT_NAMES of the split in its folder path, (n,) int64. Both are -1 for none. If no sample has a label member,
    folder names are the labels."""
    split_at, class_at = parse_archive_folders(archive_index.folders)
    distinct_labels, codes_of_samples, folder_indices = (
        archive_index.label_words,
        archive_index.samples["label"],
        archive_index.samples["home"],
    )
    if not (codes_of_samples >= 0).any():
        codes = {
            class_name: index
            for index, class_name in enumerate(dict.fromkeys(class_name for class_name in class_at if class_name))
        }
        distinct_labels, codes_of_samples = (
            tuple((class_name,) for class_name in codes),
            np.array([codes.get(class_name, -1) for class_name in class_at])[folder_indices],
        )
    return distinct_labels, codes_of_samples, np.array(split_at, dtype=np.int64)[folder_indices]


def find_unlabelled_splits(
    archive_index: ArchiveIndex, name: str, codes: np.ndarray, indices_by_split: dict[str, np.ndarray]
) -> list[str]:
    """Find the held-out splits without any label, if other splits have labels.

    `codes`, (n,), are label indices, -1 for none; `indices_by_split` has the sample indices of each split, (m,). Raises
    DataError, with the first samples, if other splits have unlabelled samples, as when labels are stored separately
    from the images.
    """
    is_unlabelled = codes < 0
    if not is_unlabelled.any() or (is_unlabelled.all() and not archive_index.notes.get(ORPHAN_LABELS_NOTE)):
        return []
    held_out = [
        split for split, indices in indices_by_split.items() if split != "train" and is_unlabelled[indices].all()
    ]
    samples = np.concatenate([indices for split, indices in indices_by_split.items() if split not in held_out])
    missing = samples[is_unlabelled[samples]]
    if len(missing):
        listing = format_first_lines((archive_index.name(int(index)) for index in missing), len(missing))
        raise DataError(
            f"{name}: {len(missing)} of {len(samples)} samples have no label:{listing}", ARCHIVE_FORMAT_HINT
        )
    return held_out


def parse_archive_folders(folders: Sequence[str]) -> tuple[list[int], list[str]]:
    """Parse the split and the class of each folder inside archives. Returns the indices of the splits in SPLIT_NAMES,
    -1 for none, and the classes, "" for none.

    A path is PREFIX/[SPLIT/]CLASS/..., with a prefix that is common to all folders. Splits are recognised if all
    folders have one.
    """
    folder_names = [[name for name in folder.split("/") if name not in ("", ".")] for folder in folders]
    levels = zip(*(names[:-1] for names in folder_names), strict=False)
    common = len(list(itertools.takewhile(lambda level: len(set(level)) == 1, levels)))
    folder_names = [names[common:] or [""] for names in folder_names]
    split_names = [parse_split_name(names[0]) for names in folder_names]
    splits = [list(SPLIT_NAMES).index(split) if split else -1 for split in split_names]
    if -1 in splits or 0 not in splits or len(set(splits)) == 1:
        return [-1] * len(folder_names), [names[0] for names in folder_names]
    return splits, [names[1] if len(names) > 1 else "" for names in folder_names]


def read_nearby_class_names(source: Path) -> tuple[str, ...]:
    """Read the class names from a file next to the archives, or above their split folder; empty if there is no such
    file.

    Raises DataError for an unreadable file, and for an empty or repeated name.
    """
    archive_folder = source if source.is_dir() else source.parent
    folders = [archive_folder, archive_folder.parent] if parse_split_name(archive_folder.name) else [archive_folder]
    for file in (folder / name for folder in folders for name in CLASS_NAME_FILES):
        if not file.is_file():
            continue
        try:
            names_json: Any = json.loads(read_text(file)).get("classes") if file.suffix == ".json" else read_lines(file)
        except (ValueError, AttributeError, RecursionError):
            hint = 'write one name per line, or {"classes": [...]}'
            raise DataError(f"{escape_unprintable(file)} cannot be read", hint) from None
        if file.suffix == ".json" and names_json is None:
            continue
        names = (
            [names_json[key] for key in sorted(names_json, key=natural_sort_key)]
            if isinstance(names_json, dict)
            else names_json
        )
        if not isinstance(names, list) or not all(isinstance(name, str) and name.strip() for name in names):
            raise DataError(f"{escape_unprintable(file)} has a class without a name", "name every class")
        names = [name.strip() for name in names]
        if len(set(names)) < len(names):
            duplicate = next(name for name in names if names.count(name) > 1)
            raise DataError(
                f"{escape_unprintable(file)} has two classes {escape_unprintable(duplicate)}", "rename one of them"
            )
        return tuple(names)
    return ()


def resolve_class_name(label_word: LabelWord, class_names: Sequence[str]) -> str:
    """Return the class name of a label: an integer is an index in `class_names`, if there are any; otherwise the label
    is converted to text."""
    if not class_names or isinstance(label_word, str):
        return str(label_word)
    return class_names[label_word] if label_word < len(class_names) else f"number {label_word}"
