"""Detect runs and image folders among path arguments, and find the newest run, for hints in error messages.

Does not import PyTorch.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from vitreous.data.decoding.clips import VIDEO_SUFFIXES
from vitreous.data.decoding.decode import IMAGE_FILE_SUFFIXES
from vitreous.data.decoding.volumes import VOLUME_SUFFIXES

IMAGE_SUFFIXES = frozenset((*IMAGE_FILE_SUFFIXES, *VIDEO_SUFFIXES, *VOLUME_SUFFIXES)) - {
    ".npz"
}  # weights can be .npz too
DATA_TABLE_SUFFIXES = frozenset((".csv", ".tsv", ".tar", ".parquet"))
DATASET_SUFFIXES = frozenset(
    (*IMAGE_SUFFIXES, *DATA_TABLE_SUFFIXES, ".txt", ".md", ".xml", ".yaml", ".yml", ".html", ".pdf")
)
RUN_FILES = ("config.yaml", "command.txt")
MAX_SCANNED_ENTRIES = 5_000  # folder entries scanned for a run or an image
MAX_SCAN_DEPTH = 3  # folder levels below the first one


def is_run_folder(path: str | os.PathLike[str]) -> bool:
    """Return whether a folder is a run, which has all `RUN_FILES`; a YOLO dataset may have only a config.yaml."""
    return all(Path(path, name).is_file() for name in RUN_FILES)


def is_finished_run(path: str | os.PathLike[str]) -> bool:
    """Return whether a folder is a run with a saved model."""
    return is_run_folder(path) and Path(path, "model").is_dir()


def find_newest_run(root: str | os.PathLike[str] = ".") -> str:
    """Find the finished run below a folder whose model was written last: its path relative to the folder, "" for none.
    Links are not followed."""
    runs = [folder for folder, _ in walk_entries(root) if is_finished_run(folder)]
    newest = max(runs, key=lambda folder: os.stat(os.path.join(folder, "model")).st_mtime, default="")
    return os.path.relpath(newest, root) if newest else ""


def walk_entries(root: str | os.PathLike[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield a folder and the folders below it, breadth first, each with its file names. At most MAX_SCAN_DEPTH levels
    deep, until MAX_SCANNED_ENTRIES entries were scanned. Hidden folders and folders in a run are skipped."""
    queue, num_entries = deque([(os.fspath(root), 0)]), 0
    while queue and num_entries < MAX_SCANNED_ENTRIES:
        folder, depth = queue.popleft()
        names = list[str]()
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    num_entries += 1
                    if num_entries >= MAX_SCANNED_ENTRIES:
                        break
                    if not entry.is_dir(follow_symlinks=False):
                        names.append(entry.name)
                    elif depth < MAX_SCAN_DEPTH and not entry.name.startswith("."):
                        queue.append((entry.path, depth + 1))
        except OSError:
            continue
        if has_run_files(names):
            queue = deque(queued for queued in queue if os.path.dirname(queued[0]) != folder)
        yield folder, names


def has_run_files(names: list[str]) -> bool:
    """Return whether the file names of a folder include all `RUN_FILES`."""
    return set(names) >= set(RUN_FILES)


def is_image_source(path: str) -> bool:
    """Return whether a path argument is an image, or a folder, table or archive of images, and not a model, by suffixes
    only. A folder that also contains other files may be a model."""
    if not os.path.isdir(path):
        return path[:1] == "@" or path == "-" or get_full_suffix(path) in IMAGE_SUFFIXES | DATA_TABLE_SUFFIXES
    has_images = False
    for _, names in walk_entries(path):
        suffixes = {get_full_suffix(name) for name in names if not name.startswith(".")}
        if has_run_files(names) or not suffixes <= DATASET_SUFFIXES | {""}:
            return False
        has_images = has_images or bool(suffixes & (IMAGE_SUFFIXES | DATA_TABLE_SUFFIXES))
    return has_images


def get_full_suffix(name: str) -> str:
    """Return the suffix of a file name in lower case: `.nii.gz` in full, and `.pth` for checkpoints named
    `x.pth.tar`."""
    stem, suffix = os.path.splitext(name.lower())
    if name.lower().endswith(".nii.gz"):
        return ".nii.gz"
    return os.path.splitext(stem)[1] if suffix == ".tar" and stem.endswith((".pth", ".pt", ".ckpt")) else suffix
