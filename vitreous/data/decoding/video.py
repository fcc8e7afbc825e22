"""Decode video files with PyAV (extra `video`), which includes FFmpeg.

The container format is determined from the first bytes and passed to FFmpeg. FFmpeg must not choose the format, since
some of its formats are lists of files and URLs, which it would open. A file is decoded once to count its frames. If the
frames exceed a memory limit, the file is decoded again to read them.
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

MISSING_PYAV = "videos need PyAV, which is not installed"
MAX_BUFFERED_BYTES = 2**28  # maximum bytes of decoded frames kept between counting and reading
DURATION_TOLERANCE = 0.5  # seconds by which the duration in the header may exceed the end of the last frame
#: container formats: offset of the signature, signature, FFmpeg's name of the demuxer
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
    """Return FFmpeg's name of the demuxer for a video file; an empty string for other files."""
    if content.startswith(b"RIFF") and content[8:12] == b"AVI ":
        return "avi"
    return next((name for offset, signature, name in CONTAINER_SIGNATURES if content.startswith(signature, offset)), "")


class VideoClip(Clip):
    """An opened video file. Frames are rotated upright according to the metadata.

    Opening decodes the file once to count its frames. Raises DataError for a damaged or truncated file, for a file
    without a video stream, and if PyAV is not installed.
    """

    def __init__(self, content: bytes, name: str) -> None:
        if find_spec("av") is None:
            raise DataError(f"{name}: {MISSING_PYAV}", install_hint("video"))
        self.name, self.content = name, content
        times, buffered_frames, decoded_bytes = list[float | None](), list[Any](), 0
        self.buffered_frames: list[Any] | None = buffered_frames
        for frame in iterate_video_frames(content, name):
            if not times:
                height, width = frame.height, frame.width
                self.size = (width, height) if frame.rotation % 180 else (height, width)
            times.append(frame.time)
            check_clip_limits((frame.height, frame.width), len(times), name)
            decoded_bytes += sum(plane.buffer_size for plane in frame.planes)
            if decoded_bytes <= MAX_BUFFERED_BYTES:
                buffered_frames.append(frame)
            else:
                self.buffered_frames = None
                buffered_frames.clear()
        self.count, known_times = len(times), [time for time in times if time is not None]
        self.times = np.array(known_times) - known_times[0] if len(known_times) == len(times) else ()

    def __len__(self) -> int:
        return self.count

    def decode_frames(self, frame_indices: Sequence[int]) -> Iterator[np.ndarray]:
        """Yield the frames at increasing indices, (H, W, 3) uint8 each. Raises DataError for a damaged file."""
        from av.video.reformatter import VideoReformatter

        # shared by all frames, since its creation takes longer than the conversion of a small frame
        reformatter = VideoReformatter()
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
    """Convert a PyAV frame to RGB pixels (H, W, 3) uint8, rotated upright."""
    pixels = reformatter.reformat(frame, format="rgb24").to_ndarray()
    return np.rot90(pixels, round(frame.rotation / 90) % 4)


def iterate_video_frames(content: bytes, name: str) -> Iterator[Any]:
    """Yield all frames of a video file in display order, as PyAV frames. Raises DataError for a damaged or truncated
    file, and for a file without a video stream."""
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
            # other formats round or estimate the duration
            has_exact_duration = length and container.format.name.startswith("matroska")
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
    """Return whether a video file ends long before `length`, its duration in seconds according to its header.

    The last of `count` frames begins at `last_time` seconds; `last_duration` is its duration in seconds according to
    the file, 0 if unknown.
    """
    frame_duration = last_time / (count - 1) if count > 1 else last_duration or length
    return length - last_time - frame_duration > max(0.1 * length, min(DURATION_TOLERANCE, 2 * frame_duration))


def is_cover_art(stream: Any) -> bool:
    """Return whether a video stream is a still image that is attached to an audio file, its cover art."""
    from av.stream import Disposition

    return bool(stream.disposition & Disposition.attached_pic)
