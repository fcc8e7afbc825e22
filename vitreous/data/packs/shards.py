"""What a pack is made of: pictures as they will be stored, and the shards that they are written to, one after the
other."""

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

from vitreous.data.decoding.decode import FORMATS, decode, orientation, silence
from vitreous.data.decoding.heif import open_formats
from vitreous.data.layouts.packed import ROW
from vitreous.data.split import Split
from vitreous.disk import atomic, sha256
from vitreous.errors import DataError

GREY = ("1", "L", "LA", "I", "I;16", "I;16L", "I;16B")
HEADER = 128  # bytes in front of the numbers in a .npy file of ours
LAST = 1024  # zeros that end a tar


class Stored(NamedTuple):
    """One picture as it will be stored: `jpg` or `png` and the bytes of such a file, or `raw` and those of its
    pixels."""

    kind: str
    content: bytes
    height: int
    width: int
    channels: int


@dataclass(frozen=True)
class Encoder:
    """Samples of a split -> what a pack stores of them.

    The short side is scaled down to `short_side` pixels where it is longer, with a bicubic filter, and never up. Greys
    have one channel, all others three. In archives a JPEG or a PNG that needs neither scaling nor turning stays as it
    is, to the byte; a scaled JPEG is a JPEG of `quality`; anything else is a PNG, or, where it was scaled and not
    `lossless`, such a JPEG.
    """

    split: Split
    form: Literal["tar", "uint8"]
    short_side: int
    quality: int
    lossless: bool

    def __getitem__(self, sample: int) -> tuple[int, Stored | DataError]:
        try:
            return sample, self.one(sample)
        except DataError as error:
            return sample, error

    def one(self, sample: int) -> Stored:
        """Raises DataError for a picture that cannot be read."""
        raw = self.split.raw(sample)
        picture = decode(raw, 3, self.split.name(sample))
        unchanged, coded, grey = kind_of(raw)
        scaled = min(picture.size) > self.short_side
        if grey:
            picture = picture.convert("L")  # exact: all three channels are the same
        if scaled:
            share = self.short_side / min(picture.size)
            picture = picture.resize(
                (round(picture.width * share), round(picture.height * share)), Image.Resampling.BICUBIC
            )
        size = picture.height, picture.width, len(picture.getbands())
        if self.form == "uint8":
            return Stored("raw", picture.tobytes(), *size)
        if unchanged and not scaled:
            assert isinstance(raw, bytes)
            return Stored(coded, raw, *size)
        buffer = io.BytesIO()
        if scaled and (coded == "jpg" or not self.lossless):
            picture.save(buffer, "JPEG", quality=self.quality)
            return Stored("jpg", buffer.getvalue(), *size)
        picture.save(buffer, "PNG")
        return Stored("png", buffer.getvalue(), *size)


def kind_of(raw: bytes | np.ndarray) -> tuple[bool, str, bool]:
    """Of what `decode` has accepted: whether any reader shows the same pixels, `jpg` or `png` or "", and whether it is
    grey."""
    if isinstance(raw, np.ndarray):
        return False, "", raw.ndim == 2 or raw.shape[-1] == 1
    if raw.startswith(b"\x93NUMPY"):
        return False, "", False
    with silence(), Image.open(io.BytesIO(raw), formats=open_formats(raw, "image", FORMATS)) as image:
        coded = {"JPEG": "jpg", "PNG": "png"}.get(image.format or "", "")
        unchanged = (
            image.mode in ("L", "RGB")
            and orientation(image) == 1
            and not image.has_transparency_data
            and getattr(image, "n_frames", 1) == 1
        )
        return bool(coded) and unchanged, coded, image.mode in GREY


