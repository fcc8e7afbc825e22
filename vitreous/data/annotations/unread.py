"""Find annotation files next to class folders, which the class folder layout ignores."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from vitreous.data.annotations.coco import find_coco_files
from vitreous.data.decoding.decode import IMAGE_FILE_SUFFIXES
from vitreous.data.layouts.split_names import is_system_name
from vitreous.data.text_files import contains_word, read_lines
from vitreous.errors import DataError

MAX_FOLDERS_PER_LEVEL, MAX_FILES_PER_FOLDER = 10, 2_000  # limits of the search: subfolders per folder, files per folder
YOLO_BOX_LINE = re.compile(r"\d+(\s+-?[\d.]+){4,}\s*")
VOC_WORD, LABELME_WORD = "<bndbox>", '"shapes"'


def find_unused_annotations(root: Path) -> Path | None:
    """Return the first annotation file in a folder, up to two levels down; None if there is none. The search covers
    COCO files, and files of Pascal VOC, LabelMe and YOLO that are next to an image of the same name."""
    for folder in iterate_nearby_folders(root):
        try:
            with os.scandir(folder) as entries:
                names = sorted(
                    entry.name for entry in islice(entries, MAX_FILES_PER_FOLDER) if not is_system_name(entry.name)
                )
            if documents := find_coco_files(folder):
                return documents[0]
            images = {os.path.splitext(name)[0] for name in names if name.lower().endswith(tuple(IMAGE_FILE_SUFFIXES))}
            for ending in (".xml", ".json", ".txt"):
                paired = (name for name in names if name.endswith(ending) and name.removesuffix(ending) in images)
                if (name := next(paired, None)) and is_annotation_file(folder / name):
                    return folder / name
        except (OSError, DataError):  # reported by the code that reads the folder or the file
            continue
    return None


def iterate_nearby_folders(root: Path) -> Iterator[Path]:
    """Yield a folder, and the first of its subfolders, up to two levels down."""
    level = [root]
    for _ in range(3):
        yield from level
        folder_lists = (
            sorted(folder for folder in parent.glob("*/") if not is_system_name(folder.name)) for parent in level
        )
        level = [folder for subfolders in folder_lists for folder in subfolders[:MAX_FOLDERS_PER_LEVEL]][
            : MAX_FOLDERS_PER_LEVEL**2
        ]


def is_annotation_file(path: Path) -> bool:
    """Return whether a .xml, .json or .txt file next to an image contains boxes or polygons. Raises DataError for an
    unreadable file."""
    if path.suffix == ".txt":
        lines = read_lines(path)
        return bool(lines) and all(YOLO_BOX_LINE.fullmatch(line.strip()) for line in lines)
    return contains_word(path, VOC_WORD if path.suffix == ".xml" else LABELME_WORD)
