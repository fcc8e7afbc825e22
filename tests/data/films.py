"""Synthetic clips: video files encoded by PyAV, GIFs by Pillow, folders of frames."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image

#: suffix -> FFmpeg's format name, and a codec that PyAV's wheels include
CODECS = {
    "mp4": ("mp4", "mpeg4"),
    "mov": ("mov", "mjpeg"),
    "avi": ("avi", "mjpeg"),
    "mkv": ("matroska", "libx264"),
    "webm": ("webm", "libvpx-vp9"),
    "mpeg": ("mpeg", "mpeg2video"),
}


def make_grey_frames(count: int, side: int = 16, step: int = 20) -> np.ndarray:
    """Return constant grey frames (T, side, side, 3) uint8 whose value rises by `step`."""
    return np.repeat(np.arange(count, dtype=np.uint8) * step, side * side * 3).reshape(count, side, side, 3)


def make_moving_square(seed: int, right: bool, count: int = 10, side: int = 16) -> np.ndarray:
    """Return (T, side, side, 3) uint8 of a bright square on noise that moves right or left by one pixel per frame."""
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 60, (count, side, side, 3)).astype(np.uint8)
    top, left = rng.integers(0, side - 4), rng.integers(0, side)
    for frame in range(count):
        columns = (left + (frame if right else -frame) + np.arange(4)) % side
        pixels[frame, top : top + 4, columns] = 230
    return pixels


def encode_video(
    pixels: np.ndarray,
    suffix: str = "mp4",
    sound: bool = False,
    codec: str | None = None,
    moments: list[int] | None = None,
) -> bytes:
    """Encode (T, H, W, 3) uint8 as a video file.

    The frame rate is 10 frames/s, or frames are shown at `moments` (tenths of a second). With `sound`, the file also
    contains silence.
    """
    form, default_codec = CODECS[suffix]
    file = io.BytesIO()
    with av.open(file, "w", format=form) as container:
        if sound:
            audio_stream = container.add_stream("aac", rate=8000)
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
            frame.sample_rate = 8000
            container.mux(audio_stream.encode(frame) + audio_stream.encode())
        else:
            stream: Any = container.add_stream(codec or default_codec, rate=25 if form == "mpeg" else 10)
            stream.height, stream.width = pixels.shape[1:3]
            stream.pix_fmt = "yuvj420p" if (codec or default_codec) == "mjpeg" else "yuv420p"
            for number, pixel in enumerate(pixels):
                video_frame = av.VideoFrame.from_ndarray(pixel, format="rgb24")
                if moments is not None:
                    video_frame.pts = moments[number]
                container.mux(stream.encode(video_frame))
            container.mux(stream.encode())
    return file.getvalue()


def write_clip(path: Path, pixels: np.ndarray) -> Path:
    """Write (T, H, W, 3) uint8 in the format of the suffix; without a suffix, as a folder of numbered PNG files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    suffix = path.suffix[1:]
    frames = [Image.fromarray(frame) for frame in pixels]
    if suffix == "gif":
        frames[0].save(path, save_all=True, append_images=frames[1:], duration=100)
    elif suffix:
        path.write_bytes(encode_video(pixels, suffix))
    else:
        path.mkdir()
        for number, frame_image in enumerate(frames):
            frame_image.save(path / f"frame_{number:03}.png")
    return path


def write_moves(home: Path, count: int, suffixes: tuple[str, ...] = (".mp4", ".gif", ""), first: int = 0) -> Path:
    """Write a folder of two classes, left and right, with `count` clips each; the formats alternate."""
    for right, name in enumerate(("left", "right")):
        for clip in range(count):
            seed = first + 2 * clip + right
            write_clip(
                home / name / f"clip{clip}{suffixes[clip % len(suffixes)]}", make_moving_square(seed, bool(right))
            )
    return home