class TarShard:
    """A WebDataset archive in the making: a sample's picture, its class's number in `.cls`, its id and class names in
    `.json`."""

    suffix = "tar"

    def __init__(self, path: Path, classes: Sequence[str]) -> None:
        self.file = open(path, "wb")  # noqa: SIM115 (close() does)
        self.tar = tarfile.open(fileobj=self.file, mode="w", format=tarfile.USTAR_FORMAT)  # noqa: SIM115
        self.classes, self.size, self.images = classes, LAST, 0

    def members(self, sample: int, stored: Stored, label: np.ndarray, name: str) -> list[tuple[str, bytes]]:
        """The members of one sample: names and contents."""
        multilabel = label.ndim == 1
        words = [self.classes[number] for number in (np.flatnonzero(label).tolist() if multilabel else [int(label)])]
        metadata = {"id": name, "label": words if multilabel else words[0]}
        members = [
            (stored.kind, stored.content),
            ("json", json.dumps(metadata, ensure_ascii=False).encode("utf-8", "replace")),
        ]
        return [
            (f"{sample:09d}.{kind}", content)
            for kind, content in ([] if multilabel else [("cls", b"%d" % int(label))]) + members
        ]

    def room(self, sample: int, stored: Stored, label: np.ndarray, name: str) -> int:
        """The bytes that a sample takes."""
        return sum(512 + -(-len(content) // 512) * 512 for _, content in self.members(sample, stored, label, name))

    def add(self, sample: int, stored: Stored, label: np.ndarray, name: str) -> None:
        """Write one sample. Raises OSError."""
        for member, content in self.members(sample, stored, label, name):
            header = tarfile.TarInfo(member)
            header.size = len(content)
            self.tar.addfile(header, io.BytesIO(content))
        self.size += self.room(sample, stored, label, name)
        self.images += 1

    def close(self) -> np.ndarray:
        """End the archive; rows of `ROW`, of which it needs none."""
        self.tar.close()
        self.file.close()
        return np.empty(0, ROW)


class PixelShard:
    """A .npy file of uint8 in the making: (n, H, W, C) where all pictures share a size, else all numbers in one row."""

    suffix = "npy"

    def __init__(self, path: Path, classes: Sequence[str]) -> None:
        self.file = open(path, "wb")  # noqa: SIM115 (close() does)
        self.file.write(bytes(HEADER))
        self.rows: list[tuple[int, ...]] = []
        self.size, self.images = HEADER, 0

    def room(self, sample: int, stored: Stored, label: np.ndarray, name: str) -> int:
        """The bytes that a sample takes."""
        return len(stored.content)

    def add(self, sample: int, stored: Stored, label: np.ndarray, name: str) -> None:
        """Write one sample. Raises OSError. Its row has the sample in place of the shard, and no label yet."""
        self.file.write(stored.content)
        self.rows.append((sample, self.size - HEADER, stored.height, stored.width, stored.channels, -1))
        self.size += len(stored.content)
        self.images += 1

    def close(self) -> np.ndarray:
        """Write the header and end the file; the rows of its pictures."""
        sizes = {row[2:5] for row in self.rows}
        shape = (len(self.rows), *next(iter(sizes))) if len(sizes) == 1 else (self.size - HEADER,)
        self.file.seek(0)
        self.file.write(npy_header(shape))
        self.file.close()
        return np.array(self.rows, dtype=ROW)


def npy_header(shape: tuple[int, ...]) -> bytes:
    """The head of a .npy file of uint8 (format 1.0), as long whatever the shape is, since it is written last."""
    metadata = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\1\0" + (HEADER - 10).to_bytes(2, "little") + metadata.ljust(HEADER - 11) + b"\n"


def write_record(path: Path, content: bytes) -> dict[str, Any]:
    """Write a small file, whole or not at all; returns its `record`. Raises OSError."""
    with atomic(path) as file:
        file.write(content)
    return record(path)


def record(path: Path) -> dict[str, Any]:
    """A file's name, bytes and SHA-256. Raises OSError."""
    return {"file": path.name, "bytes": path.stat().st_size, "sha256": sha256(path)}


def npy_bytes(array: np.ndarray) -> bytes:
    """An array as a .npy file."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()
