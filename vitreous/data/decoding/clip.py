"""What a clip is, and which of its frames are read.

Frames are counted as they are decoded, whatever rate a file announces, and so are the same everywhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np

from vitreous.errors import DataError

DEFAULT_CLIP_FRAMES = 8  # of a clip that a run reads, and a check looks at, where nothing says otherwise
MAX_FRAMES = 2**17  # of a clip: more than an hour at 30 frames a second
MAX_FRAME_PIXELS = 36_000_000  # of a frame: 7680 x 4320 are less
MAX_CLIP_BYTES = 2**30  # of the pixels of the frames that are read at a time
TIME_TOLERANCE = 1e-4  # seconds by which containers round times: a frame at 0.0333 is at 1/30
SHORTEN_CLIP_HINT = "take fewer --frames, or scale the clip down"


class Clip(ABC):
    """A clip that has been opened: `len` frames of `size` (height, width), read by their numbers.

    `times`: seconds from the first frame to each; empty where nothing says so (a folder of pictures, an array).
    """

    name: str
    size: tuple[int, int]
    times: Sequence[float] = ()

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def frames(self, numbers: Sequence[int]) -> Iterator[np.ndarray]:
        """The frames of these numbers, which rise: (H, W, 3) uint8 each. Raises DataError."""

    def read(self, numbers: np.ndarray) -> np.ndarray:
        """Frames of any numbers (T,), repeated ones too: (T, H, W, 3) uint8. Raises DataError for frames that cannot be
        decoded or are of other sizes, and for more than MAX_BYTES."""
        height, width = self.size
        if (total := len(numbers) * height * width * 3) > MAX_CLIP_BYTES:
            problem = f"{len(numbers)} frames of {width} x {height} pixels take {total >> 20} MiB"
            raise DataError(f"{self.name}: {problem}, more than {MAX_CLIP_BYTES >> 20}", SHORTEN_CLIP_HINT)
        pixels = np.empty((len(numbers), height, width, 3), np.uint8)
        places = np.unique(numbers)
        for number, frame in zip(places, self.frames(places.tolist()), strict=True):
            if frame.shape[:2] != self.size:
                one, other = (f"{wide} x {high}" for high, wide in (self.size, frame.shape[:2]))
                raise DataError(f"{self.name}: its frames are of 2 sizes, {one} and {other}", "make them one size")
            pixels[numbers == number] = frame
        return pixels


class ClipSegment(Clip):
    """The frames of a clip from `start` to before `end`, seconds after its first frame.

    Raises DataError where nothing says when its frames are shown, and where none is shown then.
    """

    def __init__(self, clip: Clip, start: float, end: float) -> None:
        self.name, self.size, self.whole = clip.name, clip.size, clip
        times = np.asarray(clip.times, np.float64)
        if not len(times) or (len(times) > 1 and not times.any()):
            problem = f"{self.name}: nothing says when its frames are shown, and start and end are seconds"
            raise DataError(problem, "list the whole clip, or write the part to a file of its own")
        inside = np.flatnonzero((times >= start - TIME_TOLERANCE) & (times < end - TIME_TOLERANCE))
        if not len(inside):
            problem = f"{self.name}: no frame is shown then; the last of {len(times)} is at {times[-1]:.3g} s"
            raise DataError(problem, "mend start and end")
        self.first, self.times = int(inside[0]), times[inside] - times[inside[0]]

    def __len__(self) -> int:
        return len(self.times)

    def frames(self, numbers: Sequence[int]) -> Iterator[np.ndarray]:
        """(H, W, 3) uint8 each. Raises DataError."""
        return self.whole.frames([self.first + number for number in numbers])


def check_clip_limits(size: tuple[int, int], count: int, name: str) -> None:
    """Raise DataError for frames of no pixels or of more than MAX_PIXELS, and for none or more than MAX_FRAMES."""
    height, width = size
    if not height * width or not count:
        raise DataError(f"{name}: {'no frames' if not count else 'frames without pixels'}", "remove it")
    if height * width > MAX_FRAME_PIXELS:
        raise DataError(f"{name}: frames of {width} x {height} pixels, more than {MAX_FRAME_PIXELS:,}", "scale it down")
    if count > MAX_FRAMES:
        raise DataError(f"{name}: more than {MAX_FRAMES:,} frames", "cut it into clips")


def sample_frames_evenly(count: int, frames: int, draws: np.ndarray | float = 0.5) -> np.ndarray:
    """Numbers of `frames` frames spread over `count`, (T,) int64: one of each of T equal parts, the middle one, or the
    one at `draws` (T,) in [0, 1) of its part.

        frame t = floor((t + draw) count / T)
    """
    return np.minimum(np.floor((np.arange(frames) + draws) * count / frames), count - 1).astype(np.int64)


def sample_frames_by_stride(count: int, frames: int, stride: int, draw: float = 0.5) -> np.ndarray:
    """Numbers of `frames` frames `stride` apart, (T,) int64, from the start that lies at `draw` in [0, 1) of those that
    there are; the last frame stands for those that a short clip lacks. A draw of 1 is the last start."""
    starts = max(count - (frames - 1) * stride, 1)
    return np.minimum(min(int(draw * starts), starts - 1) + stride * np.arange(frames), count - 1)
