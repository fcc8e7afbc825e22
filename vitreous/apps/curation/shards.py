"""What a pack is made of: images as they will be stored, and the shards that they are written to."""

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
NPY_HEADER_BYTES = 128  # bytes in front of the numbers in a .npy file of ours
TAR_END_BYTES = 1024  # zeros that end a tar
MMAP_INSTRUCTIONS = (
    "import json, numpy\n"
    "pack = json.load(open('pack.json'))\n"
    "split = pack['splits']['train']\n"
    "row = numpy.load(split['files']['index']['file'])[0]  # of the first picture\n"
    "shard = numpy.load(split['shards'][row['shard']]['file'], mmap_mode='r').reshape(-1)\n"
    "size = row['height'], row['width'], row['channels']\n"
    "pixels = shard[row['offset'] : row['offset'] + size[0] * size[1] * size[2]].reshape(size)\n"
    "label = pack['classes'][row['label']] if row['label'] >= 0 else numpy.load(split['files']['labels']['file'])[0]\n"
    "name = open(split['files']['ids']['file'], encoding='utf-8').read().split('\\n')[0]\n"
)
LATENT_INSTRUCTIONS = "pixels = (pixels - pack['latents']['shift']) * pack['latents']['scale']\n"
READING_INSTRUCTIONS = {
    "tar": "WebDataset archives. Of each sample: NUMBER.jpg or NUMBER.png, the picture; NUMBER.cls, the position of "
    "its class in `classes` (none where images have several); NUMBER.json, its id in the source and the name or names "
    "of its classes.",
    "uint8": MMAP_INSTRUCTIONS,
    "latents": MMAP_INSTRUCTIONS + LATENT_INSTRUCTIONS,
}


