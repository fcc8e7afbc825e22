"""Lazy images, of which only the region of a crop is decoded: plain JPEG files and stored pixels.

A plain JPEG has one scan with 8-bit Huffman coding, 1 or 3 components, and no data after the scan; most photos are
plain JPEG files. Rows below a crop are not decoded, and a crop that is downscaled is decoded at 1/2, 1/4 or 1/8 of its
size. All other files, and files that the decoder rejects, are decoded completely by `decode_to_pillow`, which raises a
precise error. Pixels are identical with simplejpeg (extra `data`, faster) and with Pillow.

If complete files are decoded instead, the training throughput is 0.90 (simplejpeg) or 0.71 (Pillow) of that with lazy
images, for photos of 500 x 375 pixels and crops of 224 pixels.
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

from vitreous.data.decoding.decode import PILLOW_MODES, decode_to_pillow, read_exif_orientation, suppress_warnings
from vitreous.data.decoding.gate import MAX_PIXELS

PixelBox = tuple[int, int, int, int]  # left, top, right, bottom
JPEG_BLOCK_SIZE = 8  # rows and columns of a coded block, without chroma subsampling
MAX_CACHED_HEADER_BYTES = 4096  # headers up to this size are cached; files of one encoder often have the same header
REDUCTION_FACTORS = (8, 4, 2)  # a JPEG can be decoded at 1/8, 1/4 or 1/2 of its size at no extra cost
#: minimum ratio of a region decoded at reduced size to its target. With 2, the PSNR of the result is 35 dB, as after
#: moving a crop edge by a pixel; with 1, it is 31 dB
MIN_OVERSAMPLING = 2
JPEG_FRAME_MARKERS = (0xC0, 0xC1)  # baseline and extended, with Huffman coding
#: markers of the other segments of a plain JPEG before the scan (ITU-T T.81, Table B.1)
JPEG_TABLE_MARKERS = (0xC4, 0xDB, 0xDD, *range(0xE0, 0xF0), 0xFE)
#: EXIF orientations with left and right swapped, and with top and bottom swapped; rows and columns are swapped from the
#: third value on
MIRRORED_ORIENTATIONS, FLIPPED_ORIENTATIONS, FIRST_TRANSPOSED_ORIENTATION = (2, 3, 6, 7), (3, 4, 7, 8), 5
#: the marker that ends a scan: 0xFF and a byte that is neither 0, which is coded data, nor a restart (0xD0 to 0xD7)
_SCAN_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7]")


@dataclass(frozen=True, eq=False)
class LazyPixels:
    """An image whose pixels (H, W, C) uint8 are stored, possibly in a memory-mapped file, of which only the requested
    box is read."""

    pixels: np.ndarray

    @property
    def size(self) -> tuple[int, int]:
        """(width, height), in Pillow's order."""
        return self.pixels.shape[1], self.pixels.shape[0]

    def decode_region(self, box: PixelBox, target: tuple[int, int] | None = None) -> np.ndarray:
        """Return a copy of a box, (h, w, C) uint8. `target` is ignored, since stored pixels need no decoding."""
        return np.array(self.pixels[box[1] : box[3], box[0] : box[2]], order="C")

    def decode_full(self) -> Image.Image:
        """Return the complete image as a PIL image, grey or RGB."""
        return Image.fromarray(self.pixels[..., 0] if self.pixels.shape[-1] == 1 else self.pixels)


class JpegLayout(NamedTuple):
    """Header of a plain JPEG.

    `frame` is the byte offset of the height and width, `pixel_offset` that of the scan. `components` is the number of
    colour components, `tall` the number of rows per coded block, and `size` (width, height).
    """

    frame: int
    components: int
    tall: int
    pixel_offset: int
    size: tuple[int, int]


