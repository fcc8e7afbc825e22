"""The content of a pack: encoded images, and writers of the shards that contain them."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from PIL import Image

from vitreous.data.decoding.decode import IMAGE_FORMATS, decode_to_pillow, read_exif_orientation, suppress_warnings
from vitreous.data.decoding.heif import select_pillow_formats
from vitreous.data.latents import Latents
from vitreous.data.layouts.packed import PACK_INDEX_DTYPE
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.data.split import Split
from vitreous.errors import DataError, UsageError
from vitreous.system.disk import compute_sha256, open_atomic

GREY_MODES = ("1", "L", "LA", "I", "I;16", "I;16L", "I;16B")
NPY_HEADER_BYTES = 128  # length of the header of .npy shards
TAR_END_BYTES = 1024  # zeros at the end of a tar file
MMAP_INSTRUCTIONS = (
    "import json, numpy\n"
    "pack = json.load(open('pack.json'))\n"
    "split = pack['splits']['train']\n"
    "row = numpy.load(split['files']['index']['file'])[0]  # of the first image\n"
    "shard = numpy.load(split['shards'][row['shard']]['file'], mmap_mode='r').reshape(-1)\n"
    "size = row['height'], row['width'], row['channels']\n"
    "pixels = shard[row['offset'] : row['offset'] + size[0] * size[1] * size[2]].reshape(size)\n"
    "label = pack['classes'][row['label']] if row['label'] >= 0 else numpy.load(split['files']['labels']['file'])[0]\n"
    "name = open(split['files']['ids']['file'], encoding='utf-8').read().split('\\n')[0]\n"
)
LATENT_INSTRUCTIONS = "pixels = (pixels - pack['latents']['shift']) * pack['latents']['scale']\n"
READING_INSTRUCTIONS = {
    "tar": "WebDataset archives. Per sample: NUMBER.jpg or NUMBER.png, the image; NUMBER.cls, the index of "
    "its class in `classes` (none if images have several); NUMBER.json, its id in the source and the name or names "
    "of its classes.",
    "uint8": MMAP_INSTRUCTIONS,
    "latents": MMAP_INSTRUCTIONS + LATENT_INSTRUCTIONS,
}


@dataclass(frozen=True)
class PackPlan:
    """The settings that determine the bytes of a pack. `source` is the fingerprint of the data, `short_side` is in
    pixels, `shard_size` in bytes.

    `latents` is the autoencoder if the form is `latents`; it encodes the centre square of `short_side` pixels of each
    image. `mirror` also stores latents of each training image mirrored. Raises UsageError for values out of range.
    """

    form: Literal["tar", "uint8", "latents"] = "tar"
    short_side: int = 256
    quality: int = 90
    lossless: bool = False
    shard_size: int = 256 * 2**20
    source: str = ""
    latents: Latents | None = None
    mirror: bool = False

    def __post_init__(self) -> None:
        if self.form not in READING_INSTRUCTIONS:
            raise UsageError(f"unknown pack format {self.form}", f"use one of {', '.join(READING_INSTRUCTIONS)}")
        if not 1 <= self.quality <= 100:
            raise UsageError(f"invalid JPEG quality {self.quality}", "use 1 to 100")
        if self.short_side < 1 or self.shard_size < 1:
            raise UsageError(f"--short-side {self.short_side} and --shard-size {self.shard_size} must be at least 1")
        if (self.latents is None) == (self.form == "latents") or (self.mirror and self.latents is None):
            raise UsageError("latents and --mirror need an autoencoder", "add --latents FOLDER")
        if self.latents is not None and self.short_side % self.latents.stride:
            problem = f"--short-side {self.short_side} is not a multiple of the autoencoder's {self.latents.stride}"
            raise UsageError(problem, "use --short-side 256")


class StoredImage(NamedTuple):
    """An encoded image: `kind` is `jpg` or `png`, and `content` the bytes of such a file, or `raw`, and `content` the
    bytes of pixels or latents."""

    kind: str
    content: bytes
    height: int
    width: int
    channels: int


@dataclass(frozen=True)
class SampleEncoder:
    """Encode the samples of a split for storage in a pack.

    If the shorter side exceeds `plan.short_side` pixels, the image is scaled down with a bicubic filter; images are
    never scaled up. Grey images have one channel, others three. In archives, a JPEG or PNG that needs neither scaling
    nor rotation is copied byte for byte. A scaled JPEG becomes a JPEG of `plan.quality`. Other images become a PNG, or
    such a JPEG if they are scaled and `plan.lossless` is not set.

    For latents, it returns the input pixels of the autoencoder: the centre of the image, mirrored for samples from the
    index `mirrored` on.
    """

    split: Split
    plan: PackPlan
    mirrored: int | None = None

    def __getitem__(self, sample: int) -> tuple[int, StoredImage | DataError]:
        try:
            return sample, self.encode_sample(sample)
        except DataError as error:
            return sample, error

    def encode_sample(self, sample: int) -> StoredImage:
        """Encode one sample of the split. Raises DataError for an image that cannot be read."""
        raw, plan = self.split.raw(sample), self.plan
        image = decode_to_pillow(raw, 3, self.split.name(sample))
        if plan.form == "latents":
            square = ImagePreprocess((plan.short_side, plan.short_side)).fit_image(image)
            if self.mirrored is not None and sample >= self.mirrored:
                square = square.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            return StoredImage("raw", square.tobytes(), plan.short_side, plan.short_side, 3)
        unchanged, file_type, grey = detect_stored_form(raw)
        if grey:
            image = image.convert("L")  # exact: all three channels are equal
        share = plan.short_side / min(image.size)
        if share < 1:
            size = round(image.width * share), round(image.height * share)
            image = image.resize(size, Image.Resampling.BICUBIC)
        shape = image.height, image.width, len(image.getbands())
        if plan.form == "uint8":
            return StoredImage("raw", image.tobytes(), *shape)
        if unchanged and share >= 1:
            assert isinstance(raw, bytes)
            return StoredImage(file_type, raw, *shape)
        buffer = io.BytesIO()
        if share < 1 and (file_type == "jpg" or not plan.lossless):
            image.save(buffer, "JPEG", quality=plan.quality)
            return StoredImage("jpg", buffer.getvalue(), *shape)
        image.save(buffer, "PNG")
        return StoredImage("png", buffer.getvalue(), *shape)


def detect_stored_form(raw: bytes | np.ndarray) -> tuple[bool, str, bool]:
    """Inspect bytes, or pixels (H, W[, C]), that `decode_to_pillow` has accepted. Return whether they can be stored as
    they are (every decoder returns the same pixels), their file type (`jpg`, `png` or ""), and whether they are
    grey."""
    if isinstance(raw, np.ndarray):
        return False, "", raw.ndim == 2 or raw.shape[-1] == 1
    if raw.startswith(b"\x93NUMPY"):
        return False, "", False
    with (
        suppress_warnings(),
        Image.open(io.BytesIO(raw), formats=select_pillow_formats(raw, "image", IMAGE_FORMATS)) as image,
    ):
        file_type = {"JPEG": "jpg", "PNG": "png"}.get(image.format or "", "")
        is_portable = (
            image.mode in ("L", "RGB")
            and read_exif_orientation(image) == 1
            and not image.has_transparency_data
            and getattr(image, "n_frames", 1) == 1
        )
        return bool(file_type) and is_portable, file_type, image.mode in GREY_MODES


class TarShard:
    """A WebDataset archive that is being written. Each sample has an image, its class index in `.cls`, and its id and
    class names in `.json`."""

    suffix = "tar"

    def __init__(self, path: Path, classes: Sequence[str], limit: int) -> None:
        self.file = open(path, "wb")  # noqa: SIM115 (close() does)
        self.tar = tarfile.open(fileobj=self.file, mode="w", format=tarfile.USTAR_FORMAT)  # noqa: SIM115
        self.classes, self.limit, self.size, self.images = classes, limit, TAR_END_BYTES, 0

    def add(self, sample: int, stored: StoredImage, label: np.ndarray, name: str) -> bool:
        """Write one sample, with a label of shape () or (K,). Return False if the shard is full. Raises OSError."""
        multilabel = label.ndim == 1
        class_names = [
            self.classes[class_index]
            for class_index in (np.flatnonzero(label).tolist() if multilabel else [int(label)])
        ]
        text = json.dumps({"id": name, "label": class_names if multilabel else class_names[0]}, ensure_ascii=False)
        members = {} if multilabel else {"cls": b"%d" % int(label)}
        members |= {stored.kind: stored.content, "json": text.encode("utf-8", "replace")}
        size = sum(512 + -(-len(content) // 512) * 512 for content in members.values())
        if self.images and self.size + size > self.limit:
            return False
        for suffix, content in members.items():
            header = tarfile.TarInfo(f"{sample:09d}.{suffix}")
            header.size = len(content)
            self.tar.addfile(header, io.BytesIO(content))
        self.size += size
        self.images += 1
        return True

    def close(self) -> np.ndarray:
        """Close the archive. Return an empty index, (0,) of dtype `PACK_INDEX_DTYPE`, since an archive needs none."""
        self.tar.close()
        self.file.close()
        return np.empty(0, PACK_INDEX_DTYPE)


class ArrayShard:
    """A .npy file of uint8 that is being written: (n, H, W, C) if all images have the same size, else one flat
    array."""

    suffix, dtype = "npy", np.dtype(np.uint8)

    def __init__(self, path: Path, classes: Sequence[str], limit: int) -> None:
        self.file = open(path, "wb")  # noqa: SIM115 (close() does)
        self.file.write(bytes(NPY_HEADER_BYTES))
        self.rows: list[tuple[int, ...]] = []
        self.limit, self.size, self.images = limit, NPY_HEADER_BYTES, 0

    def add(self, sample: int, stored: StoredImage, label: np.ndarray, name: str) -> bool:
        """Write one sample. Return False if the shard is full. Raises OSError. The sample's index entry, of shape (6,),
        has the sample in place of the shard, and no label; `write_split_index` completes it."""
        if self.images and self.size + len(stored.content) > self.limit:
            return False
        self.file.write(stored.content)
        offset = (self.size - NPY_HEADER_BYTES) // self.dtype.itemsize
        self.rows.append((sample, offset, stored.height, stored.width, stored.channels, -1))
        self.size += len(stored.content)
        self.images += 1
        return True

    def close(self) -> np.ndarray:
        """Write the header and close the file. Return the index of its images, (n,) of dtype `PACK_INDEX_DTYPE`.

        The header (format 1.0) is written last. It has a fixed length for any shape.
        """
        sizes, num_values = {entry[2:5] for entry in self.rows}, (self.size - NPY_HEADER_BYTES) // self.dtype.itemsize
        shape = (len(self.rows), *next(iter(sizes))) if len(sizes) == 1 else (num_values,)
        header_text = f"{{'descr': '{self.dtype.str}', 'fortran_order': False, 'shape': {shape}, }}"
        header = header_text.encode().ljust(NPY_HEADER_BYTES - 11) + b"\n"
        self.file.seek(0)
        self.file.write(b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header)
        self.file.close()
        return np.array(self.rows, dtype=PACK_INDEX_DTYPE)


class LatentShard(ArrayShard):
    """A .npy file of float16 latents that is being written, otherwise as `ArrayShard`."""

    dtype = np.dtype(np.float16)


SHARD_CLASSES = {"tar": TarShard, "uint8": ArrayShard, "latents": LatentShard}


def write_recorded_file(path: Path, content: bytes) -> dict[str, Any]:
    """Write a small file atomically, and return its `make_file_record`. Raises OSError."""
    with open_atomic(path) as file:
        file.write(content)
    return make_file_record(path)


def make_file_record(path: Path) -> dict[str, Any]:
    """Return the name, the number of bytes and the SHA-256 of a file. Raises OSError."""
    return {"file": path.name, "bytes": path.stat().st_size, "sha256": compute_sha256(path)}


def encode_npy(array: np.ndarray) -> bytes:
    """Encode an array of any shape as a .npy file."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()
