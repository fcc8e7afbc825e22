"""Records of fixed size of the images that were read: a million take at most 100 MB."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np
from PIL import Image

from vitreous.apps.curation.copies.scan import Pool, Reasons, digest, fill, read_views
from vitreous.apps.curation.copies.windows import LENGTH, SIDE, describe_whole, view
from vitreous.data.annotations.target import axes_of
from vitreous.data.decoding.decode import FORMATS, SUFFIXES, decode, orientation, silence
from vitreous.data.decoding.heif import open_formats
from vitreous.data.decoding.npy import MAGIC
from vitreous.data.decoding.regions import Jpeg, open_picture
from vitreous.data.decoding.spectral import channel_form, read_bands
from vitreous.data.decoding.tiff import TIFF
from vitreous.data.decoding.volumes import GZIP, ZIP, is_nifti, open_volume, read_volume, volume_form

RECORD = np.dtype(
    [
        ("digest", "<u8", 2),  # of the stored bytes or pixels, the first half of their SHA-256
        ("whole", "i1", LENGTH),  # descriptor that near copies are searched by: 127 times `describe_whole`
        ("bytes", "<u8"),
        ("width", "<u4"),  # upright
        ("height", "<u4"),
        ("slices", "<u4"),  # of a volume, the length of its first axis; 0 of a picture
        ("mean", "<f4", 3),  # of the decoded picture, 0..255
        ("std", "<f4", 3),
        ("traits", "u1"),
        ("state", "u1"),
        ("format", "u1"),  # position in KINDS
        ("mode", "u1"),  # position in MODES
        ("depth", "u1"),  # bits of a channel as stored
    ]
)
# how an image is read
FORM = np.dtype([("channels", "<u4"), ("numbers", "U8"), ("height", "<u4"), ("width", "<u4"), ("state", "u1")])
KINDS = (
    "other",
    "pixels",
    *FORMATS,
    "MPO",
    "NPY",
    "AVIF",
    "HEIF",
    "NIFTI",
    "NPZ",
    "MOV",
    "AVI",
    "MATROSKA",
    "MPEG",
    "FRAMES",
    "TEXT",
)
MODES = ("other", "1", "L", "P", "RGB", "RGBA", "LA", "PA", "CMYK", "I", "I;16", "I;16B", "I;16L", "YCbCr", "RGBX")
SUFFIX_OF = {
    "JPEG": {".jpg", ".jpeg", ".jpe", ".jfif"}, "MPO": {".jpg", ".jpeg"}, "PNG": {".png"},
    "WEBP": {".webp"}, "GIF": {".gif"}, "BMP": {".bmp"},
    "TIFF": {".tif", ".tiff"}, "NPY": {".npy"}, "AVIF": {".avif"}, "HEIF": {".heic", ".heif", ".hif"},
}  # fmt: skip


VOXELS, SIGNAL = "voxels", "signal"  # in place of a dtype: images are volumes or signals
AXES = {SIGNAL: 1, VOXELS: 3}
# channels and dtype of images that are read channel by channel, as `channel_form` returns it, or one of AXES
Form = tuple[int, str] | None
Header = tuple[str, str, int, int]  # format, mode, bits of a channel, traits
NAMELESS = "image"  # name of an image in errors; `fill` removes it
_POWERS = np.arange(256.0)[:, None] ** (1, 2)


class Trait(IntEnum):
    """An unusual property of an image."""

    ANIMATED = 1
    ALPHA = 2
    TURNED = 4  # by EXIF
    ONE_COLOUR = 8
    MISNAMED = 16  # the name ends as that of another format
    FROZEN = 32  # a clip of several frames that are all the same


def survey(pool: Pool, samples: Sequence[int], form: Form = None) -> tuple[np.ndarray, Reasons]:
    """Read and decode n samples once: (n,) RECORD, and why some cannot be read.

    Reads as training does: with `decode`, or `read_bands` where `form` gives the channels and their dtype.
    """
    records, views = np.zeros(len(samples), RECORD), np.zeros((len(samples), SIDE, SIDE), np.uint8)
    rows = {sample: row for row, sample in enumerate(samples)}

    def read(pool: Pool, sample: int, record: Any) -> None:
        raw = pool.raw(sample)
        picture, (kind, mode, depth, traits) = opened(raw, form)
        mean, std = moments(picture)
        views[rows[sample]] = view(picture, SIDE)
        record["digest"], record["bytes"] = digest(raw), len(raw) if isinstance(raw, bytes) else raw.nbytes
        record["width"], record["height"], record["mean"], record["std"] = *picture.size, mean, std
        record["slices"] = volume_form(raw, NAMELESS)[1][0] if form is not None and form[1] == VOXELS else 0
        record["format"], record["mode"], record["depth"] = place(kind, KINDS), place(mode, MODES), depth
        suffix = os.path.splitext(pool.name(sample))[1].lower()
        misnamed = kind in SUFFIX_OF and suffix in SUFFIXES and suffix not in SUFFIX_OF[kind]
        record["traits"] = traits | Trait.MISNAMED * misnamed | Trait.ONE_COLOUR * (max(std) == 0)

    reasons = fill(records, pool, samples, read)
    records["whole"] = np.rint(127 * describe_whole(views))
    return records, reasons


def review(pool: Pool, samples: Sequence[int], form: Form = None) -> tuple[np.ndarray, Reasons]:
    """Larger grey views of n samples, which may be copies: (n,) VIEW, and why some cannot be read."""
    return read_views(pool, samples, lambda pool, sample: opened(pool.raw(sample), form)[0])


def probe(pool: Pool, samples: Sequence[int]) -> tuple[np.ndarray, Reasons]:
    """How n samples have to be read, and their upright sizes: (n,) FORM, and why some cannot be read."""
    records = np.zeros(len(samples), FORM)

    def read(pool: Pool, sample: int, record: Any) -> None:
        raw = pool.raw(sample)
        if (axes := axes_of(pool)) != 2:  # type: ignore[arg-type]
            record["channels"], size = volume_form(raw, NAMELESS, axes)
            record["numbers"] = next(name for name, own in AXES.items() if own == axes)
            record["height"], record["width"] = (1, *size)[-2:]
            middle_plane(raw, int(record["channels"]), axes)
            return
        form = channel_form(raw, NAMELESS)
        record["channels"], record["numbers"] = form or (0, "")  # from the header: also where values cannot be read
        picture = decode(raw, 3, NAMELESS) if form is None else read_bands(raw, *form, NAMELESS)[0]
        record["width"], record["height"] = picture.size

    return records, fill(records, pool, samples, read)


def stretched(band: Image.Image) -> Image.Image:
    """Convert one channel of any numbers to a grey RGB image, from its least value to its greatest."""
    values = np.asarray(band, np.float64)
    low, high = float(values.min()), float(values.max())
    return Image.fromarray(((values - low) * (255 / (high - low) if high > low else 0)).astype(np.uint8)).convert("RGB")


def middle_plane(raw: bytes | np.ndarray, channels: int, axes: int = 3) -> Image.Image:
    """The middle slice (H, W) of the first channel of a file's bytes, or of voxels (D, H, W[, C]), as a grey RGB image;
    a signal as a row (1, L). Raises DataError."""
    volume = read_volume(raw, channels, NAMELESS, axes)[0]
    if axes == 1:
        return stretched(Image.fromarray(volume[None]))
    return stretched(Image.fromarray(volume[len(volume) // 2]))


def place(word: str, known: tuple[str, ...]) -> int:
    """Position of a word among the known ones; 0 (`other`) if it is none of them."""
    return known.index(word) if word in known else 0


def moments(picture: Image.Image) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel of an RGB image, exact, from its histogram."""
    counts = np.array(picture.histogram(), np.float64).reshape(3, 256)
    mean, square = (counts @ _POWERS).T / (picture.width * picture.height)
    return mean.tolist(), np.sqrt((square - mean**2).clip(0)).tolist()


