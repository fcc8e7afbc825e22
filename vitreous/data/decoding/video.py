"""Video files, by PyAV (extra `video`), which brings FFmpeg along.

The format is chosen by the first bytes, and FFmpeg is given its name: others of its formats are lists of files and
addresses, and it would open them. A file is decoded once to count its frames, and again where they are more than fit
in memory.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np

from vitreous.data.decoding.clip import MAX_FRAME_PIXELS, Clip, check_clip_limits
from vitreous.data.decoding.decode import describe_exception
from vitreous.errors import DataError, install_hint

MAX_BUFFERED_BYTES = 2**28  # bytes of decoded frames that stay in memory between counting and reading
DURATION_TOLERANCE = 0.5  # seconds that a file may announce beyond its last frame
#: offset and first bytes of a file, and FFmpeg's name of the format
CONTAINER_SIGNATURES = (
    (4, b"ftyp", "mov"),
    (4, b"moov", "mov"),
    (4, b"mdat", "mov"),
    (4, b"wide", "mov"),
    (4, b"free", "mov"),
    (4, b"skip", "mov"),
    (0, b"\x1a\x45\xdf\xa3", "matroska"),
    (0, b"\0\0\1\xba", "mpeg"),
    (0, b"\0\0\1\xb3", "mpegvideo"),
)


def detect_demuxer(content: bytes) -> str:
    """FFmpeg's name of the format of a video file; an empty string for anything else."""
    if content.startswith(b"RIFF") and content[8:12] == b"AVI ":
        return "avi"
    return next((name for offset, mark, name in CONTAINER_SIGNATURES if content.startswith(mark, offset)), "")


class VideoClip(Clip):
    """A video file, decoded once to count its frames; they turn upright as the file says.

    Raises DataError for one that is damaged, cut short or has no pictures, and where PyAV is missing.
    """

    def __init__(self, content: bytes, name: str) -> None:
        if find_spec("av") is None:
            raise DataError(f"{name}: videos need PyAV, which is not installed", install_hint("video"))
        self.name, self.content = name, content
        times, held, size = list[float | None](), list[Any](), 0
        self.held: list[Any] | None = held
        for frame in iterate_video_frames(content, name):
            if not times:
                height, width = frame.height, frame.width
                self.size = (width, height) if frame.rotation % 180 else (height, width)
            times.append(frame.time)
            check_clip_limits((frame.height, frame.width), len(times), name)
            size += sum(plane.buffer_size for plane in frame.planes)
            if size <= MAX_BUFFERED_BYTES:
                held.append(frame)
            else:
                self.held = None
                held.clear()
        self.count, known = len(times), [time for time in times if time is not None]
        self.times = np.array(known) - known[0] if len(known) == len(times) else ()

    def __len__(self) -> int:
        return self.count

    def frames(self, numbers: Sequence[int]) -> Iterator[np.ndarray]:
        """(H, W, 3) uint8 each. Raises DataError."""
        from av.video.reformatter import VideoReformatter

        reformatter = VideoReformatter()  # one for all frames: to prepare it takes longer than a small frame
        if self.held is not None:
            yield from (frame_to_rgb(self.held[number], reformatter) for number in numbers)
            return
        wanted = iter(numbers)
        following = next(wanted, None)
        for number, frame in enumerate(iterate_video_frames(self.content, self.name)):
            if number == following:
                yield frame_to_rgb(frame, reformatter)
                following = next(wanted, None)
            if following is None:
                return


def frame_to_rgb(frame: Any, reformatter: Any) -> np.ndarray:
    """PyAV's frame -> (H, W, 3) uint8, upright."""
    pixels = reformatter.reformat(frame, format="rgb24").to_ndarray()
    return np.rot90(pixels, round(frame.rotation / 90) % 4)


def iterate_video_frames(content: bytes, name: str) -> Iterator[Any]:
    """Every frame of a video file, in the order in which they are shown, as PyAV has them. Raises DataError."""
    import av
    from av.error import FFmpegError

    count, last, shown_for = 0, 0.0, 0.0
    try:
        with av.open(io.BytesIO(content), format=detect_demuxer(content), metadata_errors="replace") as container:
            shown = [stream for stream in container.streams.video if not is_cover_art(stream)]
            if not shown:
                problem = "no pictures, audio alone" if container.streams.audio else "no pictures"
                raise DataError(f"{name}: a file with {problem}", "remove it")
            stream, context = shown[0], shown[0].codec_context
            check_clip_limits((context.height or 1, context.width or 1), 1, name)
            context.thread_count = 1
            context.options = {"max_pixels": str(MAX_FRAME_PIXELS)}
            for frame in container.decode(stream):
                if frame.is_corrupt:
                    raise DataError(f"{name}: frame {count} is damaged, or the file cut short", "mend or remove it")
                count, last = count + 1, frame.time if frame.time is not None else last
                shown_for = float((frame.duration or 0) * (frame.time_base or 0))
                yield frame
            begin = float((stream.start_time or 0) * (stream.time_base or 0))
            length = 0.0 if container.streams.audio else (container.duration or 0) / av.time_base
            ends = length and container.format.name.startswith("matroska")  # others round, or guess
            if stream.frames > count + 1 and count < 0.9 * stream.frames:
                announced = f"{count} frames of {stream.frames}"
            elif ends and is_cut_short(length, last - begin, count, shown_for):
                announced = f"{last - begin:.1f} seconds of {length:.1f}"
            else:
                announced = "" if count else "no frame"
    except (DataError, MemoryError):
        raise
    except Exception as error:  # what PyAV raises for broken files is not listed
        problem = (
            (getattr(error, "strerror", "") or describe_exception(error))
            if isinstance(error, FFmpegError)
            else "no whole header"
        )
        raise DataError(f"{name}: cannot be read as a video ({problem})", "mend or remove it") from None
    if announced:
        raise DataError(f"{name}: cut short, {announced}", "mend or remove the file")


def is_cut_short(length: float, last: float, count: int, shown_for: float) -> bool:
    """Whether a file of so many seconds ends long before: its last of `count` frames begins at `last` seconds, and is
    said to be shown for `shown_for`, 0 where nothing says so."""
    usual = last / (count - 1) if count > 1 else shown_for or length
    return length - last - usual > max(0.1 * length, min(DURATION_TOLERANCE, 2 * usual))


def is_cover_art(stream: Any) -> bool:
    """Whether a stream of pictures is the cover of a piece of music."""
    from av.stream import Disposition

    return bool(stream.disposition & Disposition.attached_pic)
