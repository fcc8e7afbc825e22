"""Decode video files with PyAV (extra `video`), which includes FFmpeg.

The format is determined from the first bytes and passed to FFmpeg, since some of FFmpeg's formats are lists of files
and URLs that it would open. A file is decoded once to count its frames, and again if they exceed the memory limit.
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

MAX_BUFFERED_BYTES = 2**28  # maximum bytes of decoded frames kept between counting and reading
DURATION_TOLERANCE = 0.5  # seconds by which the stated duration may exceed the last frame
#: offset, first bytes, and FFmpeg's name of the format
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
    """Return FFmpeg's name of a video file's format; an empty string for anything else."""
    if content.startswith(b"RIFF") and content[8:12] == b"AVI ":
        return "avi"
    return next((name for offset, signature, name in CONTAINER_SIGNATURES if content.startswith(signature, offset)), "")


class VideoClip(Clip):
    """A video file, decoded once to count its frames, which are rotated upright according to its metadata.

    Raises DataError for a damaged or truncated file or one without a video stream, and if PyAV is missing.
    """

    def __init__(self, content: bytes, name: str) -> None:
        if find_spec("av") is None:
            raise DataError(f"{name}: videos need PyAV, which is not installed", install_hint("video"))
        self.name, self.content = name, content
        times, buffered_frames, size = list[float | None](), list[Any](), 0
        self.buffered_frames: list[Any] | None = buffered_frames
        for frame in iterate_video_frames(content, name):
            if not times:
                height, width = frame.height, frame.width
                self.size = (width, height) if frame.rotation % 180 else (height, width)
            times.append(frame.time)
            check_clip_limits((frame.height, frame.width), len(times), name)
            size += sum(plane.buffer_size for plane in frame.planes)
            if size <= MAX_BUFFERED_BYTES:
                buffered_frames.append(frame)
            else:
                self.buffered_frames = None
                buffered_frames.clear()
        self.count, known_times = len(times), [time for time in times if time is not None]
        self.times = np.array(known_times) - known_times[0] if len(known_times) == len(times) else ()

    def __len__(self) -> int:
        return self.count

    def decode_frames(self, frame_indices: Sequence[int]) -> Iterator[np.ndarray]:
        """Yield (H, W, 3) uint8 frames. Raises DataError."""
        from av.video.reformatter import VideoReformatter

        reformatter = VideoReformatter()  # shared by all frames: its creation takes longer than a small frame
        if self.buffered_frames is not None:
            yield from (frame_to_rgb(self.buffered_frames[index], reformatter) for index in frame_indices)
            return
        index_iterator = iter(frame_indices)
        next_index = next(index_iterator, None)
        for index, frame in enumerate(iterate_video_frames(self.content, self.name)):
            if index == next_index:
                yield frame_to_rgb(frame, reformatter)
                next_index = next(index_iterator, None)
            if next_index is None:
                return


def frame_to_rgb(frame: Any, reformatter: Any) -> np.ndarray:
    """Convert a PyAV frame to (H, W, 3) uint8, upright."""
    pixels = reformatter.reformat(frame, format="rgb24").to_ndarray()
    return np.rot90(pixels, round(frame.rotation / 90) % 4)


def iterate_video_frames(content: bytes, name: str) -> Iterator[Any]:
    """Yield all frames of a video file in display order, as PyAV frames. Raises DataError."""
    import av
    from av.error import FFmpegError

    count, last_time, last_duration = 0, 0.0, 0.0
    try:
        with av.open(io.BytesIO(content), "r", format=detect_demuxer(content), metadata_errors="replace") as container:
            video_streams = [stream for stream in container.streams.video if not is_cover_art(stream)]
            if not video_streams:
                problem = "only audio" if container.streams.audio else "no video stream"
                raise DataError(f"{name}: a file with {problem}", "delete it")
            stream, context = video_streams[0], video_streams[0].codec_context
            check_clip_limits((context.height or 1, context.width or 1), 1, name)
            context.thread_count = 1
            context.options = {"max_pixels": str(MAX_FRAME_PIXELS)}
            for frame in container.decode(stream):
                if frame.is_corrupt:
                    raise DataError(f"{name}: frame {count} is damaged, or the file is truncated", "fix or delete it")
                count, last_time = count + 1, frame.time if frame.time is not None else last_time
                last_duration = float((frame.duration or 0) * (frame.time_base or 0))
                yield frame
            start_time = float((stream.start_time or 0) * (stream.time_base or 0))
            length = 0.0 if container.streams.audio else (container.duration or 0) / av.time_base
            has_exact_duration = length and container.format.name.startswith(
                "matroska"
            )  # other formats round or estimate it
            if stream.frames > count + 1 and count < 0.9 * stream.frames:
                shortfall = f"{count} frames of {stream.frames}"
            elif has_exact_duration and is_cut_short(length, last_time - start_time, count, last_duration):
                shortfall = f"{last_time - start_time:.1f} seconds of {length:.1f}"
            else:
                shortfall = "" if count else "no frame"
    except (DataError, MemoryError):
        raise
    except Exception as error:  # PyAV's exceptions for broken files are undocumented
        problem = (
            (getattr(error, "strerror", "") or describe_exception(error))
            if isinstance(error, FFmpegError)
            else "incomplete header"
        )
        raise DataError(f"{name}: cannot be read as a video ({problem})", "fix or delete it") from None
    if shortfall:
        raise DataError(f"{name}: cut short, {shortfall}", "fix or delete the file")


def is_cut_short(length: float, last_time: float, count: int, last_duration: float) -> bool:
    """Return whether a file ends long before its stated duration `length` in seconds: the last of `count` frames begins
    at `last_time` seconds, and is stated to last `last_duration`, 0 if unknown."""
    frame_duration = last_time / (count - 1) if count > 1 else last_duration or length
    return length - last_time - frame_duration > max(0.1 * length, min(DURATION_TOLERANCE, 2 * frame_duration))


def is_cover_art(stream: Any) -> bool:
    """Return whether a video stream is the cover art of an audio file."""
    from av.stream import Disposition

    return bool(stream.disposition & Disposition.attached_pic)
