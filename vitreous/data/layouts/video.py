"""Clips: `[SPLIT/]CLASS/*.mp4` and other video files, animated GIFs, and folders of frames, `[SPLIT/]CLASS/CLIP/*.jpg`.

A folder is opened as clips if its classes contain only clips; a single photo among GIFs makes all of them images. A
folder of images is a clip if their sizes are equal and their names consist of a common prefix and zero-padded
consecutive numbers from 0 or 1. Other numbered images are separate images.
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
MAX_COMPARED_PAIRS = 8  # number of pairs of images of a folder that are compared
MAX_NEIGHBOUR_DIFFERENCE = 0.6  # maximum ratio of the differences of adjacent and of distant frames of a clip
MAX_STILL_DIFFERENCE = 2.0  # mean difference, of 255, up to which images are considered equal
MAX_PROBED_CLIPS = 16  # number of folders of frames, or of GIFs, that are inspected as a sample of all


@dataclass(frozen=True)
class ClipFiles(FileSplit):
    """Split of clips, with labels (n,) int64 or (n, K) float32. `paths` are video files, GIFs and folders of frames.
    `segments`, (n, 2) float64, are start and end in seconds, 0 and infinity for a complete clip; None: all clips are
    complete."""

    axes: ClassVar[int] = 3
    kind: ClassVar[str] = "clips"
    segments: np.ndarray | None = None

    def get_segment(self, sample: int) -> tuple[float, float] | None:
        """Return the start and end of a sample's segment in seconds; None for a complete clip."""
        start, end = (0.0, math.inf) if self.segments is None else self.segments[sample].tolist()
        return None if (start, end) == (0.0, math.inf) else (start, end)

    def open_clip(self, sample: int) -> Clip:
        """Open the clip of a sample; an image is a clip of one frame. Raises DataError if it cannot be read."""
        if is_still_image(self.path(sample)):
            return ImageFilesClip([self.path(sample)], self.name(sample))
        return self.cut_segment(sample, open_clip(self.path(sample), self.name(sample)))

    @property
    def num_stills(self) -> int:
        """The number of samples that are images rather than clips."""
        return sum(is_still_image(self.path(sample)) for sample in range(len(self)))

    def cut_segment(self, sample: int, clip: Clip) -> Clip:
        """Restrict the opened clip of a sample to the sample's segment. Raises DataError for an empty segment."""
        segment = self.get_segment(sample)
        return clip if segment is None else ClipSegment(clip, *segment)

    def name(self, sample: int) -> str:
        """Return the path of a clip for messages, with the start and end of its segment."""
        segment = self.get_segment(sample)
        if segment is None:
            return super().name(sample)
        return f"{super().name(sample)} from {segment[0]:g} s" + (
            f" to {segment[1]:g} s" if math.isfinite(segment[1]) else ""
        )

    def take(self, indices: np.ndarray, labels: np.ndarray | None = None) -> ClipFiles:
        """Return a split of the clips at `indices` (m,), in this order; `labels` replaces their labels."""
        return replace(
            super().take(indices, labels), segments=None if self.segments is None else self.segments[indices]
        )

    def update(self, digest: Any) -> None:
        """Update a hashlib digest with the paths and the segments of the clips."""
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
    """Split of clips in a store, such as tar archives; each clip is a video file or a GIF."""

    axes: ClassVar[int] = 3
    kind: ClassVar[str] = "clips"

    def open_clip(self, sample: int) -> Clip:
        """Open the clip of a sample. Raises DataError if it cannot be read."""
        return open_clip(self.raw(sample), self.name(sample))

    def take(self, indices: np.ndarray, labels: np.ndarray | None = None) -> StoredClips[S]:
        """Return a split of the clips at `indices` (m,), in this order; `labels`, (m,) or (m, K), replaces their
        labels."""
        return StoredClips(self.store, self.row_indices[indices], self.labels[indices] if labels is None else labels)


def is_still_image(path: str) -> bool:
    """Return whether a path is that of an image file, by its suffix, rather than that of a clip."""
    suffix = os.path.splitext(path)[1].lower()
    return suffix in IMAGE_FILE_SUFFIXES and suffix != GIF_SUFFIX and not os.path.isdir(path)


