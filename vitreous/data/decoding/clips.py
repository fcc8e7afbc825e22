"""Open clips from video files, GIFs, folders of images, or arrays. Video files need PyAV, all others only Pillow."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence

import numpy as np
from PIL import Image

from vitreous.data.decoding.clip import MAX_FRAME_PIXELS, MAX_FRAMES, Clip, check_clip_limits
from vitreous.data.decoding.decode import (
    IMAGE_FILE_SUFFIXES,
    convert_to_8bit,
    decode_to_pillow,
    describe_exception,
    read_input_file,
    read_upright_size,
    suppress_warnings,
)
from vitreous.data.decoding.gate import identify_file_format
from vitreous.data.decoding.video import VideoClip, detect_demuxer
from vitreous.data.layouts.classes import natural_sort_key
from vitreous.errors import DataError, escape_unprintable

VIDEO_SUFFIXES = frozenset([".mp4", ".m4v", ".mov", ".webm", ".mkv", ".avi", ".mpg", ".mpeg"])
GIF_SUFFIX = ".gif"  # of a clip if the GIF is animated, or if all other files of the dataset are clips
KNOWN_FORMATS_HINT = "use mp4, mov, webm, mkv, avi, mpeg or animated GIF"


class ArrayClip(Clip):
    """A clip in memory: pixels (T, H, W, 1 or 3) uint8. Raises DataError for other arrays."""

    def __init__(self, pixels: np.ndarray, name: str) -> None:
        if pixels.ndim != 4 or pixels.shape[3] not in (1, 3) or pixels.dtype != np.uint8 or not pixels.size:
            problem = f"pixels of {pixels.dtype}, {' x '.join(map(str, pixels.shape))}"
            raise DataError(f"{name}: {problem}, are not a clip", "use uint8 of frames x height x width x 3")
        self.name, self.pixels = name, pixels
        self.size = (pixels.shape[1], pixels.shape[2])

    def __len__(self) -> int:
        return len(self.pixels)

    def decode_frames(self, frame_indices: Sequence[int]) -> Iterator[np.ndarray]:
        """Yield the frames at the indices, (H, W, 1 or 3) uint8 each."""
        return (self.pixels[index] for index in frame_indices)


class ImageFilesClip(Clip):
    """A clip whose frames are the image files `paths`, in this order. Raises DataError if there are none, and if the
    first is unreadable."""

    def __init__(self, paths: Sequence[str], name: str) -> None:
        if not paths:
            raise DataError(f"{name}: a folder without images is not a clip", "add its frames as 0001.jpg, 0002.jpg, …")
        self.name, self.paths = name, paths
        content = read_input_file(paths[0])
        width, height = read_upright_size(content, escape_unprintable(paths[0]), MAX_FRAME_PIXELS)
        if not width:
            width, height = decode_to_pillow(content, 3, escape_unprintable(paths[0])).size
        self.size = (height, width)

    def __len__(self) -> int:
        return len(self.paths)

    def decode_frames(self, frame_indices: Sequence[int]) -> Iterator[np.ndarray]:
        """Yield the images at the indices, (H, W, 3) uint8 each. Raises DataError for an unreadable image."""
        return (np.asarray(decode_to_pillow(self.paths[index])) for index in frame_indices)


class GifClip(Clip):
    """A clip from the bytes of a GIF with one or more frames. Raises DataError for a damaged or truncated file."""

    def __init__(self, content: bytes, name: str) -> None:
        self.name, self.content = name, content
        durations, is_complete = parse_gif_durations(content)
        if not is_complete:
            raise DataError(f"{name}: cut short after {len(durations)} frames", "fix or delete the file")
        width, height = (int.from_bytes(content[offset : offset + 2], "little") for offset in (6, 8))
        self.size = (height, width)
        check_clip_limits(self.size, len(durations), name)
        self.times = np.cumsum([0, *durations[:-1]]) / 100

    def __len__(self) -> int:
        return len(self.times)

    def decode_frames(self, frame_indices: Sequence[int]) -> Iterator[np.ndarray]:
        """Yield the frames at increasing indices, (H, W, 3) uint8 each, composited over white. Raises DataError for
        damaged frames."""
        try:
            with suppress_warnings(), Image.open(io.BytesIO(self.content), formats=("GIF",)) as image:
                for index in frame_indices:
                    image.seek(index)
                    yield np.asarray(convert_to_8bit(image.copy(), "RGB", self.name))
        except (DataError, MemoryError):
            raise
        except Exception as error:  # Pillow's exceptions for broken files are undocumented
            problem = f"{self.name}: cannot be read as a clip ({describe_exception(error)})"
            raise DataError(problem, "fix or delete the file") from None


def open_clip(raw: bytes | np.ndarray | str | os.PathLike[str] | Clip, name: str | None = None) -> Clip:
    """Open a clip: a video file or its bytes, a folder of images, or pixels (T, H, W, 3) uint8. An opened clip is
    returned unchanged.

    The format of a file is determined by its content, not by its name. Raises DataError, with `name` or the path, for
    unsupported, damaged and truncated files, and if PyAV is needed and not installed.
    """
    if isinstance(raw, Clip):
        return raw
    name = name or ("clip" if isinstance(raw, (bytes, np.ndarray)) else escape_unprintable(raw))
    if isinstance(raw, np.ndarray):
        return ArrayClip(raw, name)
    if not isinstance(raw, bytes):
        if os.path.isdir(raw):
            return ImageFilesClip(list_frame_images(os.fspath(raw)), name)
        raw = read_input_file(raw)
    if not raw:
        raise DataError(f"{name}: empty file", "delete it")
    if raw.startswith(b"GIF8"):
        return GifClip(raw, name)
    if not detect_demuxer(raw):
        detected = f", but {identify_file_format(raw)}" if identify_file_format(raw) else ""
        raise DataError(f"{name}: not a clip of a known format{detected}", KNOWN_FORMATS_HINT)
    return VideoClip(raw, name)


def parse_gif_durations(content: bytes) -> tuple[list[int], bool]:
    """Read the frame durations of a GIF from its blocks (GIF89a, section 17), without decoding pixels.

    Returns the durations of the frames in 1/100 s, and whether the file is complete, that is, has its end marker. A
    file with more than MAX_FRAMES frames counts as complete.
    """
    durations, delay, offset = list[int](), 0, 13 + count_palette_bytes(content[10:11])
    while offset < len(content) and len(durations) <= MAX_FRAMES:
        block = content[offset]
        if block == 0x3B:
            return durations, True
        if block == 0x2C:  # an image: position, palette, minimum code size
            durations.append(delay)
            offset += 11 + count_palette_bytes(content[offset + 9 : offset + 10])
        elif block == 0x21:
            if content[offset + 1 : offset + 3] == b"\xf9\x04":
                delay = int.from_bytes(content[offset + 4 : offset + 6], "little")
            offset += 2
        else:
            return durations, False
        while offset < len(content) and content[offset]:
            offset += 1 + content[offset]
        offset += 1
    return durations, len(durations) > MAX_FRAMES


def count_palette_bytes(flags: bytes) -> int:
    """Return the number of bytes of the palette that follows the screen header or an image header of a GIF. `flags` is
    the flags byte of that header; an empty value gives 0."""
    return 3 << (1 + (flags[0] & 7)) if flags and flags[0] & 0x80 else 0


def is_animated_gif(content: bytes) -> bool:
    """Return whether the bytes of a file are a GIF with several frames."""
    return content.startswith(b"GIF8") and len(parse_gif_durations(content)[0]) > 1


def list_frame_images(folder: str) -> list[str]:
    """List the image files of a folder, in natural order (2 before 10). Raises DataError if it cannot be read."""
    try:
        names = [entry.name for entry in os.scandir(folder) if not entry.name.startswith(".")]
    except OSError as error:
        raise DataError(
            f"{escape_unprintable(folder)}: cannot be read ({describe_exception(error)})", "fix its permissions"
        ) from None
    image_names = [name for name in names if os.path.splitext(name)[1].lower() in IMAGE_FILE_SUFFIXES]
    return [os.path.join(folder, name) for name in sorted(image_names, key=natural_sort_key)]
