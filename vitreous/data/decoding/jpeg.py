"""Plain JPEG files, of which a training crop decodes only what it shows.

Plain is nearly every photograph: one scan of 8-bit baseline coding, 1 or 3 components, nothing behind it. Rows below a
crop are not decoded, and a crop that is to be shrunk is decoded at 1/2 to 1/8. All other files, and all that the
decoder refuses, go through `decode`, which raises a precise error. Pixels are the same with simplejpeg (extra `data`),
which is faster, and with Pillow. Whole files decoded by simplejpeg give 0.90 of the images a second in training, by
Pillow 0.71 (500 x 375 photographs, crops of 224 pixels).
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
from PIL import Image

from vitreous.data.decoding.decode import decode, orientation, silence
from vitreous.data.decoding.gate import MAX_PIXELS

Box = tuple[int, int, int, int]  # left, top, right, bottom
BLOCK = 8  # rows and columns that are coded as one, times what colours are coarser
# bytes of a header whose check is cached: headers of one encoder are alike, apart from sizes and metadata
CACHED = 4096
FACTORS = (8, 4, 2)  # what the decoder divides by at no cost
# what is left to shrink after that: it costs 35 dB, as much as an edge of the crop moved by one pixel; 1 would be 31 dB
GAP = 2
FRAMES = (0xC0, 0xC1)  # baseline and extended, of Huffman coding
TABLES = (0xC4, 0xDB, 0xDD, *range(0xE0, 0xF0), 0xFE)  # what else may stand before the pixels (ITU-T T.81, Table B.1)
# EXIF orientations: left is right; top is bottom; axes exchanged from here on
MIRRORED, FLIPPED, TURNED = (2, 3, 6, 7), (3, 4, 7, 8), 5
#: a marker other than a restart, among coded pixels: 0xFF before neither a stuffed zero nor 0xD0 to 0xD7
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7]")


@dataclass(frozen=True)
class Jpeg:
    """A plain JPEG whose header has been read: width and height as `stored`, and what `layout` parsed.

    `exact` False lets a region that is to be shrunk be decoded at 1/2, 1/4 or 1/8.
    """

    content: bytes
    name: str
    channels: int
    stored: tuple[int, int]
    layout: Layout
    orientation: int = 1
    exact: bool = True

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of the upright picture, as Pillow has it."""
        width, height = self.stored
        return (width, height) if self.orientation < TURNED else (height, width)

    def whole(self) -> Image.Image:
        """The picture, as `decode` gives it. Raises DataError."""
        return decode(self.content, self.channels, self.name)

    def region(self, box: Box, target: tuple[int, int] | None = None) -> np.ndarray:
        """A box of the upright picture -> (h, w, channels) uint8, contiguous and writable.

        At full size the pixels are those of `whole().crop(box)`. Unless `exact`, a box to be shrunk to `target`
        (height, width) comes at the smallest of 1/8, 1/4, 1/2 that is at least GAP times the target, its edges on the
        nearest pixels. Raises DataError.
        """
        factor = 1 if self.exact or target is None else reduction_factor((box[3] - box[1], box[2] - box[0]), target)
        stored = self.stored_box(box)
        tall = self.layout.tall
        # the filter of coarser colours reads the row below
        rows = -(-stored[3] // tall) * tall + (tall if tall > BLOCK else 0)
        rows = min(rows, self.stored[1])
        pixels = self.read(rows, factor)
        if pixels is None:
            return np.array(self.whole().crop(box)).reshape(box[3] - box[1], box[2] - box[0], self.channels)
        left, top, right, bottom = ((2 * edge + factor) // (2 * factor) for edge in stored)
        cut = self.upright(pixels[top:bottom, left:right])
        return self.coloured(np.require(cut, requirements=["C", "W"]))  # Pillow's pixels are read-only

    def stored_box(self, box: Box) -> Box:
        """Where a box of the upright picture lies in the stored one."""
        (width, height), (left, top, right, bottom) = self.size, box
        across, down = (left, right), (top, bottom)
        if self.orientation in MIRRORED:
            across = (width - right, width - left)
        if self.orientation in FLIPPED:
            down = (height - bottom, height - top)
        if self.orientation >= TURNED:
            across, down = down, across
        return across[0], down[0], across[1], down[1]

    def upright(self, pixels: np.ndarray) -> np.ndarray:
        """(H, W, C) as stored -> the same upright."""
        pixels = pixels.transpose(1, 0, 2) if self.orientation >= TURNED else pixels
        pixels = pixels[:, ::-1] if self.orientation in MIRRORED else pixels
        return pixels[::-1] if self.orientation in FLIPPED else pixels

    def coloured(self, pixels: np.ndarray) -> np.ndarray:
        """(h, w, components) -> (h, w, channels), as Pillow converts."""
        if self.channels == self.layout.components:
            return pixels
        if self.channels > self.layout.components:
            return np.repeat(pixels, self.channels, axis=-1)
        return np.array(Image.fromarray(pixels).convert("L"))[..., None]

    def read(self, rows: int, factor: int) -> np.ndarray | None:
        """The first `rows` rows, (ceil(rows / factor), ceil(width / factor), components) uint8; None if that cannot be
        done.

        The decoder is told that the picture ends there, and never gets to the rest.
        """
        shape = (-(-rows // factor), -(-self.stored[0] // factor), self.layout.components)
        frame = self.layout.frame
        content = self.content[:frame] + rows.to_bytes(2, "big") + self.content[frame + 2 :]
        try:
            pixels = decoder()(content, shape, factor)
        except Exception:  # `decode` raises a precise error
            return None
        return pixels if pixels.shape == shape else None


def parse_plain(content: bytes, channels: int, name: str, exact: bool) -> Jpeg | None:
    """The header of a plain JPEG; None for any other.

    Pillow decodes a corner of what is in the header, without the coded pixels: what it objects to in the tables it
    would object to in the whole, and other decoders might not.
    """
    if (parsed := layout(content)) is None:
        return None
    height, width = (int.from_bytes(content[at : at + 2], "big") for at in (parsed.frame, parsed.frame + 2))
    corner = bytes((0, min(height, BLOCK), 0, min(width, BLOCK)))
    head = content[: parsed.frame] + corner + content[parsed.frame + 4 : parsed.scan] + b"\xff\xd9"
    turned = (check_cached if len(head) <= CACHED else check_header)(head, "L" if parsed.components == 1 else "RGB")
    if turned is None or width * height > MAX_PIXELS:
        return None
    return Jpeg(content, name, channels, (width, height), parsed, turned, exact)


def check_header(head: bytes, mode: str) -> int | None:
    """The orientation in a JPEG that Pillow decodes to that mode; None for any other."""
    try:
        with silence(), Image.open(io.BytesIO(head), formats=("JPEG",)) as image:
            if image.format != "JPEG" or image.mode != mode:
                return None
            turned = orientation(image)
            image.load()
            return turned
    except Exception:  # `decode` raises a precise error
        return None


check_cached = lru_cache(maxsize=256)(check_header)


class Layout(NamedTuple):
    """Of a plain JPEG: where its height is written, how many components it has, the rows coded as one, where coded
    pixels begin."""

    frame: int
    components: int
    tall: int
    scan: int


def layout(content: bytes) -> Layout | None:
    """Where things are in a plain JPEG; None for any other file.

    One frame, one scan of all components, and after that nothing but the end: so nothing can be wrong with the file
    that a decoder meets only in the rows that are left out, but for coded pixels, which decoders forgive.
    """
    at, frame = 2, 0
    while content[at : at + 1] == b"\xff" and at + 10 <= len(content):
        marker, length = content[at + 1], int.from_bytes(content[at + 2 : at + 4], "big")
        if marker in FRAMES and not frame and content[at + 4] == 8:
            frame = at + 5
        elif marker == 0xDA:
            components, scan = content[frame + 4] if frame else 0, at + 2 + length
            last = _MARKER.search(content, scan)
            ends = last is not None and last.end() == len(content) and content[-1] == 0xD9
            if not ends or components not in (1, 3) or content[at + 4] != components:
                return None
            coarser = max(content[frame + 6 + 3 * component] & 15 for component in range(components))
            return Layout(frame, components, BLOCK * coarser, scan)
        elif marker not in TABLES:
            return None
        at += 2 + length
    return None


def reduction_factor(height_width: tuple[int, int], target: tuple[int, int]) -> int:
    """The largest of 8, 4, 2 that leaves a box at least GAP times its target, else 1."""
    return next(
        (
            f
            for f in FACTORS
            if all(side >= f * GAP * wanted for side, wanted in zip(height_width, target, strict=True))
        ),
        1,
    )


@cache
def decoder() -> Callable[[bytes, tuple[int, int, int], int], np.ndarray]:
    """The fastest decoder there is: (content, (height, width, C) to come out, 1 / scale) -> that array of uint8."""
    try:
        import simplejpeg  # type: ignore[reportMissingImports]
    except ImportError:
        return by_pillow

    def by_turbo(content: bytes, shape: tuple[int, int, int], factor: int) -> np.ndarray:
        least = {} if factor == 1 else {"min_height": shape[0], "min_width": shape[1]}
        return simplejpeg.decode_jpeg(content, "GRAY" if shape[2] == 1 else "RGB", strict=False, **least)

    return by_turbo


def by_pillow(content: bytes, shape: tuple[int, int, int], factor: int) -> np.ndarray:
    """The same without simplejpeg."""
    with silence(), Image.open(io.BytesIO(content), formats=("JPEG",)) as image:
        if factor > 1:
            image.draft(image.mode, (image.width // factor, image.height // factor))
        image.load()
        return np.asarray(image).reshape(shape)
