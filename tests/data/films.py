"""Clips that tests write: video files by PyAV's encoders, GIFs by Pillow, folders of frames."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image

#: suffix -> FFmpeg's name of the format, and a codec that PyAV's wheels bring
CODECS = {
    "mp4": ("mp4", "mpeg4"),
    "mov": ("mov", "mjpeg"),
    "avi": ("avi", "mjpeg"),
    "mkv": ("matroska", "libx264"),
    "webm": ("webm", "libvpx-vp9"),
    "mpeg": ("mpeg", "mpeg2video"),
}


def make_grey_frames(count: int, side: int = 16, step: int = 20) -> np.ndarray:
    """Frames of one grey each, which rises by `step`: (T, side, side, 3) uint8."""
    return np.repeat(np.arange(count, dtype=np.uint8) * step, side * side * 3).reshape(count, side, side, 3)


def make_moving_square(seed: int, right: bool, count: int = 10, side: int = 16) -> np.ndarray:
    """A bright square on noise that moves by a pixel a frame, to the right or to the left: (T, side, side, 3) uint8."""
    chance = np.random.default_rng(seed)
    pixels = chance.integers(0, 60, (count, side, side, 3)).astype(np.uint8)
    top, left = chance.integers(0, side - 4), chance.integers(0, side)
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
    """(T, H, W, 3) uint8 -> a video file of 10 frames a second, or of frames shown at `moments`, in tenths of a second;
    with `sound`, of silence alone."""
    form, usual = CODECS[suffix]
    file = io.BytesIO()
    with av.open(file, "w", format=form) as container:
        if sound:
            track = container.add_stream("aac", rate=8000)
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
            frame.sample_rate = 8000
            container.mux(track.encode(frame) + track.encode())
        else:
            stream: Any = container.add_stream(codec or usual, rate=25 if form == "mpeg" else 10)
            stream.height, stream.width = pixels.shape[1:3]
            stream.pix_fmt = "yuvj420p" if (codec or usual) == "mjpeg" else "yuv420p"
            for number, pixel in enumerate(pixels):
                picture = av.VideoFrame.from_ndarray(pixel, format="rgb24")
                if moments is not None:
                    picture.pts = moments[number]
                container.mux(stream.encode(picture))
            container.mux(stream.encode())
    return file.getvalue()


def write_clip(place: Path, pixels: np.ndarray) -> Path:
    """Write (T, H, W, 3) uint8 as its suffix says, or, without one, as a folder of numbered PNG files."""
    place.parent.mkdir(parents=True, exist_ok=True)
    suffix = place.suffix[1:]
    pictures = [Image.fromarray(frame) for frame in pixels]
    if suffix == "gif":
        pictures[0].save(place, save_all=True, append_images=pictures[1:], duration=100)
    elif suffix:
        place.write_bytes(encode_video(pixels, suffix))
    else:
        place.mkdir()
        for number, picture in enumerate(pictures):
            picture.save(place / f"frame_{number:03}.png")
    return place


def write_moves(home: Path, count: int, suffixes: tuple[str, ...] = (".mp4", ".gif", ""), first: int = 0) -> Path:
    """A folder of two classes, left and right, of `count` clips each; their kinds take turns."""
    for right, name in enumerate(("left", "right")):
        for clip in range(count):
            seed = first + 2 * clip + right
            write_clip(
                home / name / f"clip{clip}{suffixes[clip % len(suffixes)]}", make_moving_square(seed, bool(right))
            )
    return home
