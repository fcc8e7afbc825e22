"""Fingerprints of images for the search of copies: two digests and a small grey view of each, 1 KB in all.

Pictures are read once, in workers, and none is kept. n pictures; views are (n, SIDE, SIDE) uint8.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from vitreous.data.copies.grey import comparable, view
from vitreous.data.copies.windows import SIDE
from vitreous.data.decoding.decode import decode
from vitreous.data.loader import Decoding, collate, in_workers
from vitreous.data.preprocess import Preprocess
from vitreous.data.split import Split
from vitreous.errors import DataError

DIGEST = 16  # bytes kept of a SHA-256
BATCH = 64  # pictures that come from a worker at a time

Progress = Callable[[str, int, int], None]


class Joined:
    """Splits concatenated, for reading."""

    def __init__(self, splits: Sequence[Split]) -> None:
        self.splits = list(splits)
        self.ends = np.cumsum([len(split) for split in splits], dtype=np.int64)

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def place(self, sample: int) -> tuple[Split, int]:
        """The split that a sample is in, and its number there."""
        part = int(np.searchsorted(self.ends, sample, side="right"))
        return self.splits[part], sample - int(self.ends[part]) + len(self.splits[part])

    def raw(self, sample: int) -> bytes | np.ndarray:
        """What is stored of a sample. Raises DataError."""
        split, number = self.place(sample)
        return split.raw(number)

    def name(self, sample: int) -> str:
        split, number = self.place(sample)
        return split.name(number)


@dataclass(frozen=True)
class Fingerprints:
    """What is remembered of n pictures; where one cannot be read, `bad` says why, and its row means nothing.

    `content` and `pixels` are (n, 2) uint64: the beginnings of the SHA-256 of what is stored, and of the decoded
    picture. `features` are (n, D) float16 of length 1 where a model looks too.
    """

    content: np.ndarray
    pixels: np.ndarray
    views: np.ndarray
    bad: dict[int, DataError]
    features: np.ndarray | None = None

    @cached_property
    def comparable(self) -> np.ndarray:
        """(n,) bool: pictures that can be read and show enough to tell them from others."""
        mask = comparable(self.views)
        mask[list(self.bad)] = False
        return mask


@dataclass(frozen=True)
class ImageEmbedder:
    """A model whose features are compared too: its preprocessing, and (B, C, *image) uint8 -> (B, D) float32."""

    preprocess: Preprocess
    embed: Callable[[Tensor], np.ndarray]


@dataclass(frozen=True)
class FingerprintReader:
    """A reader for the loader: a sample -> one row of bytes, the digests, the view of `side` pixels, and what a model
    takes."""

    split: Joined
    side: int = SIDE
    preprocess: Preprocess | None = None

    def one(self, sample: int) -> Tensor:
        """(2 * DIGEST + side * side [+ C * H * W],) uint8. Raises DataError."""
        raw, name = self.split.raw(sample), self.split.name(sample)
        picture = decode(raw, 3, name)
        row = digest(raw) + digest(np.asarray(picture)) + view(picture, self.side).tobytes()
        pixels = torch.frombuffer(bytearray(row), dtype=torch.uint8)
        if self.preprocess is None:
            return pixels
        fed = picture if self.preprocess.channels == 3 else self.preprocess.decoded(raw, name)
        return torch.cat([pixels, self.preprocess.pixels(fed).flatten()])


def look(
    pool: Joined,
    workers: int,
    progress: Progress = lambda label, done, total: None,
    embedder: ImageEmbedder | None = None,
) -> Fingerprints:
    """Fingerprint every image, reading it once. Raises ResourceError where a worker dies or hangs."""
    count = len(pool)
    content, pixels = np.zeros((count, DIGEST), np.uint8), np.zeros((count, DIGEST), np.uint8)
    views = np.zeros((count, SIDE, SIDE), np.uint8)
    features: np.ndarray | None = None
    bad: dict[int, DataError] = {}
    reader = FingerprintReader(pool, SIDE, embedder and embedder.preprocess)
    done, rest = 0, 2 * DIGEST + SIDE * SIDE
    for samples, rows in rows_of(reader, range(count), workers, bad):
        if len(samples):
            content[samples], pixels[samples] = rows[:, :DIGEST], rows[:, DIGEST : 2 * DIGEST]
            views[samples] = rows[:, 2 * DIGEST : rest].reshape(-1, SIDE, SIDE)
        if embedder is not None and len(samples):
            images = torch.from_numpy(rows[:, rest:].copy()).view(
                -1, embedder.preprocess.channels, *embedder.preprocess.image
            )
            rows = embedder.embed(images).astype(np.float32)
            features = np.zeros((count, rows.shape[1]), np.float16) if features is None else features
            features[samples] = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
        done = min(done + BATCH, count)
        progress("look at images", done, count)
    return Fingerprints(content.view(np.uint64), pixels.view(np.uint64), views, bad, features)


def closer(pool: Joined, samples: Sequence[int], side: int, workers: int) -> dict[int, np.ndarray]:
    """Larger views, (side, side) uint8, of some samples; those that cannot be read any more are left out."""
    views: dict[int, np.ndarray] = {}
    for numbers, rows in rows_of(FingerprintReader(pool, side), samples, workers, {}):
        views |= {int(n): row[2 * DIGEST :].reshape(side, side) for n, row in zip(numbers, rows, strict=True)}
    return views


def rows_of(
    reader: FingerprintReader, samples: Sequence[int], workers: int, bad: dict[int, DataError]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The readable ones of some samples, (B,), and their rows, (B, bytes) uint8; the others go into `bad`.

    Raises ResourceError where a worker dies or hangs.
    """
    places = [[(int(sample),) for sample in samples[low : low + BATCH]] for low in range(0, len(samples), BATCH)]
    for numbers, rows in in_workers(Decoding(reader), places, min(workers, len(places)), collate, prefetch=2):  # type: ignore[arg-type]
        if not isinstance(rows, Tensor):
            bad |= {int(n): row for n, row in zip(numbers, rows, strict=True) if isinstance(row, DataError)}
            numbers = numbers[[isinstance(row, Tensor) for row in rows]]
            rows = torch.stack([row for row in rows if isinstance(row, Tensor)]) if len(numbers) else torch.empty(0, 0)
        yield numbers.numpy(), rows.numpy()


def digest(raw: bytes | np.ndarray) -> bytes:
    """The beginning of the SHA-256 of bytes, or of pixels with their shape and type."""
    if isinstance(raw, bytes):
        return hashlib.sha256(raw).digest()[:DIGEST]
    sha256 = hashlib.sha256(f"{raw.shape} {raw.dtype.str}".encode())
    sha256.update(np.ascontiguousarray(raw).data)
    return sha256.digest()[:DIGEST]