def open_sample(split: Split, sample: int) -> bytes | np.ndarray | Clip:
    """Open a sample of a split, undecoded: a clip, or the stored bytes or pixels (H, W[, C]) of an image. Raises
    DataError if it cannot be read."""
    return split.open_clip(sample) if isinstance(split, ClipFiles | StoredClips) else split.raw(sample)


def has_only_clips(root: Path) -> bool:
    """Return whether the class folders of a dataset folder, or of its split folders, contain only clips. If all are
    GIFs, they must be animated."""
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
    """Return whether some paths are not GIFs, or else whether the GIFs are animated, by a sample of them."""
    if any(not path.lower().endswith(GIF_SUFFIX) for path in paths):
        return True
    return all(is_animated_gif(read_input_file(paths[index])) for index in choose_probe_indices(len(paths)))


def choose_probe_indices(count: int) -> list[int]:
    """Choose up to MAX_PROBED_CLIPS indices, evenly spread over 0 to `count` - 1."""
    return np.linspace(0, count - 1, min(MAX_PROBED_CLIPS, count)).astype(int).tolist()


def has_clips(root: Path) -> bool:
    """Return whether there is any clip below a dataset folder: a video file, an animated GIF or a folder of frames."""
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

    Folders of frames must be at least `depth` levels below `root`. If there are images that are not frames, `stills`
    lists them too; otherwise the function returns None. A folder linked twice is visited once.
    """
    clips, visited_folders, pending, probes_left = list[str](), set[str](), [(root, 0)], MAX_PROBED_CLIPS
    while pending:
        folder, level = pending.pop()
        real_path = os.path.realpath(folder)
        if real_path in visited_folders:
            continue
        visited_folders.add(real_path)
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
    """Return whether the names of images are those of frames: zero-padded numbers of one length, consecutive from 0 or
    1, with the same text before and after the number."""
    matches = [match.groups() for name in names if (match := NUMBERED_FILE_NAME.fullmatch(name))]
    is_uniform = len({(prefix, len(digits), suffix) for prefix, digits, suffix in matches}) == 1
    if len(matches) < len(names) or len(names) < 2 or not is_uniform or len(matches[0][1]) < 2:
        return False
    first_number, *other_numbers = sorted(int(digits) for _, digits, _ in matches)
    return first_number < 2 and other_numbers == list(range(first_number + 1, first_number + len(names)))


def has_uniform_size(folder: str) -> bool:
    """Return whether the first, the middle and the last image of a folder have the same size, by their headers."""
    paths = list_frame_images(folder)
    try:
        probed_paths = [paths[index] for index in (0, len(paths) // 2, -1)]
        return len({read_upright_size(read_input_file(path), escape_unprintable(path)) for path in probed_paths}) == 1
    except DataError:
        return True  # the error is raised when the clip is read


def open_clip_folder(root: Path, split_seed: int = 0, stills: bool = False) -> Data:
    """Open class folders of clips, with or without split folders, by the rules of `open_image_folder`.

    With `stills`, images among the clips are opened as clips of one frame. Raises DataError as `open_image_folder`.
    """
    split_folders = resolve_split_folders(root)
    list_files = partial(list_class_clips, stills=stills)
    paths_by_split = {name: list_class_files(folder, list_files) for name, folder in split_folders.items()}
    data = build_classification_data(root, split_folders, paths_by_split, split_seed, list_files)
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
    """Return the note for data whose classes all look like a folder of video frames: numbered images of one size. Such
    folders may be clips rather than classes. Returns an empty list for other data, and for classes in several
    splits."""
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
    """Return whether adjacent images of a folder are more similar than distant images, like the frames of a clip.

    The mean absolute difference of adjacent images, as grey thumbnails of 16 x 16 pixels, must be less than
    MAX_NEIGHBOUR_DIFFERENCE times that of images half the folder apart.
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
    """Return the note that data are opened as `count` clips, of which `num_images` are images."""
    images_text = f", {num_images:,} of them images, read as one frame" if num_images else ""
    return f"the data are {count:,} clips{images_text}; `--frames` and `--stride` select the frames"


def list_class_clips(folder: str, stills: bool = False) -> list[str]:
    """List the clips below a class folder, and with `stills` also the images; empty if there are none."""
    return list_clips(folder, 1, stills) or []


def to_clip_files(split: Split) -> ClipFiles:
    """Convert a split of files to clips."""
    assert isinstance(split, FileSplit)
    return ClipFiles(split.paths, split.labels)