def opened(raw: bytes | np.ndarray, form: Form) -> tuple[Image.Image, Header]:
    """Decode a file's bytes or pixels (H, W[, C]) as in training, to RGB, and read the header. Raises DataError.

    Of images that are read channel by channel, the first channel stands for all; of volumes its middle slice.
    """
    if form is not None and form[1] in AXES:
        axes = AXES[form[1]]
        depth = 8 * open_volume(raw, NAMELESS, axes).dtype.itemsize
        return middle_plane(raw, form[0], axes), (volume_kind(raw), "other", depth, 0)
    if form is not None:
        picture = stretched(read_bands(raw, *form, NAMELESS)[0])
        kind, mode, _, traits = header(raw, picture)
        return picture, (kind, mode, 8 * np.dtype(form[1]).itemsize, traits)
    regions = open_picture(raw, 3, NAMELESS)
    if isinstance(regions, Image.Image):
        return regions, header(raw, regions)
    picture = Image.fromarray(regions.region((0, 0, *regions.size)))
    if not isinstance(regions, Jpeg):
        return picture, header(raw, picture)
    mode = "L" if regions.layout.components == 1 else "RGB"
    return picture, ("JPEG", mode, 8, Trait.TURNED * (regions.orientation > 1))


def volume_kind(raw: bytes | np.ndarray) -> str:
    """The format of a file's bytes, or of voxels (D, H, W[, C]), one of KINDS."""
    if isinstance(raw, np.ndarray):
        return "pixels"
    nifti = raw.startswith(GZIP) or is_nifti(raw)
    marks = ((ZIP, "NPZ"), (MAGIC, "NPY"), *((mark, "TIFF") for mark in TIFF))
    return "NIFTI" if nifti else next((kind for mark, kind in marks if raw.startswith(mark)), "TEXT")


def header(raw: bytes | np.ndarray, picture: Image.Image) -> Header:
    """Read the header of a file's bytes, or pixels (H, W[, C]), decoded to `picture`. Raises nothing."""
    if not isinstance(raw, bytes):
        return "pixels", picture.mode, 8, 0
    if raw.startswith(MAGIC):
        return "NPY", "other", 8, 0
    try:
        with silence(), Image.open(io.BytesIO(raw), formats=open_formats(raw, NAMELESS, FORMATS)) as image:
            kind, mode = image.format or "other", image.mode
            coding = str(image.tile[0][3]) if image.tile else ""
            depth = 1 if mode == "1" else 16 if ";16" in coding or mode.startswith("I") else 8
            traits = Trait.ALPHA * image.has_transparency_data | Trait.TURNED * (orientation(image) > 1)
            return kind, mode, depth, traits | Trait.ANIMATED * bool(getattr(image, "is_animated", False))
    except Exception:  # Pillow cannot open all that `read_bands` can
        return "other", "other", 8, 0
