"""Names of splits, such as `train`, `Training` and `valid`: one table for the folders, files, columns and keys of all
layouts.

Use `parse_split_name` for a complete name (`Training`), `find_split_word` for a word inside a name (`train-0001`), and
`find_split_folders` for the folders of a dataset. `role_names_note` warns of classes named like splits, images or
annotations; `is_system_name` detects folders added by file servers and archivers.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path

from vitreous.errors import DataError, escape_unprintable, format_first_names

SPLIT_NAMES = {"train": ("train", "training"), "val": ("val", "valid", "validation"), "test": ("test", "testing")}
SPLIT_OF_NAME = {name: split for split, names in SPLIT_NAMES.items() for name in names}
#: names of folders that contain images or annotations of all classes, so that they are probably not classes
ROLE_WORDS = frozenset(
    [*SPLIT_OF_NAME, "trainval", "images", "imgs", "jpegimages", "masks", "labels", "annotations", "annotation"]
    + ["annots", "bboxes", "groundtruth", "gt", "segmentations", "segmentationclass", "segmentationobject"]
    + ["trainannot", "valannot", "testannot"]
)
#: names that may also be classes (`mask` and `no mask`): they count only next to another role name
WEAK_ROLE_WORDS = frozenset(["image", "img", "mask", "label", "annot", "segmentation", "boxes"])
#: names of a single folder for a split without labels
NO_CLASS_WORDS = ROLE_WORDS | WEAK_ROLE_WORDS | {"unknown", "unlabeled", "unlabelled", "all"}
SYSTEM_NAMES = frozenset(
    ["__macosx", "@eadir", "#recycle", "#snapshot", "@recycle", "$recycle.bin", "system volume information"]
    + ["lost+found", "__pycache__"]
)


def parse_split_name(name: str) -> str | None:
    """Return the split of a complete name, in any case: `Testing` is test; None for other names."""
    return SPLIT_OF_NAME.get(name.strip().lower())


def find_split_word(text: str) -> str | None:
    """Return the split that a name contains as a separate word, in any case: `instances_val2017` is val; None if it
    contains none. Raises DataError for a name that contains two splits."""
    splits = dict.fromkeys(filter(None, map(parse_split_name, re.findall(r"[a-z]+", text.lower()))))
    if len(splits) > 1:
        raise DataError(f"{escape_unprintable(text)} contains two split names, {' and '.join(splits)}", "rename it")
    return next(iter(splits), None)


def match_split_names(names: Iterable[str], origin: str) -> dict[str, str]:
    """Return {split: name} for the names that are split names, in the order train, val, test. Raises DataError if two
    names refer to one split; `origin` is the folder or file that contains them, for messages."""
    name_of_split: dict[str, str] = {}
    for name in sorted(names):
        split = parse_split_name(name)
        if split and name_of_split.setdefault(split, name) != name:
            name_pair = f"{escape_unprintable(name_of_split[split])} and {escape_unprintable(name)}"
            raise DataError(f"{origin} has two {split} splits, {name_pair}", "merge them, or rename one")
    return {split: name_of_split[split] for split in SPLIT_NAMES if split in name_of_split}


def find_split_folders(root: Path) -> dict[str, Path]:
    """Return {split: folder} for the split folders directly below a folder, in the order train, val, test; empty if it
    is not a folder. Raises DataError if two folders refer to one split."""
    try:
        with os.scandir(root) as entries:
            names = [entry.name for entry in entries if parse_split_name(entry.name) and entry.is_dir()]
    except OSError:
        return {}
    return {split: root / name for split, name in match_split_names(names, escape_unprintable(root)).items()}


def is_system_name(name: str) -> bool:
    """Return whether a file or folder is hidden, or was added by a file server, operating system or archiver: `@eaDir`
    of Synology, `__MACOSX` of macOS."""
    return name.startswith(".") or name.lower() in SYSTEM_NAMES


def has_role_name(name: str, role_words: Collection[str] = ROLE_WORDS) -> bool:
    """Return whether the name of a folder consists of `role_words`: `train2017`, `masks`. These are by default the
    names of splits, images and annotations."""
    name_words = re.findall(r"[^\W\d_]+", name.lower())
    return bool(name_words) and all(word in role_words for word in name_words)


def role_names_note(classes: Iterable[str]) -> list[str]:
    """Return the note about classes named like splits, images or annotations; empty if there are none."""
    classes = list(classes)
    names = [name for name in classes if has_role_name(name, ROLE_WORDS | WEAK_ROLE_WORDS)]
    if not names or (len(names) == 1 and not has_role_name(names[0])):
        return []
    problem = f"folders named like splits, images or annotations are read as classes: {format_first_names(names, 5)}"
    return [f"{problem}; if they are not classes, arrange the folder as docs/guides/data.md describes"]