@dataclass(frozen=True)
class LazyJpeg:
    """A plain JPEG whose header is parsed and whose pixels are not decoded.

    `content` are the bytes of the file, `channels` those of the decoded image, `orientation` is EXIF's. If `exact` is
    False, a region that is downscaled may be decoded at reduced size.
    """

    content: bytes
    name: str
    channels: int
    layout: JpegLayout
    orientation: int = 1
    exact: bool = True

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) of the upright image, in Pillow's order."""
        width, height = self.layout.size
        return (width, height) if self.orientation < FIRST_TRANSPOSED_ORIENTATION else (height, width)

    def decode_full(self) -> Image.Image:
        """Decode the complete image with `decode_to_pillow`. Raises DataError for a damaged file."""
        return decode_to_pillow(self.content, self.channels, self.name)

    def decode_region(self, box: PixelBox, target: tuple[int, int] | None = None) -> np.ndarray:
        """Decode a box of the upright image: (h, w, channels) uint8, contiguous and writable.

        If `exact` is set or `target` is None, the pixels are those of `decode_full().crop(box)`. Otherwise `target` is
        the (height, width) to which the caller resizes the box. The box is then decoded at the smallest of 1/8, 1/4 and
        1/2 that is at least MIN_OVERSAMPLING times the target, with its edges rounded to pixels. Raises DataError for a
        damaged file.
        """
        factor = (
            1 if self.exact or target is None else choose_reduction_factor((box[3] - box[1], box[2] - box[0]), target)
        )
        stored, block_rows = self.map_box_to_stored(box), self.layout.tall
        # with chroma subsampling, upsampling reads one more row of blocks
        num_rows = -(-stored[3] // block_rows) * block_rows + (block_rows if block_rows > JPEG_BLOCK_SIZE else 0)
        pixels = self.decode_rows(min(num_rows, self.layout.size[1]), factor)
        if pixels is None:
            return np.array(self.decode_full().crop(box)).reshape(box[3] - box[1], box[2] - box[0], self.channels)
        left, top, right, bottom = ((2 * edge + factor) // (2 * factor) for edge in stored)
        crop = self.rotate_upright(pixels[top:bottom, left:right])
        return self.convert_channels(np.require(crop, requirements=["C", "W"]))  # Pillow's pixels are read-only

    def map_box_to_stored(self, box: PixelBox) -> PixelBox:
        """Map a box of the upright image to pixels of the stored image, by the EXIF orientation."""
        (width, height), (left, top, right, bottom) = self.size, box
        x_range, y_range = (left, right), (top, bottom)
        if self.orientation in MIRRORED_ORIENTATIONS:
            x_range = (width - right, width - left)
        if self.orientation in FLIPPED_ORIENTATIONS:
            y_range = (height - bottom, height - top)
        if self.orientation >= FIRST_TRANSPOSED_ORIENTATION:
            x_range, y_range = y_range, x_range
        return x_range[0], y_range[0], x_range[1], y_range[1]

    def rotate_upright(self, pixels: np.ndarray) -> np.ndarray:
        """Rotate and mirror stored pixels (H, W, C) upright, by the EXIF orientation."""
        pixels = pixels.transpose(1, 0, 2) if self.orientation >= FIRST_TRANSPOSED_ORIENTATION else pixels
        pixels = pixels[:, ::-1] if self.orientation in MIRRORED_ORIENTATIONS else pixels
        return pixels[::-1] if self.orientation in FLIPPED_ORIENTATIONS else pixels

    def convert_channels(self, pixels: np.ndarray) -> np.ndarray:
        """Convert pixels (h, w, components) between grey and RGB, as Pillow does: (h, w, channels)."""
        if self.channels == self.layout.components:
            return pixels
        if self.channels > self.layout.components:
            return np.repeat(pixels, self.channels, axis=-1)
        return np.array(Image.fromarray(pixels).convert("L"))[..., None]

    def decode_rows(self, num_rows: int, factor: int) -> np.ndarray | None:
        """Decode the first `num_rows` rows at 1 / `factor` of the size: (h, w, components) uint8, where h is
        ceil(num_rows / factor) and w is ceil(width / factor).

        The decoder gets a header with `num_rows` as height, so that it stops there. Returns None if it rejects the
        file.
        """
        frame, components = self.layout.frame, self.layout.components
        shape = (-(-num_rows // factor), -(-self.layout.size[0] // factor), components)
        content = self.content[:frame] + num_rows.to_bytes(2, "big") + self.content[frame + 2 :]
        try:
            pixels = get_jpeg_decoder()(content, shape, factor)
        except Exception:  # `decode_to_pillow` raises a precise error
            return None
        return pixels if pixels.shape == shape else None


LazyImage = LazyJpeg | LazyPixels  # an image whose size is known before its pixels are decoded


def open_lazy_image(raw: bytes | np.ndarray, channels: int, name: str, exact: bool = True) -> Image.Image | LazyImage:
    """Open an image, a file's bytes or pixels (H, W[, C]), as a `LazyImage` if possible, else as a decoded Pillow
    image.

    If `exact` is False, a downscaled crop of a plain JPEG may be decoded at 1/2, 1/4 or 1/8 of its size. Raises
    DataError for an unreadable file.
    """
    if isinstance(raw, np.ndarray):
        pixels = raw[..., None] if raw.ndim == 2 else raw
        if (
            channels in PILLOW_MODES
            and pixels.dtype == np.uint8
            and pixels.ndim == 3
            and pixels.shape[2] == channels
            and pixels.size
        ):
            return LazyPixels(pixels)
    elif raw.startswith(b"\xff\xd8") and channels in PILLOW_MODES:
        jpeg = parse_plain_jpeg(raw, channels, name, exact)
        if jpeg is not None:
            return jpeg
    return decode_to_pillow(raw, channels, name)


def parse_plain_jpeg(content: bytes, channels: int, name: str, exact: bool) -> LazyJpeg | None:
    """Parse the header of a plain JPEG; return None for other files, and if Pillow rejects the header.

    To check the header, Pillow decodes a file of one block, which consists of the header without the coded pixels.
    Files are thus accepted or rejected regardless of the decoder that is installed.
    """
    if (layout := parse_jpeg_layout(content)) is None:
        return None
    width, height = layout.size
    corner = bytes((0, min(height, JPEG_BLOCK_SIZE), 0, min(width, JPEG_BLOCK_SIZE)))
    header = content[: layout.frame] + corner + content[layout.frame + 4 : layout.pixel_offset] + b"\xff\xd9"
    orientation = (read_jpeg_orientation_cached if len(header) <= MAX_CACHED_HEADER_BYTES else read_jpeg_orientation)(
        header, "L" if layout.components == 1 else "RGB"
    )
    if orientation is None or width * height > MAX_PIXELS:
        return None
    return LazyJpeg(content, name, channels=channels, layout=layout, orientation=orientation, exact=exact)


def read_jpeg_orientation(header: bytes, mode: str) -> int | None:
    """Return the EXIF orientation of a JPEG, if Pillow decodes it in the mode `mode`; None for other files."""
    try:
        with suppress_warnings(), Image.open(io.BytesIO(header), formats=("JPEG",)) as image:
            if image.format != "JPEG" or image.mode != mode:
                return None
            orientation = read_exif_orientation(image)
            image.load()
            return orientation
    except Exception:  # `decode_to_pillow` raises a precise error
        return None


read_jpeg_orientation_cached = lru_cache(maxsize=256)(read_jpeg_orientation)


def parse_jpeg_layout(content: bytes) -> JpegLayout | None:
    """Parse the segments of a plain JPEG up to its scan; return None for other files.

    A plain JPEG has one frame, one scan of all components, and only the end marker after the scan. Damage in the rows
    that are not decoded can therefore only affect coded pixels, which decoders tolerate.
    """
    offset, frame = 2, 0
    while content[offset : offset + 1] == b"\xff" and offset + 10 <= len(content):
        marker, length = content[offset + 1], int.from_bytes(content[offset + 2 : offset + 4], "big")
        if marker in JPEG_FRAME_MARKERS and not frame and content[offset + 4] == 8:
            frame = offset + 5
        elif marker == 0xDA:
            components, scan = content[frame + 4] if frame else 0, offset + 2 + length
            end_marker = _SCAN_MARKER.search(content, scan)
            is_complete = end_marker is not None and end_marker.end() == len(content) and content[-1] == 0xD9
            if not is_complete or components not in (1, 3) or content[offset + 4] != components:
                return None
            max_subsampling = max(content[frame + 6 + 3 * component] & 15 for component in range(components))
            height, width = (int.from_bytes(content[i : i + 2], "big") for i in (frame, frame + 2))
            return JpegLayout(frame, components, JPEG_BLOCK_SIZE * max_subsampling, scan, (width, height))
        elif marker not in JPEG_TABLE_MARKERS:
            return None
        offset += 2 + length
    return None


def choose_reduction_factor(size: tuple[int, int], target: tuple[int, int]) -> int:
    """Choose the largest factor of 8, 4, 2 and 1 by which a box can be reduced, so that it is still at least
    MIN_OVERSAMPLING times as large as `target`. Both sizes are (height, width)."""
    factors = (
        f
        for f in REDUCTION_FACTORS
        if size[0] >= f * MIN_OVERSAMPLING * target[0] and size[1] >= f * MIN_OVERSAMPLING * target[1]
    )
    return next(factors, 1)


@cache
def get_jpeg_decoder() -> Callable[[bytes, tuple[int, int, int], int], np.ndarray]:
    """Return the fastest installed JPEG decoder, a function (content, shape, factor) -> pixels of `shape` (height,
    width, C) uint8. `factor` is the reduction of the size."""
    try:
        import simplejpeg
    except ImportError:
        return decode_jpeg_with_pillow

    def decode_jpeg_with_turbo(content: bytes, shape: tuple[int, int, int], factor: int) -> np.ndarray:
        min_size = {} if factor == 1 else {"min_height": shape[0], "min_width": shape[1]}
        return simplejpeg.decode_jpeg(content, "GRAY" if shape[2] == 1 else "RGB", strict=False, **min_size)

    return decode_jpeg_with_turbo


def decode_jpeg_with_pillow(content: bytes, shape: tuple[int, int, int], factor: int) -> np.ndarray:
    """Decode a JPEG with Pillow at 1 / `factor` of its size, to `shape` (height, width, C) uint8."""
    with suppress_warnings(), Image.open(io.BytesIO(content), formats=("JPEG",)) as image:
        if factor > 1:
            image.draft(image.mode, (image.width // factor, image.height // factor))
        image.load()
        return np.asarray(image).reshape(shape)
