"""Images of one size as one image, side by side, or one after the other as an animated GIF or, by PyAV, as mp4."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import IO, Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from vitreous.errors import ResourceError, UsageError, install_hint

SAMPLES_FILE = "samples.png"  # what a generator makes when its run ends, in its folder
GRID_GAP = 2  # pixels between the images of a grid
MAX_ENLARGED_SIDE = 128  # pixels of the longer side to which small images are enlarged
CAPTION_HEIGHT = 14  # pixels of the line below an image

CLIP_FRAME_MILLISECONDS = 100  # milliseconds that a frame is shown
X264_CRF = "17"  # of x264, constant rate factor: the difference is hardly seen
GIF, MP4 = ".gif", ".mp4"


def array_to_image(image: np.ndarray) -> Image.Image:
    """(H, W, C) uint8 as Pillow has it. Raises UsageError for channels that are no colours."""
    if image.shape[-1] not in (1, 3):
        raise UsageError(f"an image of {image.shape[-1]} channels has no colours to show", "read it in Python")
    return Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image)


def array_to_frames(image: np.ndarray) -> list[Image.Image]:
    """(T, H, W, C) uint8 -> T pictures, or (H, W, C) -> one. Raises UsageError for channels that are no colours."""
    return [array_to_image(frame) for frame in (image if image.ndim == 4 else image[None])]


def square_grid_columns(count: int) -> int:
    """Columns of a grid of so many images that is about as wide as high."""
    return next(columns for columns in range(1, count + 1) if columns * columns >= count)


def arrange_image_grid(images: Sequence[Image.Image], columns: int, captions: Sequence[str] = ()) -> Image.Image:
    """Pictures of one size in rows of so many, each above its caption where there are captions."""
    width, height = images[0].size
    high = height + CAPTION_HEIGHT * bool(captions) + GRID_GAP
    rows = -(-len(images) // columns)
    whole = Image.new(images[0].mode, (columns * (width + GRID_GAP) - GRID_GAP, rows * high - GRID_GAP), "white")
    for number, image in enumerate(images):
        place = number % columns * (width + GRID_GAP), number // columns * high
        whole.paste(image, place)
        if captions and captions[number]:
            whole.paste(draw_caption(captions[number], width, images[0].mode), (place[0], place[1] + height))
    return whole


def draw_caption(text: str, width: int, mode: str) -> Image.Image:
    """A line of text, black on white, as wide as its image; a longer text is cut off."""
    line = Image.new(mode, (width, CAPTION_HEIGHT), "white")
    try:
        font = ImageFont.load_default(CAPTION_HEIGHT - 4)
        ImageDraw.Draw(line).text((1, 0), text, fill="black", font=font)
    except (OSError, UnicodeError):  # a Pillow without FreeType, whose own font has Latin-1 alone
        ImageDraw.Draw(line).text((1, 0), text.encode("latin-1", "replace"), fill="black")
    return line


def enlarge_small_images(images: Sequence[Image.Image]) -> list[Image.Image]:
    """Pictures of one size, small ones enlarged by a whole number to at most SHOWN_SIDE pixels, each pixel a square."""
    width, height = images[0].size
    factor = max(1, MAX_ENLARGED_SIDE // max(width, height))
    if factor == 1:
        return list(images)
    return [image.resize((factor * width, factor * height), Image.Resampling.NEAREST) for image in images]


def write_gif(place: str | os.PathLike[str] | IO[bytes], frames: Sequence[Image.Image], milliseconds: int) -> None:
    """Write T frames of one size as an animated GIF that starts over at its end, each shown for so long; frames that
    are the same in a row become one that is shown as long as all of them. Raises OSError."""
    first, *others = frames
    first.save(place, "GIF", save_all=True, append_images=others, duration=milliseconds, loop=0)


def check_video_encoder(suffix: str) -> None:
    """Raise ResourceError for a format whose encoder is not installed."""
    if suffix == MP4 and find_spec("av") is None:
        raise ResourceError("an mp4 needs PyAV, which is not installed", f"{install_hint('video')}, or name a .gif")


def arrange_clip_grid(
    clips: Sequence[Sequence[Image.Image]], columns: int, captions: Sequence[str] = ()
) -> list[Image.Image]:
    """Clips of T frames each -> T pictures, each a grid of the clips at that time, in rows of `columns`; small frames
    are enlarged, and captions stand below the clips."""
    return [arrange_image_grid(enlarge_small_images(moment), columns, captions) for moment in zip(*clips, strict=True)]


def write_clip(path: str | os.PathLike[str], suffix: str, frames: Sequence[Image.Image]) -> None:
    """Write T frames of one size as a clip of the format that the suffix names, whatever the name of the file. Raises
    OSError."""
    if suffix == MP4:
        write_mp4(path, frames)
    else:
        write_gif(path, frames, CLIP_FRAME_MILLISECONDS)


def write_mp4(path: str | os.PathLike[str], frames: Sequence[Image.Image]) -> None:
    """Write an mp4 as browsers play it (H.264, yuv420p), with a white edge where a side is of an odd number of pixels.
    Raises OSError."""
    av: Any = import_module("av")  # whose types are partly missing

    width, height = (side + side % 2 for side in frames[0].size)
    with av.open(os.fspath(path), "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=1000 // CLIP_FRAME_MILLISECONDS, options={"crf": X264_CRF})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for picture in frames:
            whole = Image.new("RGB", (width, height), "white")
            whole.paste(picture, (0, 0))
            container.mux(stream.encode(av.VideoFrame.from_image(whole)))
        container.mux(stream.encode())
