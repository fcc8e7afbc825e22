"""Clips, and the selection of their frames.

Frames are counted in decoding order, regardless of the frame rate in the header, so indices are the same on every
system.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np

from vitreous.errors import DataError

DEFAULT_CLIP_FRAMES = 8  # default frames for runs and checks
MAX_FRAMES = 2**17  # maximum frames of a clip: more than an hour at 30 frames/s
MAX_FRAME_PIXELS = 36_000_000  # maximum pixels of a frame; 7680 x 4320 are fewer
MAX_CLIP_BYTES = 2**30  # maximum bytes of the frames that are read together
TIME_TOLERANCE = 1e-4  # seconds of rounding in containers: a frame at 0.0333 is at 1/30
SHORTEN_CLIP_HINT = "use fewer --frames, or scale the clip down"


class Clip(ABC):
    """An opened clip: `len` frames of `size` (height, width), read by index.

    `times`: seconds of each frame after the first; empty if unknown (a folder of images, an array).
    """

    name: str
    size: tuple[int, int]
    times: Sequence[float] | np.ndarray = ()

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def decode_frames(self, frame_indices: Sequence[int]) -> Iterator[np.ndarray]:
        """Yield the frames at increasing indices: (H, W, 3) uint8 each. Raises DataError."""

    def read_frames(self, frame_indices: np.ndarray) -> np.ndarray:
        """Read frames at any indices (T,), repeated ones too: (T, H, W, 3) uint8. Raises DataError for frames that
        cannot be decoded or differ in size, and for more than MAX_CLIP_BYTES."""
        height, width = self.size
        if (total := len(frame_indices) * height * width * 3) > MAX_CLIP_BYTES:
            problem = f"{len(frame_indices)} frames of {width} x {height} pixels take {total >> 20} MiB"
            raise DataError(f"{self.name}: {problem}, more than {MAX_CLIP_BYTES >> 20}", SHORTEN_CLIP_HINT)
        pixels = np.empty((len(frame_indices), height, width, 3), np.uint8)
        unique_indices = np.unique(frame_indices)
        for frame_index, frame in zip(unique_indices, self.decode_frames(unique_indices.tolist()), strict=True):
            if frame.shape[:2] != self.size:
                expected_size, frame_size = (
                    f"{frame_width} x {frame_height}" for frame_height, frame_width in (self.size, frame.shape[:2])
                )
                raise DataError(
                    f"{self.name}: its frames have 2 sizes, {expected_size} and {frame_size}", "resize them to one size"
                )
            pixels[frame_indices == frame_index] = frame
        return pixels


class ClipSegment(Clip):
    """The frames of a clip from `start` until before `end`, in seconds after its first frame.

    Raises DataError if the clip has no frame times, and if no frame is in this interval.
    """

    def __init__(self, clip: Clip, start: float, end: float) -> None:
        self.name, self.size, self.source_clip = clip.name, clip.size, clip
        times = np.asarray(clip.times, np.float64)
        if not len(times) or (len(times) > 1 and not times.any()):
            problem = f"{self.name}: it has no frame times, which start and end need"
            raise DataError(problem, "list the clip without start and end, or save the segment as a separate file")
        frame_indices = np.flatnonzero((times >= start - TIME_TOLERANCE) & (times < end - TIME_TOLERANCE))
        if not len(frame_indices):
            problem = f"{self.name}: no frame is in this interval; the last of {len(times)} is at {times[-1]:.3g} s"
            raise DataError(problem, "correct start and end")
        self.first_frame, self.times = int(frame_indices[0]), times[frame_indices] - times[frame_indices[0]]

    def __len__(self) -> int:
        return len(self.times)

    def decode_frames(self, frame_indices: Sequence[int]) -> Iterator[np.ndarray]:
        """Yield (H, W, 3) uint8 frames. Raises DataError."""
        return self.source_clip.decode_frames([self.first_frame + index for index in frame_indices])


def check_clip_limits(size: tuple[int, int], count: int, name: str) -> None:
    """Raise DataError for frames without pixels or with more than MAX_FRAME_PIXELS, and for no frames or more than
    MAX_FRAMES."""
    height, width = size
    if not height * width or not count:
        raise DataError(f"{name}: {'no frames' if not count else 'frames without pixels'}", "delete it")
    if height * width > MAX_FRAME_PIXELS:
        raise DataError(f"{name}: frames of {width} x {height} pixels, more than {MAX_FRAME_PIXELS:,}", "scale it down")
    if count > MAX_FRAMES:
        raise DataError(f"{name}: more than {MAX_FRAMES:,} frames", "cut it into clips")


def sample_frames_evenly(count: int, frames: int, draws: np.ndarray | float = 0.5) -> np.ndarray:
    """Return indices of `frames` frames spread over `count`, (T,) int64: one from each of T equal segments, the middle
    one, or the one at `draws` (T,) in [0, 1) of its segment.

        frame t = floor((t + draw) count / T)
    """
    return np.minimum(np.floor((np.arange(frames) + draws) * count / frames), count - 1).astype(np.int64)


def sample_frames_by_stride(count: int, frames: int, stride: int, draw: float = 0.5) -> np.ndarray:
    """Return indices of `frames` frames, `stride` apart, (T,) int64, from the start at `draw` in [0, 1) of the possible
    ones; the last frame is repeated in short clips. A draw of 1 is the last start."""
    starts = max(count - (frames - 1) * stride, 1)
    return np.minimum(min(int(draw * starts), starts - 1) + stride * np.arange(frames), count - 1)
