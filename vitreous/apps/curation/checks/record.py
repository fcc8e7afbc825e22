"""Records of the images that `data check` has read. They have a fixed size: a million take at most 100 MB."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np
from PIL import Image

from vitreous.apps.curation.copies.scan import ReadErrors, SampleSource, digest_content, fill_records, make_grey_views
from vitreous.apps.curation.copies.windows import (
    DESCRIPTOR_LENGTH,
    VIEW_SIZE,
    compute_whole_descriptors,
    make_grey_view,
)
from vitreous.data.annotations.target import get_sample_axes
from vitreous.data.decoding.decode import (
    IMAGE_FILE_SUFFIXES,
    IMAGE_FORMATS,
    decode_to_pillow,
    read_exif_orientation,
    suppress_warnings,
)
from vitreous.data.decoding.heif import select_pillow_formats
from vitreous.data.decoding.npy import NPY_MAGIC
from vitreous.data.decoding.regions import LazyJpeg, open_lazy_image
from vitreous.data.decoding.spectral import detect_channel_form, read_bands
from vitreous.data.decoding.tiff import TIFF_SIGNATURES
from vitreous.data.decoding.volumes import GZIP_MAGIC, ZIP_MAGIC, is_nifti, open_volume, read_volume, read_volume_form

RECORD = np.dtype(
    [
        ("digest", "<u8", 2),  # first half of the SHA-256 of the stored bytes or pixels
        ("whole", "i1", DESCRIPTOR_LENGTH),  # 127 times `compute_whole_descriptors`, for the near-duplicate search
        ("bytes", "<u8"),
        ("width", "<u4"),  # after EXIF rotation
        ("height", "<u4"),
        ("slices", "<u4"),  # length of the first axis of a volume; 0 for an image
        ("mean", "<f4", 3),  # per channel of the decoded image, 0 to 255
        ("std", "<f4", 3),
        ("traits", "u1"),
        ("state", "u1"),
        ("format", "u1"),  # index into FILE_FORMATS
        ("mode", "u1"),  # index into IMAGE_MODES
        ("depth", "u1"),  # stored bits per channel
    ]
)
# pixel format of an image: `numbers` is the dtype, or VOXELS or SIGNAL
PIXEL_FORMAT = np.dtype([("channels", "<u4"), ("numbers", "U8"), ("height", "<u4"), ("width", "<u4"), ("state", "u1")])
FILE_FORMATS = (
    "other",
    "pixels",
    *IMAGE_FORMATS,
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
IMAGE_MODES = (
    "other",
    "1",
    "L",
    "P",
    "RGB",
    "RGBA",
    "LA",
    "PA",
    "CMYK",
    "I",
    "I;16",
    "I;16B",
    "I;16L",
    "YCbCr",
    "RGBX",
)
FORMAT_SUFFIXES = {
    "JPEG": {".jpg", ".jpeg", ".jpe", ".jfif"}, "MPO": {".jpg", ".jpeg"}, "PNG": {".png"},
    "WEBP": {".webp"}, "GIF": {".gif"}, "BMP": {".bmp"},
    "TIFF": {".tif", ".tiff"}, "NPY": {".npy"}, "AVIF": {".avif"}, "HEIF": {".heic", ".heif", ".hif"},
}  # fmt: skip


VOXELS, SIGNAL = "voxels", "signal"  # in place of the dtype in the pixel format of volumes and signals
AXES_BY_CONTENT = {SIGNAL: 1, VOXELS: 3}
# channels, and the dtype of multi-channel images (`detect_channel_form`), VOXELS or SIGNAL; None for colour images
PixelFormat = tuple[int, str] | None
ImageHeader = tuple[str, str, int, int]  # format, mode, bits per channel, traits
PLACEHOLDER_NAME = "image"  # name of an image in errors; `fill_records` removes it
_POWERS = np.arange(256.0)[:, None] ** (1, 2)


class ImageTrait(IntEnum):
    """An unusual property of an image or a clip, as a bit of the field `traits`."""

    ANIMATED = 1
    ALPHA = 2
    EXIF_ROTATED = 4  # stored rotated or mirrored, with an EXIF orientation
    ONE_COLOUR = 8
    WRONG_EXTENSION = 16  # the file extension belongs to another format
    WITHOUT_MOTION = 32  # a clip with several frames that are all the same


def survey_images(
    pool: SampleSource, samples: Sequence[int], form: PixelFormat = None
) -> tuple[np.ndarray, ReadErrors]:
    """Read and decode n samples once. Return (n,) records of dtype `RECORD`, and the read errors.

    Decodes as training does: with `decode_to_pillow`, or with `read_bands` if `form` has channels and dtype.
    """
    records, views = np.zeros(len(samples), RECORD), np.zeros((len(samples), VIEW_SIZE, VIEW_SIZE), np.uint8)
    record_indices = {sample: index for index, sample in enumerate(samples)}

    def survey_image(pool: SampleSource, sample: int, record: Any) -> None:
        """Read one image, and fill its record."""
        raw = pool.raw(sample)
        image, (file_format, mode, depth, traits) = decode_with_header(raw, form)
        mean, std = compute_channel_moments(image)
        views[record_indices[sample]] = make_grey_view(image, VIEW_SIZE)
        record["digest"], record["bytes"] = digest_content(raw), len(raw) if isinstance(raw, bytes) else raw.nbytes
        record["width"], record["height"], record["mean"], record["std"] = *image.size, mean, std
        record["slices"] = (
            read_volume_form(raw, PLACEHOLDER_NAME)[1][0] if form is not None and form[1] == VOXELS else 0
        )
        record["format"], record["mode"], record["depth"] = (
            category_index(file_format, FILE_FORMATS),
            category_index(mode, IMAGE_MODES),
            depth,
        )
        suffix = os.path.splitext(pool.name(sample))[1].lower()
        has_wrong_extension = (
            file_format in FORMAT_SUFFIXES
            and suffix in IMAGE_FILE_SUFFIXES
            and suffix not in FORMAT_SUFFIXES[file_format]
        )
        record["traits"] = (
            traits | ImageTrait.WRONG_EXTENSION * has_wrong_extension | ImageTrait.ONE_COLOUR * (max(std) == 0)
        )

    reasons = fill_records(records, pool, samples, survey_image)
    records["whole"] = np.rint(127 * compute_whole_descriptors(views))
    return records, reasons


def read_image_views(
    pool: SampleSource, samples: Sequence[int], form: PixelFormat = None
) -> tuple[np.ndarray, ReadErrors]:
    """Read n candidate duplicates again, for larger grey views. Return (n,) records of dtype `VIEW`, and the read
    errors."""
    return make_grey_views(pool, samples, lambda pool, sample: decode_with_header(pool.raw(sample), form)[0])


def probe_pixel_formats(pool: SampleSource, samples: Sequence[int]) -> tuple[np.ndarray, ReadErrors]:
    """Read the pixel formats and upright sizes of n samples. Return (n,) records of dtype `PIXEL_FORMAT`, and the read
    errors."""
    records = np.zeros(len(samples), PIXEL_FORMAT)

    def probe_image(pool: SampleSource, sample: int, record: Any) -> None:
        """Read one image, and fill its record with its pixel format and size."""
        raw = pool.raw(sample)
        if (axes := get_sample_axes(pool)) != 2:  # type: ignore[arg-type]
            record["channels"], size = read_volume_form(raw, PLACEHOLDER_NAME, axes)
            record["numbers"] = next(name for name, num_axes in AXES_BY_CONTENT.items() if num_axes == axes)
            record["height"], record["width"] = (1, *size)[-2:]
            read_middle_slice(raw, int(record["channels"]), axes)
            return
        form = detect_channel_form(raw, PLACEHOLDER_NAME)
        record["channels"], record["numbers"] = form or (0, "")  # from the header, also if values cannot be read
        image = (
            decode_to_pillow(raw, 3, PLACEHOLDER_NAME) if form is None else read_bands(raw, *form, PLACEHOLDER_NAME)[0]
        )
        record["width"], record["height"] = image.size

    return records, fill_records(records, pool, samples, probe_image)


def stretch_to_grey(band: Image.Image) -> Image.Image:
    """Convert one channel of any dtype to a grey RGB image, scaling its values from minimum to maximum to 0 to 255."""
    values = np.asarray(band, np.float64)
    low, high = float(values.min()), float(values.max())
    return Image.fromarray(((values - low) * (255 / (high - low) if high > low else 0)).astype(np.uint8)).convert("RGB")


def read_middle_slice(raw: bytes | np.ndarray, channels: int, axes: int = 3) -> Image.Image:
    """Read the middle slice (H, W) of the first channel of a file's bytes, or of voxels (D, H, W[, C]), as a grey RGB
    image. A signal becomes an image (1, L). Raises DataError if it cannot be read."""
    volume = read_volume(raw, channels, PLACEHOLDER_NAME, axes)[0]
    if axes == 1:
        return stretch_to_grey(Image.fromarray(volume[None]))
    return stretch_to_grey(Image.fromarray(volume[len(volume) // 2]))


def category_index(name: str, names: tuple[str, ...]) -> int:
    """Return the index of `name` in `names`, or 0 (`other`) if `names` does not contain it."""
    return names.index(name) if name in names else 0


def compute_channel_moments(image: Image.Image) -> tuple[list[float], list[float]]:
    """Return the exact mean and standard deviation of each channel of an RGB image, computed from its histogram."""
    counts = np.array(image.histogram(), np.float64).reshape(3, 256)
    mean, square = (counts @ _POWERS).T / (image.width * image.height)
    return mean.tolist(), np.sqrt((square - mean**2).clip(0)).tolist()


def decode_with_header(raw: bytes | np.ndarray, form: PixelFormat) -> tuple[Image.Image, ImageHeader]:
    """Decode a file's bytes or pixels (H, W[, C]) to RGB as training does, and read the header. Raises DataError if
    that fails.

    Multi-channel images are represented by their first channel, volumes by their middle slice.
    """
    if form is not None and form[1] in AXES_BY_CONTENT:
        axes = AXES_BY_CONTENT[form[1]]
        depth = 8 * open_volume(raw, PLACEHOLDER_NAME, axes).dtype.itemsize
        return read_middle_slice(raw, form[0], axes), (detect_volume_format(raw), "other", depth, 0)
    if form is not None:
        image = stretch_to_grey(read_bands(raw, *form, PLACEHOLDER_NAME)[0])
        file_format, mode, _, traits = read_image_header(raw, image)
        return image, (file_format, mode, 8 * np.dtype(form[1]).itemsize, traits)
    regions = open_lazy_image(raw, 3, PLACEHOLDER_NAME)
    if isinstance(regions, Image.Image):
        return regions, read_image_header(raw, regions)
    image = Image.fromarray(regions.decode_region((0, 0, *regions.size)))
    if not isinstance(regions, LazyJpeg):
        return image, read_image_header(raw, image)
    mode = "L" if regions.layout.components == 1 else "RGB"
    return image, ("JPEG", mode, 8, ImageTrait.EXIF_ROTATED * (regions.orientation > 1))


def detect_volume_format(raw: bytes | np.ndarray) -> str:
    """Return the `FILE_FORMATS` name of a volume or signal by its first bytes; `pixels` for voxels (D, H, W[, C])."""
    if isinstance(raw, np.ndarray):
        return "pixels"
    is_nifti_file = raw.startswith(GZIP_MAGIC) or is_nifti(raw)
    signatures = ((ZIP_MAGIC, "NPZ"), (NPY_MAGIC, "NPY"), *((signature, "TIFF") for signature in TIFF_SIGNATURES))
    return (
        "NIFTI"
        if is_nifti_file
        else next((file_format for signature, file_format in signatures if raw.startswith(signature)), "TEXT")
    )


def read_image_header(raw: bytes | np.ndarray, decoded: Image.Image) -> ImageHeader:
    """Read the header of a file's bytes, or of pixels (H, W[, C]); `decoded` is the decoded image. Unsupported headers
    give `other`; it never raises."""
    if not isinstance(raw, bytes):
        return "pixels", decoded.mode, 8, 0
    if raw.startswith(NPY_MAGIC):
        return "NPY", "other", 8, 0
    try:
        with (
            suppress_warnings(),
            Image.open(io.BytesIO(raw), formats=select_pillow_formats(raw, PLACEHOLDER_NAME, IMAGE_FORMATS)) as image,
        ):
            file_format, mode = image.format or "other", image.mode
            raw_mode = str(image.tile[0][3]) if image.tile else ""
            depth = 1 if mode == "1" else 16 if ";16" in raw_mode or mode.startswith("I") else 8
            traits = ImageTrait.ALPHA * image.has_transparency_data | ImageTrait.EXIF_ROTATED * (
                read_exif_orientation(image) > 1
            )
            return file_format, mode, depth, traits | ImageTrait.ANIMATED * bool(getattr(image, "is_animated", False))
    except Exception:  # Pillow does not support all formats of `read_bands`
        return "other", "other", 8, 0
