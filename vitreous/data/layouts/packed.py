"""Packs: datasets that `vitreous data pack` has written to few large files, for fast reading.

`pack.json` lists the classes, files and preprocessing. A pack has one of three forms. `tar` is a set of WebDataset
archives. `uint8` (pixels) and `latents` (float16) are memory-mapped .npy files, the shards, with an index of
(shard, offset, height, width, channels, label) for each image.
"""

from __future__ import annotations

import json
import os
from dataclasses import KW_ONLY, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from vitreous.data.decoding.decode import read_input_file
from vitreous.data.latents import latents_from_json
from vitreous.data.layouts.split_names import SPLIT_NAMES
from vitreous.data.layouts.tars import open_webdataset
from vitreous.data.split import Data, Split, StoreSplit, ensure_val_split
from vitreous.errors import DataError, UsageError, escape_unprintable

PACK_VERSION = 1
PACK_DOCUMENT, UNFINISHED_FOLDER = "pack.json", ".unfinished"
MAX_MAPPED_FILES = 64  # maximum memory-mapped files per process
PACK_INDEX_DTYPE = np.dtype([(name, "<i8") for name in ("shard", "offset", "height", "width", "channels", "label")])
REPACK_HINT = "pack the data again into another folder"
#: form of a pack of arrays -> dtype, and valid numbers of channels
ARRAY_PACK_FORMS: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {
    "uint8": (np.dtype(np.uint8), (1, 3)),
    "latents": (np.dtype(np.float16), tuple(range(1, 129))),
}


@dataclass(frozen=True, eq=False)
class PackedImages:
    """Store of the images in a split of a pack. `shards`: the paths of its .npy files, of one dtype; `table`: the
    index, (n,) of PACK_INDEX_DTYPE; `ids`: the text of all image names, one per line, uint8; `ends`, (n,) int64: the
    positions of the line ends in `ids`."""

    shards: tuple[str, ...]
    table: np.ndarray
    ids: np.ndarray
    ends: np.ndarray
    _: KW_ONLY
    dtype: np.dtype[Any] = np.dtype(np.uint8)  # noqa: RUF009

    def read(self, index: int) -> np.ndarray:
        """Return the memory-mapped pixels of an image, (H, W) or (H, W, 3) uint8, or its latents (h, w, C) float32.
        Raises DataError if the shard has changed."""
        shard, offset, height, width, channels, _ = self.table[index].tolist()
        flat = map_npy_file(self.shards[shard], self.dtype)
        if offset + height * width * channels > len(flat):
            raise DataError(f"{escape_unprintable(self.shards[shard])}: changed since it was packed", REPACK_HINT)
        shape = (height, width) if channels == 1 else (height, width, channels)
        values = flat[offset : offset + height * width * channels].reshape(shape)
        return values if self.dtype == np.uint8 else values.astype(np.float32)

    def name(self, index: int) -> str:
        """Return the name of an image for messages."""
        line = self.ids[self.ends[index - 1] + 1 if index else 0 : self.ends[index]]
        return line.tobytes().decode("utf-8", "replace")

    def concatenate(self, other: PackedImages) -> PackedImages:
        """Return a store of these images, followed by those of another store."""
        table = np.concatenate([self.table, other.table])
        table["shard"][len(self.table) :] += len(self.shards)
        ends = np.concatenate([self.ends, other.ends + len(self.ids)])
        return PackedImages(
            self.shards + other.shards, table, np.concatenate([self.ids, other.ids]), ends, dtype=self.dtype
        )

    def update(self, digest: Any, indices: np.ndarray) -> None:
        """Update a hashlib digest with the names and sizes of the images at `indices` (n,)."""
        for index in indices.tolist():
            digest.update(self.name(index).encode() + b"\n")
        digest.update(self.table[indices][["height", "width", "channels"]].tobytes())


