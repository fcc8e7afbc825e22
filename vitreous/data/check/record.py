"""What is kept of an image that was looked at: a record of fixed size, so that a million take no more than 100 MB."""

from __future__ import annotations

import hashlib
import io
import os
from enum import IntEnum
from typing import Any

import numpy as np
from PIL import Image

from vitreous.data.copies.grey import view
from vitreous.data.copies.windows import LENGTH, SIDE, describe_whole
from vitreous.data.decoding.decode import FORMATS, SUFFIXES, decode, orientation, silence
from vitreous.data.decoding.heif import open_formats
from vitreous.data.decoding.npy import MAGIC
from vitreous.data.decoding.regions import Jpeg, open_picture
from vitreous.data.decoding.spectral import channel_form, read_bands
from vitreous.data.split import Split
from vitreous.errors import DataError

LARGER = 64  # side of the grey views of images that may be copies
UNSEEN, READABLE, UNREADABLE = range(3)
RECORD = np.dtype(
    [
        ("digest", "<u8", 2),  # of the stored bytes or pixels, the first half of their SHA-256
        ("whole", "i1", LENGTH),  # what near copies are searched by: 127 times `describe_whole`
        ("bytes", "<u8"),
        ("width", "<u4"),  # upright
        ("height", "<u4"),
        ("mean", "<f4", 3),  # of the decoded picture, 0..255
        ("std", "<f4", 3),
        ("traits", "<u2"),
        ("state", "u1"),
        ("format", "u1"),  # position in KINDS
        ("mode", "u1"),  # position in MODES
        ("depth", "u1"),  # bits of a channel as stored
    ]
)
VIEW = np.dtype([("view", "u1", (LARGER, LARGER)), ("state", "u1")])  # of the few that are looked at again
# how one is read
FORM = np.dtype([("channels", "<u4"), ("numbers", "U8"), ("height", "<u4"), ("width", "<u4"), ("state", "u1")])
KINDS = ("other", "pixels", *FORMATS, "MPO", "NPY", "AVIF", "HEIF")
MODES = ("other", "1", "L", "P", "RGB", "RGBA", "LA", "PA", "CMYK", "I", "I;16", "I;16B", "I;16L", "YCbCr", "RGBX")
SUFFIX_OF = {
    "JPEG": {".jpg", ".jpeg"}, "MPO": {".jpg", ".jpeg"}, "PNG": {".png"},
    "WEBP": {".webp"}, "GIF": {".gif"}, "BMP": {".bmp"},
    "TIFF": {".tif", ".tiff"}, "NPY": {".npy"}, "AVIF": {".avif"}, "HEIF": {".heic", ".heif", ".hif"},
}  # fmt: skip


# channels and numbers where pictures are read channel by channel, as `channel_form` has it
Form = tuple[int, str] | None
Header = tuple[str, str, int, int]  # format, mode, bits of a channel, traits
NAMELESS = "image"  # what an image is called until it cannot be read
NO_DESCRIPTOR = (0,) * LENGTH
_POWERS = np.arange(256.0)[:, None] ** (1, 2)


class Trait(IntEnum):
    """What is out of the ordinary about an image."""

    ANIMATED = 1
    ALPHA = 2
    TURNED = 4  # by EXIF
    ONE_COLOUR = 8
    MISNAMED = 16  # the name ends as that of another format


def survey(split: Split, samples: range, form: Form = None) -> tuple[np.ndarray, dict[int, str]]:
    """Read and decode n samples once -> (n,) RECORD, and why some cannot be read.

    The verdict is that of `decode`, or of `bands` where `form` has the channels and their numbers: as in training and
    everywhere else.
    """
    records, reasons = np.zeros(len(samples), RECORD), {}
    views = np.zeros((len(samples), SIDE, SIDE), np.uint8)
    for row, sample in enumerate(samples):
        record = read_record(split, sample, views[row], form)
        if isinstance(record, str):
            reasons[sample] = record
            records["state"][row] = UNREADABLE
        else:
            records[row] = record
    records["whole"] = np.rint(127 * describe_whole(views))
    return records, reasons


