"""Arrange equally sized images in grids, and write animations as GIF or, with PyAV, mp4."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import IO, Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from vitreous.errors import ResourceError, UsageError, install_hint

SAMPLES_FILE = "samples.png"  # samples of a generative model at the end of its training, in the run folder
MAX_SHOWN_CLASSES = 8  # classes of `SAMPLES_FILE`
GRID_GAP = 2  # pixels between the images of a grid
MAX_ENLARGED_SIDE = 128  # longer side in pixels to which small images are enlarged
CAPTION_HEIGHT = 14  # height in pixels of the caption below an image

CLIP_FRAME_MILLISECONDS = 100  # duration of a frame
X264_CRF = "17"  # constant rate factor of x264: visually nearly lossless
GIF, MP4 = ".gif", ".mp4"


def choose_shown_classes(num_classes: int, max_classes: int = MAX_SHOWN_CLASSES) -> np.ndarray:
    """Choose the class indices (n,) int64 of the rows of `SAMPLES_FILE`: all, or `max_classes` at even distances. An
    unconditional model has index 0."""
    return np.unique(np.linspace(0, max(0, num_classes - 1), max_classes).astype(np.int64))


def array_to_image(image: np.ndarray) -> Image.Image:
    """Convert (H, W, C) uint8 to a PIL image. Raises UsageError unless it has 1 or 3 channels."""
    if image.shape[-1] not in (1, 3):
        raise UsageError(
            f"an image of {image.shape[-1]} channels cannot be shown in colour", "use its array instead of a PIL image"
        )
    return Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image)


def array_to_frames(image: np.ndarray) -> list[Image.Image]:
    """Convert (T, H, W, C) uint8 to T PIL images, or (H, W, C) to one. Raises UsageError unless they have 1 or 3
    channels."""
    return [array_to_image(frame) for frame in (image if image.ndim == 4 else image[None])]


def square_grid_columns(count: int) -> int:
    """Return the number of columns of an approximately square grid with `count` images."""
    return next(columns for columns in range(1, count + 1) if columns * columns >= count)


def arrange_image_grid(images: Sequence[Image.Image], columns: int, captions: Sequence[str] = ()) -> Image.Image:
    """Arrange images of equal size in a grid with `columns` images per row, each with its caption below, if there are
    captions."""
    width, height = images[0].size
    cell_height = height + CAPTION_HEIGHT * bool(captions) + GRID_GAP
    num_rows = -(-len(images) // columns)
    grid = Image.new(
        images[0].mode, (columns * (width + GRID_GAP) - GRID_GAP, num_rows * cell_height - GRID_GAP), "white"
    )
    for index, image in enumerate(images):
        position = index % columns * (width + GRID_GAP), index // columns * cell_height
        grid.paste(image, position)
        if captions and captions[index]:
            grid.paste(draw_caption(captions[index], width, images[0].mode), (position[0], position[1] + height))
    return grid


def draw_caption(text: str, width: int, mode: str) -> Image.Image:
    """Draw one line of text, black on white, as an image of this width and PIL mode; longer text is cut off."""
    line = Image.new(mode, (width, CAPTION_HEIGHT), "white")
    try:
        font = ImageFont.load_default(CAPTION_HEIGHT - 4)
        ImageDraw.Draw(line).text((1, 0), text, fill="black", font=font)
    except (OSError, UnicodeError):  # Pillow without FreeType, whose built-in font only has Latin-1
        ImageDraw.Draw(line).text((1, 0), text.encode("latin-1", "replace"), fill="black")
    return line


def enlarge_small_images(images: Sequence[Image.Image]) -> list[Image.Image]:
    """Enlarge small images of equal size by an integer factor to at most `MAX_ENLARGED_SIDE` pixels, without
    smoothing."""
    width, height = images[0].size
    factor = max(1, MAX_ENLARGED_SIDE // max(width, height))
    if factor == 1:
        return list(images)
    return [image.resize((factor * width, factor * height), Image.Resampling.NEAREST) for image in images]


def write_gif(path: str | os.PathLike[str] | IO[bytes], frames: Sequence[Image.Image], milliseconds: int) -> None:
    """Write T frames of equal size as a looping GIF, each shown for `milliseconds`. Consecutive identical frames are
    merged into one of their total duration. Raises OSError."""
    first_frame, *other_frames = frames
    first_frame.save(path, "GIF", save_all=True, append_images=other_frames, duration=milliseconds, loop=0)


def check_video_encoder(suffix: str) -> None:
    """Raise ResourceError for a video format whose encoder is not installed."""
    if suffix == MP4 and find_spec("av") is None:
        raise ResourceError(
            "mp4 files need PyAV, which is not installed", f"{install_hint('video')}, or use a .gif file"
        )


def arrange_clip_grid(
    clips: Sequence[Sequence[Image.Image]], columns: int, captions: Sequence[str] = ()
) -> list[Image.Image]:
    """Arrange clips of T frames in one grid with `columns` clips per row: T images, one per time step. Small frames are
    enlarged; captions are below the clips."""
    return [
        arrange_image_grid(enlarge_small_images(frames_at_time), columns, captions)
        for frames_at_time in zip(*clips, strict=True)
    ]


def write_clip(path: str | os.PathLike[str], suffix: str, frames: Sequence[Image.Image]) -> None:
    """Write T frames of equal size as a clip, as mp4 or GIF by `suffix`, regardless of the file's name. Raises
    OSError."""
    if suffix == MP4:
        write_mp4(path, frames)
    else:
        write_gif(path, frames, CLIP_FRAME_MILLISECONDS)


def write_mp4(path: str | os.PathLike[str], frames: Sequence[Image.Image]) -> None:
    """Write T frames of equal size as an mp4 for browsers (H.264, yuv420p), with a white border if height or width is
    odd. Raises OSError."""
    av: Any = import_module("av")  # its types are incomplete

    width, height = (length + length % 2 for length in frames[0].size)
    with av.open(os.fspath(path), "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=1000 // CLIP_FRAME_MILLISECONDS, options={"crf": X264_CRF})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for frame in frames:
            canvas = Image.new("RGB", (width, height), "white")
            canvas.paste(frame, (0, 0))
            container.mux(stream.encode(av.VideoFrame.from_image(canvas)))
        container.mux(stream.encode())
