"""The interface of clips, and the selection of their frames.

Frames are counted as they are decoded, regardless of the frame rate in the header, so that indices do not depend on the
system.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np

from vitreous.errors import DataError

DEFAULT_CLIP_FRAMES = 8  # default number of frames of an input, for training and `data check`
MAX_FRAMES = 2**17  # maximum frames of a clip: more than an hour at 30 frames/s
MAX_FRAME_PIXELS = 36_000_000  # maximum pixels of a frame; 7680 x 4320 are fewer
MAX_CLIP_BYTES = 2**30  # maximum bytes of the frames that one call reads
TIME_TOLERANCE = 1e-4  # seconds; containers round frame times: 0.0333 means 1/30
SHORTEN_CLIP_HINT = "use fewer --frames, or scale the clip down"


class Clip(ABC):
    """An opened clip, whose frames are read by index. `len(clip)` is the number of frames, `size` is (height, width).

    `times` are the times of the frames in seconds after the first frame, (len,); empty if they are unknown, as for a
    folder of images and an array.
    """

    name: str
    size: tuple[int, int]
    times: Sequence[float] | np.ndarray = ()

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def decode_frames(self, frame_indices: Sequence[int]) -> Iterator[np.ndarray]:
        """Yield the frames at increasing indices, (H, W, 3) uint8 each. Raises DataError for unreadable frames."""

    def read_frames(self, frame_indices: np.ndarray) -> np.ndarray:
        """Read the frames at indices (T,), in any order and with repetitions: (T, H, W, 3) uint8. Raises DataError for
        frames that cannot be decoded or differ in size, and for more than MAX_CLIP_BYTES."""
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
    """A segment of a clip: its frames from `start` (inclusive) to `end` (exclusive), in seconds after the first frame.

    Raises DataError if the clip has no frame times, and if the segment has no frames.
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
        """Yield the frames at increasing indices of the segment, (H, W, 3) uint8 each. Raises DataError for unreadable
        frames."""
        return self.source_clip.decode_frames([self.first_frame + index for index in frame_indices])


def check_clip_limits(size: tuple[int, int], count: int, name: str) -> None:
    """Raise DataError for a clip without frames or with more than MAX_FRAMES, and for frames without pixels or with
    more than MAX_FRAME_PIXELS. `size` is (height, width), `count` the number of frames."""
    height, width = size
    if not height * width or not count:
        raise DataError(f"{name}: {'no frames' if not count else 'frames without pixels'}", "delete it")
    if height * width > MAX_FRAME_PIXELS:
        raise DataError(f"{name}: frames of {width} x {height} pixels, more than {MAX_FRAME_PIXELS:,}", "scale it down")
    if count > MAX_FRAMES:
        raise DataError(f"{name}: more than {MAX_FRAMES:,} frames", "cut it into shorter clips")


def sample_frames_evenly(count: int, frames: int, draws: np.ndarray | float = 0.5) -> np.ndarray:
    """Choose T = `frames` frames that are spread over a clip of `count` frames: their indices (T,) int64.

    The clip is divided into T equal segments. `draws` (T,) in [0, 1) is the position of the frame in each segment; by
    default, it is the middle.

        frame t = floor((t + draw) count / T)
    """
    return np.minimum(np.floor((np.arange(frames) + draws) * count / frames), count - 1).astype(np.int64)


def sample_frames_by_stride(count: int, frames: int, stride: int, draw: float = 0.5) -> np.ndarray:
    """Choose T = `frames` frames at a distance of `stride` from a clip of `count` frames: their indices (T,) int64.

    `draw` in [0, 1] selects the first frame: 0 is the first possible start, 1 the last. In a clip that is too short,
    the last frame is repeated.
    """
    starts = max(count - (frames - 1) * stride, 1)
    return np.minimum(min(int(draw * starts), starts - 1) + stride * np.arange(frames), count - 1)