def review(split: Split, samples: range, form: Form = None) -> tuple[np.ndarray, dict[int, str]]:
    """The larger grey views of n samples, which may be copies -> (n,) VIEW, and why some cannot be read."""
    records, reasons = np.zeros(len(samples), VIEW), {}
    for row, sample in enumerate(samples):
        if isinstance(record := read_record(split, sample, records["view"][row], form), str):
            reasons[sample] = record
    return records, reasons


def read_record(split: Split, sample: int, grey: np.ndarray, form: Form) -> tuple[Any, ...] | str:
    """The record of a sample, but for its descriptor, or why it cannot be read. Fills in `grey`, (side, side) uint8,
    with its view."""
    try:
        raw = split.raw(sample)
        content = (
            raw
            if isinstance(raw, bytes)
            else f"{raw.shape} {raw.dtype.str}".encode() + np.ascontiguousarray(raw).tobytes()
        )
        size = len(raw) if isinstance(raw, bytes) else raw.nbytes
        digest = tuple(np.frombuffer(hashlib.sha256(content).digest()[:16], "<u8").tolist())
        picture, (kind, mode, depth, traits) = opened(raw, form)
        mean, std = moments(picture)
        grey[:] = view(picture, len(grey))
    except DataError as error:
        return error.message.removeprefix(f"{NAMELESS}: ").removeprefix(f"{split.name(sample)}: ")
    except MemoryError:
        return "cannot be read (out of memory)"
    if kind in SUFFIX_OF and misnamed(split.name(sample), kind):
        traits |= Trait.MISNAMED
    if max(std) == 0:
        traits |= Trait.ONE_COLOUR
    return (
        digest,
        NO_DESCRIPTOR,
        size,
        *picture.size,
        mean,
        std,
        int(traits),
        READABLE,
        place(kind, KINDS),
        place(mode, MODES),
        depth,
    )


def probe(split: Split, samples: range) -> tuple[np.ndarray, dict[int, str]]:
    """How n samples would each be read, and their sizes upright -> (n,) FORM, READABLE where one can be; no reasons."""
    records = np.zeros(len(samples), FORM)
    for row, sample in enumerate(samples):
        name = split.name(sample)
        try:
            raw = split.raw(sample)
            form = channel_form(raw, name)
            picture = decode(raw, 3, name) if form is None else read_bands(raw, *form, name)[0]
        except Exception:  # the survey says why
            continue
        records[row] = (*(form or (0, "")), picture.height, picture.width, READABLE)
    return records, {}


def stretched(band: Image.Image) -> Image.Image:
    """One channel of any numbers as a grey RGB picture, from its least value to its greatest."""
    values = np.asarray(band, np.float64)
    low, high = float(values.min()), float(values.max())
    return Image.fromarray(((values - low) * (255 / (high - low) if high > low else 0)).astype(np.uint8)).convert("RGB")


def place(word: str, known: tuple[str, ...]) -> int:
    """Where a word stands among the known ones, 0 (`other`) for none of them."""
    return known.index(word) if word in known else 0


def moments(picture: Image.Image) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel of an RGB picture. From its histogram: sums of whole numbers,
    exact."""
    counts = np.array(picture.histogram(), np.float64).reshape(3, 256)
    mean, square = (counts @ _POWERS).T / (picture.width * picture.height)
    return mean.tolist(), np.sqrt((square - mean**2).clip(0)).tolist()


def opened(raw: bytes | np.ndarray, form: Form) -> tuple[Image.Image, Header]:
    """What is stored -> the RGB picture, decoded as in training, and what its header says. Raises DataError.

    Of pictures that are read channel by channel, the first channel stands for all.
    """
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


def header(raw: bytes | np.ndarray, picture: Image.Image) -> Header:
    """What the header of a file says that was read as `picture`. Never a verdict."""
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
    except Exception:  # what `bands` reads, Pillow need not
        return "other", "other", 8, 0


def misnamed(name: str, kind: str) -> bool:
    """Whether a name ends as that of another format; not where it has no such end."""
    suffix = os.path.splitext(name)[1].lower()
    return suffix in SUFFIXES and suffix not in SUFFIX_OF[kind]