@dataclass(frozen=True)
class PackPlan:
    """What the bytes of a pack depend on. `source` is the fingerprint of the data, `short_side` in pixels, `shard_size`
    in bytes.

    `latents`: of what, where the form is `latents`: of the middle of each image, a square of `short_side`. `mirror`:
    with those of each training image mirrored, as latents cannot be. Raises UsageError for values out of range.
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
            raise UsageError(f"no pack of the form {self.form}", f"there are {', '.join(READING_INSTRUCTIONS)}")
        if not 1 <= self.quality <= 100:
            raise UsageError(f"a quality of {self.quality} cannot be", "JPEG has 1 to 100")
        if self.short_side < 1 or self.shard_size < 1:
            raise UsageError("the short side and the size of a shard are at least 1")
        if (self.latents is None) == (self.form == "latents") or (self.mirror and self.latents is None):
            raise UsageError("latents are of an autoencoder, and --mirror is for them", "name it: --latents FOLDER")
        if self.latents is not None and self.short_side % self.latents.stride:
            problem = f"a side of {self.short_side} pixels is no multiple of the autoencoder's {self.latents.stride}"
            raise UsageError(problem, "use --short-side 256")


class StoredImage(NamedTuple):
    """One image as it will be stored: `jpg` or `png` and the bytes of such a file, or `raw` and those of its pixels or
    latents."""

    kind: str
    content: bytes
    height: int
    width: int
    channels: int


@dataclass(frozen=True)
class SampleEncoder:
    """Turns samples of a split into what a pack stores of them.

    The short side is scaled down to `plan.short_side` pixels where it is longer, with a bicubic filter, and never up.
    Greys have one channel, all others three. In archives a JPEG or a PNG that needs neither scaling nor turning stays
    as it is, to the byte; a scaled JPEG is a JPEG of `plan.quality`; anything else is a PNG, or, where it was scaled
    and not `plan.lossless`, such a JPEG. Of latents, it gives the pixels that an autoencoder will read: the middle of
    the image, of samples from `mirrored` on as in a mirror.
    """

    split: Split
    plan: PackPlan
    mirrored: int | None = None

    def __getitem__(self, sample: int) -> tuple[int, StoredImage | DataError]:
        try:
            return sample, self.one(sample)
        except DataError as error:
            return sample, error

    def one(self, sample: int) -> StoredImage:
        """What is stored of one sample. Raises DataError for an image that cannot be read."""
        raw, plan = self.split.raw(sample), self.plan
        picture = decode_to_pillow(raw, 3, self.split.name(sample))
        if plan.form == "latents":
            middle = ImagePreprocess((plan.short_side, plan.short_side)).fit_image(picture)
            if self.mirrored is not None and sample >= self.mirrored:
                middle = middle.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            return StoredImage("raw", middle.tobytes(), plan.short_side, plan.short_side, 3)
        unchanged, coded, grey = detect_stored_form(raw)
        if grey:
            picture = picture.convert("L")  # exact: all three channels are the same
        share = plan.short_side / min(picture.size)
        if share < 1:
            size = round(picture.width * share), round(picture.height * share)
            picture = picture.resize(size, Image.Resampling.BICUBIC)
        shape = picture.height, picture.width, len(picture.getbands())
        if plan.form == "uint8":
            return StoredImage("raw", picture.tobytes(), *shape)
        if unchanged and share >= 1:
            assert isinstance(raw, bytes)
            return StoredImage(coded, raw, *shape)
        buffer = io.BytesIO()
        if share < 1 and (coded == "jpg" or not plan.lossless):
            picture.save(buffer, "JPEG", quality=plan.quality)
            return StoredImage("jpg", buffer.getvalue(), *shape)
        picture.save(buffer, "PNG")
        return StoredImage("png", buffer.getvalue(), *shape)


def detect_stored_form(raw: bytes | np.ndarray) -> tuple[bool, str, bool]:
    """What bytes, or pixels (H, W[, C]), that `decode_to_pillow` has accepted are: whether any reader shows the same
    pixels; `jpg`, `png` or ""; whether they are grey."""
    if isinstance(raw, np.ndarray):
        return False, "", raw.ndim == 2 or raw.shape[-1] == 1
    if raw.startswith(b"\x93NUMPY"):
        return False, "", False
    with (
        suppress_warnings(),
        Image.open(io.BytesIO(raw), formats=select_pillow_formats(raw, "image", IMAGE_FORMATS)) as image,
    ):
        coded = {"JPEG": "jpg", "PNG": "png"}.get(image.format or "", "")
        unchanged = (
            image.mode in ("L", "RGB")
            and read_exif_orientation(image) == 1
            and not image.has_transparency_data
            and getattr(image, "n_frames", 1) == 1
        )
        return bool(coded) and unchanged, coded, image.mode in GREY_MODES


class TarShard:
    """A WebDataset archive that is being written: a sample's image, its class's number in `.cls`, its id and class
    names in `.json`."""

    suffix = "tar"

    def __init__(self, path: Path, classes: Sequence[str], limit: int) -> None:
        self.file = open(path, "wb")  # noqa: SIM115 (close() does)
        self.tar = tarfile.open(fileobj=self.file, mode="w", format=tarfile.USTAR_FORMAT)  # noqa: SIM115
        self.classes, self.limit, self.size, self.images = classes, limit, TAR_END_BYTES, 0

    def add(self, sample: int, stored: StoredImage, label: np.ndarray, name: str) -> bool:
        """Write one sample, with a label of shape () or (K,); False where the shard is full. Raises OSError."""
        multilabel = label.ndim == 1
        words = [self.classes[number] for number in (np.flatnonzero(label).tolist() if multilabel else [int(label)])]
        text = json.dumps({"id": name, "label": words if multilabel else words[0]}, ensure_ascii=False)
        members = {} if multilabel else {"cls": b"%d" % int(label)}
        members |= {stored.kind: stored.content, "json": text.encode("utf-8", "replace")}
        size = sum(512 + -(-len(content) // 512) * 512 for content in members.values())
        if self.images and self.size + size > self.limit:
            return False
        for kind, content in members.items():
            header = tarfile.TarInfo(f"{sample:09d}.{kind}")
            header.size = len(content)
            self.tar.addfile(header, io.BytesIO(content))
        self.size += size
        self.images += 1
        return True

    def close(self) -> np.ndarray:
        """End the archive; (0,) rows of `PACK_INDEX_DTYPE`, as it needs none."""
        self.tar.close()
        self.file.close()
        return np.empty(0, PACK_INDEX_DTYPE)


class ArrayShard:
    """A .npy file that is being written, of uint8 or of float16: (n, H, W, C) where all images share a size, else all
    numbers in one row."""

    suffix, dtype = "npy", np.dtype(np.uint8)

    def __init__(self, path: Path, classes: Sequence[str], limit: int) -> None:
        self.file = open(path, "wb")  # noqa: SIM115 (close() does)
        self.file.write(bytes(NPY_HEADER_BYTES))
        self.rows: list[tuple[int, ...]] = []
        self.limit, self.size, self.images = limit, NPY_HEADER_BYTES, 0

    def add(self, sample: int, stored: StoredImage, label: np.ndarray, name: str) -> bool:
        """Write one sample; False where the shard is full. Raises OSError. Its row, of shape (6,), has the sample in
        place of the shard, and no label yet."""
        if self.images and self.size + len(stored.content) > self.limit:
            return False
        self.file.write(stored.content)
        place = (self.size - NPY_HEADER_BYTES) // self.dtype.itemsize
        self.rows.append((sample, place, stored.height, stored.width, stored.channels, -1))
        self.size += len(stored.content)
        self.images += 1
        return True

    def close(self) -> np.ndarray:
        """Write the header and end the file; the rows of its images, (n,) of `PACK_INDEX_DTYPE`.

        The header (format 1.0) is as long whatever the shape is, since it is written last.
        """
        sizes, numbers = {row[2:5] for row in self.rows}, (self.size - NPY_HEADER_BYTES) // self.dtype.itemsize
        shape = (len(self.rows), *next(iter(sizes))) if len(sizes) == 1 else (numbers,)
        words = f"{{'descr': '{self.dtype.str}', 'fortran_order': False, 'shape': {shape}, }}"
        header = words.encode().ljust(NPY_HEADER_BYTES - 11) + b"\n"
        self.file.seek(0)
        self.file.write(b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header)
        self.file.close()
        return np.array(self.rows, dtype=PACK_INDEX_DTYPE)


class LatentShard(ArrayShard):
    """The same of latents."""

    dtype = np.dtype(np.float16)


SHARD_CLASSES = {"tar": TarShard, "uint8": ArrayShard, "latents": LatentShard}


def write_recorded_file(path: Path, content: bytes) -> dict[str, Any]:
    """Write a small file, whole or not at all; returns its `make_file_record`. Raises OSError."""
    with open_atomic(path) as file:
        file.write(content)
    return make_file_record(path)


def make_file_record(path: Path) -> dict[str, Any]:
    """A file's name, bytes and SHA-256. Raises OSError."""
    return {"file": path.name, "bytes": path.stat().st_size, "sha256": compute_sha256(path)}


def encode_npy(array: np.ndarray) -> bytes:
    """An array of any shape as a .npy file."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()
