"""Clips: `[SPLIT/]CLASS/*.mp4` and other video files, animated GIFs, and folders of frames, `[SPLIT/]CLASS/CLIP/*.jpg`.

A folder is video data if its classes contain only clips: one photo among GIFs makes all of them images. A folder of
images is a clip if their names are a common prefix with zero-padded consecutive numbers from 0 or 1, and their sizes
are equal. Subfolders with other numbered images stay images.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from vitreous.data.decoding.clip import Clip, ClipSegment
from vitreous.data.decoding.clips import (
    GIF_SUFFIX,
    VIDEO_SUFFIXES,
    ImageFilesClip,
    is_animated_gif,
    list_frame_images,
    open_clip,
)
from vitreous.data.decoding.decode import IMAGE_FILE_SUFFIXES, decode_to_pillow, read_input_file, read_upright_size
from vitreous.data.layouts.classes import natural_sort_key
from vitreous.data.layouts.folder import (
    build_classification_data,
    is_folder,
    list_class_files,
    list_entries,
    resolve_split_folders,
)
from vitreous.data.layouts.split_names import find_split_folders
from vitreous.data.split import Data, FileSplit, S, Split, StoreSplit
from vitreous.errors import DataError, escape_unprintable

NUMBERED_FILE_NAME = re.compile(r"(.*?)(\d+)(\.\w+)")
MAX_COMPARED_PAIRS = 8  # pairs of images of a folder to compare
MAX_NEIGHBOUR_DIFFERENCE = 0.6
MAX_STILL_DIFFERENCE = 2.0  # of 255; below this difference, images are considered equal
MAX_PROBED_CLIPS = 16  # folders of frames and GIFs to inspect as a sample of all


@dataclass(frozen=True)
class ClipFiles(FileSplit):
    """Clips with labels (n,) int64 or (n, K) float32; `paths` are those of files and of folders of frames. `segments`,
    (n, 2) float64: start and end in seconds, 0 and infinity for the complete clip; None: all are complete."""

    axes: ClassVar[int] = 3
    kind: ClassVar[str] = "clips"
    segments: np.ndarray | None = None

    def get_segment(self, sample: int) -> tuple[float, float] | None:
        """Return start and end of a segment in seconds; None for the complete file."""
        start, end = (0.0, math.inf) if self.segments is None else self.segments[sample].tolist()
        return None if (start, end) == (0.0, math.inf) else (start, end)

    def open_clip(self, sample: int) -> Clip:
        """Open a clip; an image becomes a clip of one frame. Raises DataError."""
        if is_still_image(self.path(sample)):
            return ImageFilesClip([self.path(sample)], self.name(sample))
        return self.cut_segment(sample, open_clip(self.path(sample), self.name(sample)))

    @property
    def num_stills(self) -> int:
        """The number of samples that are images."""
        return sum(is_still_image(self.path(sample)) for sample in range(len(self)))

    def cut_segment(self, sample: int, clip: Clip) -> Clip:
        """Cut the segment of a sample out of an opened file. Raises DataError."""
        segment = self.get_segment(sample)
        return clip if segment is None else ClipSegment(clip, *segment)

    def name(self, sample: int) -> str:
        segment = self.get_segment(sample)
        if segment is None:
            return super().name(sample)
        return f"{super().name(sample)} from {segment[0]:g} s" + (
            f" to {segment[1]:g} s" if math.isfinite(segment[1]) else ""
        )

    def take(self, indices: np.ndarray, labels: np.ndarray | None = None) -> ClipFiles:
        return replace(
            super().take(indices, labels), segments=None if self.segments is None else self.segments[indices]
        )

    def update(self, digest: Any) -> None:
        super().update(digest)
        if self.segments is not None:
            digest.update(self.segments.tobytes())

    def raw(self, sample: int) -> bytes | np.ndarray:
        """Return the bytes of a file, or the frames of a folder, (T, H, W, 3) uint8. Raises DataError."""
        if not os.path.isdir(self.path(sample)):
            return super().raw(sample)
        clip = self.open_clip(sample)
        return clip.read_frames(np.arange(len(clip)))


@dataclass(frozen=True, eq=False)
class StoredClips(StoreSplit[S]):
    """Clips of a store, such as tar archives; each is a video file or a GIF."""

    axes: ClassVar[int] = 3
    kind: ClassVar[str] = "clips"

    def open_clip(self, sample: int) -> Clip:
        """Open a clip. Raises DataError."""
        return open_clip(self.raw(sample), self.name(sample))

    def take(self, indices: np.ndarray, labels: np.ndarray | None = None) -> StoredClips[S]:
        """Return the clips at indices (m,), in this order, with other labels (m,) or (m, K) if they are passed."""
        return StoredClips(self.store, self.row_indices[indices], self.labels[indices] if labels is None else labels)


def is_still_image(path: str) -> bool:
    """Return whether a path is an image file by its name, rather than a clip."""
    suffix = os.path.splitext(path)[1].lower()
    return suffix in IMAGE_FILE_SUFFIXES and suffix != GIF_SUFFIX and not os.path.isdir(path)


def open_sample(split: Split, sample: int) -> bytes | np.ndarray | Clip:
    """Return the undecoded sample: an opened clip, else stored bytes or pixels (H, W[, C]). Raises DataError."""
    return split.open_clip(sample) if isinstance(split, ClipFiles | StoredClips) else split.raw(sample)


def has_only_clips(root: Path) -> bool:
    """Return whether a folder, its splits and their classes contain only clips; if all are GIFs, they must be
    animated."""
    clips = None
    for folder in resolve_split_folders(root).values() if "train" in find_split_folders(root) else (root,):
        folder_clips = list_clips(os.fspath(folder))
        if folder_clips is None:
            return False
        clips = (clips or []) + folder_clips
    return bool(clips) and are_animated_clips(clips)


def are_clip_files(paths: list[str]) -> bool:
    """Return whether all files, at least one, are videos, GIFs or folders; if all are GIFs, they must be animated."""
    endings = {os.path.splitext(path)[1].lower() for path in paths if not os.path.isdir(path)}
    return bool(paths) and endings <= VIDEO_SUFFIXES | {GIF_SUFFIX} and are_animated_clips(paths)


def are_animated_clips(paths: list[str]) -> bool:
    """Return whether there are clips other than GIFs, or the GIFs are animated."""
    if any(not path.lower().endswith(GIF_SUFFIX) for path in paths):
        return True
    return all(is_animated_gif(read_input_file(paths[index])) for index in choose_probe_indices(len(paths)))


def choose_probe_indices(count: int) -> list[int]:
    """Choose up to MAX_PROBED_CLIPS evenly spread indices of `count`."""
    return np.linspace(0, count - 1, min(MAX_PROBED_CLIPS, count)).astype(int).tolist()


def has_clips(root: Path) -> bool:
    """Return whether there are any clips below a folder: video files, animated GIFs, folders of frames."""
    split_folders = resolve_split_folders(root).values() if "train" in find_split_folders(root) else (root,)
    clips = [
        path
        for folder in split_folders
        for path in list_clips(os.fspath(folder), stills=True) or []
        if not is_still_image(path)
    ]
    return bool(clips) and (
        are_animated_clips(clips) or any(is_animated_gif(read_input_file(path)) for path in clips[:MAX_PROBED_CLIPS])
    )


def list_clips(root: str, depth: int = 2, stills: bool = False) -> list[str] | None:
    """List the video files, GIFs and folders of frames below a folder, in natural order.

    Returns None if there are non-frame images at least `depth` folders down; with `stills`, these images are listed
    too. A folder linked twice is visited once.
    """
    clips, seen, pending, probes_left = list[str](), set[str](), [(root, 0)], MAX_PROBED_CLIPS
    while pending:
        folder, level = pending.pop()
        real_path = os.path.realpath(folder)
        if real_path in seen:
            continue
        seen.add(real_path)
        image_names = []
        for entry in list_entries(folder):
            suffix = os.path.splitext(entry.name)[1].lower()
            if is_folder(entry):
                pending.append((entry.path, level + 1))
            elif suffix in VIDEO_SUFFIXES or suffix == GIF_SUFFIX:
                clips.append(entry.path.removeprefix("./"))
            elif suffix in IMAGE_FILE_SUFFIXES:
                image_names.append(entry.name)
                if not stills and (level < depth or not NUMBERED_FILE_NAME.fullmatch(entry.name)):
                    return None
        if image_names:
            if level >= depth and are_frame_names(image_names) and (probes_left <= 0 or has_uniform_size(folder)):
                probes_left -= 1
                clips.append(folder.removeprefix("./"))
            elif stills:
                clips += [os.path.join(folder, name).removeprefix("./") for name in image_names]
            else:
                return None
    return sorted(clips, key=natural_sort_key)


def are_frame_names(names: list[str]) -> bool:
    """Return whether image names are frame names: zero-padded numbers of one length, consecutive from 0 or 1, with the
    same text before and after them."""
    matches = [match.groups() for name in names if (match := NUMBERED_FILE_NAME.fullmatch(name))]
    is_uniform = len({(prefix, len(digits), suffix) for prefix, digits, suffix in matches}) == 1
    if len(matches) < len(names) or len(names) < 2 or not is_uniform or len(matches[0][1]) < 2:
        return False
    first_number, *other_numbers = sorted(int(digits) for _, digits, _ in matches)
    return first_number < 2 and other_numbers == list(range(first_number + 1, first_number + len(names)))


def has_uniform_size(folder: str) -> bool:
    """Return whether the first, middle and last image of a folder have one size, by their headers."""
    paths = list_frame_images(folder)
    try:
        probed_paths = [paths[index] for index in (0, len(paths) // 2, -1)]
        return len({read_upright_size(read_input_file(path), escape_unprintable(path)) for path in probed_paths}) == 1
    except DataError:
        return True  # reading it raises the error


def open_clip_folder(root: Path, split_seed: int = 0, stills: bool = False) -> Data:
    """Open a folder of classes of clips, with or without split folders, as `open_image_folder` opens images.

    A tenth of the clips is `val` if there is none. With `stills`, images among them are clips of one frame. Raises
    DataError as `open_image_folder`.
    """
    split_folders = resolve_split_folders(root)
    list_files = partial(list_class_clips, stills=stills)
    listed = {name: list_class_files(folder, list_files) for name, folder in split_folders.items()}
    data = build_classification_data(root, split_folders, listed, split_seed, list_files)
    splits: dict[str, Split] = {name: to_clip_files(split) for name, split in data.splits.items()}
    num_images = sum(to_clip_files(split).num_stills for split in splits.values())
    notes = [clips_note(sum(map(len, splits.values())), num_images), *data.notes]
    return replace(
        data,
        splits=splits,
        notes=notes,
        full_train_split=data.full_train_split and to_clip_files(data.full_train_split),
    )


def frames_note(data: Data) -> list[str]:
    """Return the note about classes that each look like one folder of frames: numbered images of one size. They may be
    clips without classes. A class in several splits is not reported."""
    names_by_folder: dict[str, list[str]] = {}
    for split in data.splits.values():
        if type(split) is not FileSplit or not data.labelled:
            return []
        if not names_by_folder and not are_frame_names(
            [os.path.basename(path) for path in list_frame_images(os.path.dirname(split.path(0)))]
        ):
            return []
        for sample in range(len(split)):
            folder, name = os.path.split(split.path(sample))
            names_by_folder.setdefault(folder, []).append(name)
    if len({os.path.basename(folder) for folder in names_by_folder}) < len(names_by_folder):
        return []
    if not all(map(are_frame_names, names_by_folder.values())) or not all(
        map(has_uniform_size, list(names_by_folder)[:MAX_PROBED_CLIPS])
    ):
        return []
    if not all(
        map(is_frame_sequence, [list(names_by_folder)[index] for index in choose_probe_indices(len(names_by_folder))])
    ):
        return []
    note = "image names look like video frames: if each folder is one clip, move the folders into"
    return [f"{note} class folders, DIR/CLASS/CLIP/0001.jpg, or a single one without classes"]


def is_frame_sequence(folder: str) -> bool:
    """Return whether adjacent images of a folder are more similar than others, like frames of a clip.

    Their mean absolute difference, in 16 x 16 greys, is less than MAX_NEIGHBOUR_DIFFERENCE times that of images half
    the folder apart.
    """
    paths = list_frame_images(folder)
    indices = np.linspace(0, len(paths) - 2, min(MAX_COMPARED_PAIRS, len(paths) - 1)).astype(int)

    def read_grey_thumbnail(index: int) -> np.ndarray:
        image = decode_to_pillow(
            read_input_file(paths[index % len(paths)]), 1, escape_unprintable(paths[index % len(paths)])
        )
        return np.asarray(image.resize((16, 16)), np.float32)

    try:
        neighbour_difference = np.mean(
            [np.abs(read_grey_thumbnail(index) - read_grey_thumbnail(index + 1)).mean() for index in indices]
        )
        distant_difference = np.mean(
            [
                np.abs(read_grey_thumbnail(index) - read_grey_thumbnail(index + len(paths) // 2)).mean()
                for index in indices
            ]
        )
    except DataError:
        return False
    return len(paths) < 4 or bool(
        neighbour_difference <= MAX_STILL_DIFFERENCE
        or neighbour_difference < MAX_NEIGHBOUR_DIFFERENCE * distant_difference
    )


def clips_note(count: int, num_images: int = 0) -> str:
    """Return the note that data are opened as clips, some of which may be images."""
    images_text = f", {num_images:,} of them images, read as one frame" if num_images else ""
    return f"the data are {count:,} clips{images_text}; `--frames` and `--stride` select the frames"


def list_class_clips(folder: str, stills: bool = False) -> list[str]:
    """List the clips below a folder, and with `stills` the images."""
    return list_clips(folder, 1, stills) or []


def to_clip_files(split: Split) -> ClipFiles:
    """Convert a split of files to clips."""
    assert isinstance(split, FileSplit)
    return ClipFiles(split.paths, split.labels)
