"""Clips as files that show them moving: animated GIFs by Pillow, mp4 by PyAV (extra `video`).

T frames of a clip, each a picture of one size.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec

from PIL import Image

from vitreous.errors import ResourceError, install_hint
from vitreous.inference.image_grid import enlarge, grid_of, write_gif

FRAME_TIME = 100  # milliseconds that a frame is shown
QUALITY = "17"  # of x264, constant rate factor: the difference is hardly seen

GIF, MP4 = ".gif", ".mp4"


def require_encoder(suffix: str) -> None:
    """Raise ResourceError for a format whose encoder is not installed."""
    if suffix == MP4 and find_spec("av") is None:
        raise ResourceError("an mp4 needs PyAV, which is not installed", f"{install_hint('video')}, or name a .gif")


def moving_grid(
    clips: Sequence[Sequence[Image.Image]], columns: int, captions: Sequence[str] = ()
) -> list[Image.Image]:
    """Clips of T frames each -> T pictures, each a grid of the clips at that time, in rows of `columns`; small frames
    are enlarged, and captions stand below the clips."""
    return [grid_of(enlarge(moment), columns, captions) for moment in zip(*clips, strict=True)]


def write_clip(path: str | os.PathLike[str], suffix: str, frames: Sequence[Image.Image]) -> None:
    """Write T frames of one size as a clip of the format that the suffix names, whatever the name of the file. Raises
    OSError."""
    if suffix == MP4:
        write_mp4(path, frames)
    else:
        write_gif(path, frames, FRAME_TIME)


def write_mp4(path: str | os.PathLike[str], frames: Sequence[Image.Image]) -> None:
    """Write an mp4 as browsers play it (H.264, yuv420p), with a white edge where a side is of an odd number of pixels.
    Raises OSError."""
    import av

    width, height = (side + side % 2 for side in frames[0].size)
    with av.open(os.fspath(path), "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=1000 // FRAME_TIME, options={"crf": QUALITY})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for picture in frames:
            whole = Image.new("RGB", (width, height), "white")
            whole.paste(picture, (0, 0))
            container.mux(stream.encode(av.VideoFrame.from_image(whole)))
        container.mux(stream.encode())