@lru_cache(maxsize=MAX_MAPPED_FILES)
def map_npy_file(path: str, dtype: np.dtype[Any]) -> np.ndarray:
    """Memory-map a .npy file of this dtype as a flat array (n,). Raises DataError if it cannot be mapped or has another
    dtype."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{escape_unprintable(path)}: cannot be memory-mapped ({error})", REPACK_HINT) from None
    if not isinstance(array, np.ndarray) or array.dtype != dtype:
        raise DataError(f"{escape_unprintable(path)}: the dtype is not {dtype.name}", REPACK_HINT)
    return array.reshape(-1)


def is_pack(folder: Path) -> bool:
    """Return whether a folder is a pack, finished or not."""
    file = folder / PACK_DOCUMENT
    if (folder / UNFINISHED_FOLDER).is_dir() and not file.exists():
        return True
    return file.is_file() and file.stat().st_size < 2**28 and b'"vitreous_pack"' in file.read_bytes()[:4096]


def read_pack_document(folder: Path) -> dict[str, Any]:
    """Read and check the `pack.json` of a pack. Raises DataError for an unfinished pack, a damaged file, and a newer
    version of the format."""
    if not (folder / PACK_DOCUMENT).exists():
        hint = "run the same `vitreous data pack` command again to finish it"
        raise DataError(f"{escape_unprintable(folder)} is an unfinished pack", hint)
    file = folder / PACK_DOCUMENT
    try:
        document = json.loads(read_input_file(file))
        version, form, classes, splits = (document[name] for name in ("vitreous_pack", "form", "classes", "splits"))
        names = [record["file"] for split in splits.values() for record in (*split["shards"], *split["files"].values())]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise DataError(f"{escape_unprintable(file)} is damaged", REPACK_HINT) from None
    if not isinstance(version, int) or version > PACK_VERSION:
        problem = f"was written by a newer vitreous (format {version}, this one reads {PACK_VERSION})"
        raise DataError(f"{escape_unprintable(file)} {problem}", "update vitreous")
    are_plain_names = all(
        isinstance(name, str) and name == os.path.basename(name) and name.strip(".") for name in names
    )
    is_known_form = (
        form in ("tar", *ARRAY_PACK_FORMS)
        and all(isinstance(name, str) for name in classes)
        and set(splits) <= set(SPLIT_NAMES)
    )
    if not are_plain_names or not is_known_form:
        raise DataError(f"{escape_unprintable(file)} is damaged", REPACK_HINT)
    return document


def open_pack(folder: Path, split_seed: int = 0) -> Data:
    """Open the dataset in a pack. If there is no `val`, a tenth of `train` is held out. Raises DataError for a pack
    with missing or changed files."""
    document = read_pack_document(folder)
    for split in document["splits"].values():
        for record in (*split["shards"], *split["files"].values()):
            path = folder / record["file"]
            if not path.is_file() or path.stat().st_size != record["bytes"]:
                raise DataError(
                    f"{escape_unprintable(path)}: missing or changed (expected {record['bytes']:,} bytes)", REPACK_HINT
                )
    if document["form"] == "tar":
        data = open_webdataset(folder, split_seed)
    else:
        classes, split_records = tuple(document["classes"]), document["splits"]
        splits: dict[str, Split] = {n: read_pack_split(folder, document, n) for n in SPLIT_NAMES if n in split_records}
        if "train" not in splits:
            problem = f"{escape_unprintable(folder)} has {', '.join(splits)} but no training images"
            raise DataError(problem, "pack data with a train split")
        notes: list[str] = []
        splits, full_train = ensure_val_split(splits, split_seed, notes)
        data = Data(escape_unprintable(folder), classes, splits, notes, full_train_split=full_train)
    train, val = data.splits["train"], data.splits.get("val")
    if document.get("mirror"):  # an image and its mirrored copy are not divided between splits
        data = replace(data, full_train_split=None, groups=np.tile(np.arange(len(train) // 2), 2))
    elif document.get("has_drawn_splits") and isinstance(train, StoreSplit) and isinstance(val, StoreSplit):
        store, start = train.store, 0
        if isinstance(store, PackedImages):
            store, start = store.concatenate(val.store), len(store.table)
        indices = np.concatenate([train.row_indices, start + val.row_indices])
        labels = np.concatenate([train.labels, val.labels])
        data = replace(data, full_train_split=StoreSplit(store, indices, labels))
    try:
        latents = latents_from_json(document.get("latents"))
    except UsageError as error:
        raise DataError(f"{escape_unprintable(folder / PACK_DOCUMENT)}: {error.message}", REPACK_HINT) from None
    return replace(data, titles=dict(document.get("titles", {})), latents=latents)


def read_pack_split(folder: Path, document: dict[str, Any], split: str) -> StoreSplit[PackedImages]:
    """Open one split of a pack of pixels or latents, from the content of its `pack.json`. Raises DataError if the index
    does not match the shards."""
    record, classes = document["splits"][split], len(document["classes"])
    dtype, channels = ARRAY_PACK_FORMS[document["form"]]
    file = folder / record["files"]["index"]["file"]
    try:
        index_table = np.load(file, allow_pickle=False)
        labels = index_table["label"].astype(np.int64)
        if "labels" in record["files"]:
            labels = np.load(folder / record["files"]["labels"]["file"], allow_pickle=False).astype(np.float32)
        ids = np.frombuffer(read_input_file(folder / record["files"]["ids"]["file"]), dtype=np.uint8)
    except (OSError, ValueError, EOFError, IndexError, KeyError):
        raise DataError(f"{escape_unprintable(file)} is damaged", REPACK_HINT) from None
    ends = np.flatnonzero(ids == ord("\n"))
    shard_lengths = np.array([shard["bytes"] for shard in record["shards"]], dtype=np.int64) // dtype.itemsize
    is_consistent = (
        index_table.dtype == PACK_INDEX_DTYPE
        and len(index_table) == len(labels) == len(ends) > 0
        and np.isin(index_table["channels"], channels).all()
        and all(((index_table[field] > 0) & (index_table[field] < 2**20)).all() for field in ("height", "width"))
        and (
            (index_table["shard"] >= 0) & (index_table["shard"] < len(shard_lengths)) & (index_table["offset"] >= 0)
        ).all()
        and (
            index_table["offset"] + index_table["height"] * index_table["width"] * index_table["channels"]
            <= shard_lengths[index_table["shard"]]
        ).all()
        and (labels.shape[1:] == (classes,) if labels.ndim == 2 else ((labels >= 0) & (labels < classes)).all())
    )
    if not is_consistent:
        raise DataError(f"{escape_unprintable(file)} does not match its shards", REPACK_HINT)
    shards = tuple(os.fspath(folder / shard["file"]) for shard in record["shards"])
    return StoreSplit(PackedImages(shards, index_table, ids, ends, dtype=dtype), np.arange(len(index_table)), labels)
