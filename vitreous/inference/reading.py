"""One way from what is given to the pixels that a model is asked about, for files, requests and workers alike. Without
torch.

A photograph that is far larger than what the model takes is decoded at 1/2, 1/4 or 1/8, where the JPEG decoder leaves
out most of its work, and shrunk the rest of the way: never by less than a factor of two, so the model's own filter
still decides.
"""

from __future__ import annotations

import math
import os

import numpy as np
from PIL import Image

from vitreous.data.decoding.decode import decode_reduced, read_regular, upright_size
from vitreous.data.decoding.gate import MAX_JPEG_PIXELS, MAX_PIXELS, refuse_costly
from vitreous.data.decoding.regions import FLIPPED, MIRRORED, Jpeg, parse_plain, reduction_factor
from vitreous.data.modalities.base import Preprocess, image_to_array
from vitreous.data.modalities.planar import PlanarPreprocess
from vitreous.errors import printable


def read(
    raw: bytes | np.ndarray | Image.Image | str | os.PathLike[str],
    preprocess: Preprocess,
    name: str | None = None,
    exact: bool = False,
) -> np.ndarray:
    """A file, its bytes, a folder of frames, or pixels -> (C, *image) as the model takes them. Raises DataError for
    what cannot be read.

    Unless `exact`, a plain JPEG whose part that the model sees is at least four times as large as what it takes is
    decoded small: on 100 photographs pixels were then off by 0.4 of 255 on average (1.9 in the worst of them), and none
    by more than 14.
    """
    planar = preprocess.for_reduced_reading()
    if exact or planar is None or isinstance(raw, (np.ndarray, Image.Image)):
        return preprocess.to_array(preprocess.decode(raw, name))
    name = name or ("image" if isinstance(raw, bytes) else printable(raw))
    content = raw if isinstance(raw, bytes) else read_regular(raw)
    refuse_costly(content, name)
    if content.startswith(b"\xff\xd8"):
        if header := parse_plain(content, planar.channels, name, exact=False):
            if (small := read_reduced(header, planar)) is not None:
                return small
        elif math.prod(upright_size(content, name, MAX_JPEG_PIXELS)) > MAX_PIXELS:
            return read_large(content, planar, name, exact, MAX_PIXELS)
    return preprocess.to_array(preprocess.decode(content, name))


def read_large(content: bytes, preprocess: PlanarPreprocess, name: str, exact: bool, most: int) -> np.ndarray:
    """A JPEG of more than `most` pixels -> (C, *image): decoded at 1/2, 1/4 or 1/8, so that no more are in memory.
    Raises DataError for what cannot be read."""
    header = None if exact else parse_plain(content, preprocess.channels, name, exact=False)
    if header is not None and (small := read_reduced(header, preprocess)) is not None:
        return small
    return preprocess.to_array(preprocess.decode(decode_reduced(content, preprocess.channels, name, most), name))


def read_reduced(jpeg: Jpeg, preprocess: PlanarPreprocess) -> np.ndarray | None:
    """(C, *image) pixels from a smaller decoding; None where it would save nothing, or the decoder objects."""
    left, top, right, bottom = preprocess.crop_box(jpeg.size)
    plane = preprocess.plane_of(jpeg.size)
    factor = reduction_factor((int(bottom - top), int(right - left)), plane)
    pixels = jpeg.read(jpeg.layout.size[1], factor) if factor > 1 else None
    if pixels is None:
        return None
    pixels = jpeg.coloured(np.ascontiguousarray(jpeg.upright(pixels)))
    # the decoder rounds sizes up: what is over lies at the right and at the bottom as stored
    over_x = pixels.shape[1] - jpeg.size[0] / factor if jpeg.orientation in MIRRORED else 0.0
    over_y = pixels.shape[0] - jpeg.size[1] / factor if jpeg.orientation in FLIPPED else 0.0
    box = (left / factor + over_x, top / factor + over_y, right / factor + over_x, bottom / factor + over_y)
    small = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
    return image_to_array(preprocess.resample(small, box, plane))
