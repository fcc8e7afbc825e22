"""The index of WebDataset archives: where each sample is, from one pass over the headers, stored for the next time.

A sample is the members whose names are equal up to the first dot of their last part, one after another: `dog/7.jpg`,
`dog/7.cls`. Its label is in `.cls` (a number or a word), else in `.json` (`label`, `class` or `cls`), else it is the
folder it stands in.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import zipfile
from array import array
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from vitreous.data.decoding.decode import MAX_BYTES, SUFFIXES
from vitreous.data.stores.tar import Archive, Member, Stamp, read_at, stamp
from vitreous.disk import atomic, cache
from vitreous.errors import DataError, printable

Word = str | int  # a class by its name, or by its number
MAX_LABEL = 2**20  # bytes of a member that says a label
FIELDS = ("class_name", "class", "label", "cls")
SHOWN = 20  # samples that a message names
FORMAT = 2  # of a stored index
ORPHANS = "samples in archives have a label and no image, and are left out"


@dataclass(frozen=True, eq=False)
class Index:
    """Samples in order: the archive of each, and the first byte and the bytes of its image there, (n,) int64 each.

    `labels`: positions in `words`, the labels in `.cls` and `.json` members, -1 without one; `homes`: positions in
    `folders`. `names`: the images' names, one after the other, and `ends` where each ends. `notes`: message -> count.
    """

    archives: tuple[str, ...]
    stamps: tuple[Stamp, ...]
    archive: np.ndarray
    start: np.ndarray
    size: np.ndarray
    labels: np.ndarray
    homes: np.ndarray
    ends: np.ndarray
    names: np.ndarray
    words: tuple[tuple[Word, ...], ...]
    folders: tuple[str, ...]
    notes: dict[str, int]

    def name(self, row: int) -> bytes:
        """The name of an image in its archive."""
        return self.names[self.ends[row - 1] if row else 0 : self.ends[row]].tobytes()

    def display_name(self, row: int) -> str:
        """ARCHIVE/NAME of a sample, for messages."""
        return printable(f"{os.path.basename(self.archives[self.archive[row]])}/{os.fsdecode(self.name(row))}")

    def read(self, row: int) -> bytes:
        """The bytes of an image. Raises DataError."""
        size, number = int(self.size[row]), int(self.archive[row])
        if not 0 < size <= MAX_BYTES:
            raise DataError(
                f"{self.display_name(row)}: " + (f"larger than {MAX_BYTES >> 20} MiB" if size else "empty file")
            )
        return read_at(self.archives[number], self.stamps[number], int(self.start[row]), size)


@dataclass
class IndexBuilder:
    """Builds an index. Numbers are in arrays, since a million samples as Python objects take a gigabyte."""

    archive: array = field(default_factory=lambda: array("q"))
    start: array = field(default_factory=lambda: array("q"))
    size: array = field(default_factory=lambda: array("q"))
    label: array = field(default_factory=lambda: array("q"))
    home: array = field(default_factory=lambda: array("q"))
    end: array = field(default_factory=lambda: array("q"))
    names: bytearray = field(default_factory=bytearray)
    words: dict[tuple[Word, ...], int] = field(default_factory=dict)
    folders: dict[bytes, int] = field(default_factory=dict)
    parsed: dict[bytes, int] = field(default_factory=dict)  # content of a .cls member -> position of its label
    notes: Counter[str] = field(default_factory=Counter)

    def add_archive(self, number: int, path: Path, expected: Stamp) -> None:
        """Add the samples of one archive. Raises DataError."""
        if not expected.size:
            raise DataError(f"{printable(path)}: empty file", "copy it anew, or leave it out")
        group, key, keys = dict[bytes, Member](), b"", array("q")
        with Archive(path, expected, self.notes) as archive:
            for member in archive.members():
                own, _, kind = split_name(member.name)
                if not kind:
                    continue
                if own != key:
                    self.add_sample(archive, number, key, group, keys)
                    group, key = {}, own
                if kind in group:
                    raise DataError(
                        f"{archive.name}: two members {printable(os.fsdecode(member.name))}",
                        "rename or remove one of them",
                    )
                group[kind] = member
            self.add_sample(archive, number, key, group, keys)
        order = np.argsort(keys, kind="stable")
        same = np.flatnonzero(np.diff(np.asarray(keys)[order]) == 0)
        if len(same):
            first = len(self.end) - len(keys) + int(order[same[0] + 1])
            name = printable(os.fsdecode(bytes(self.names[self.end[first - 1] if first else 0 : self.end[first]])))
            raise DataError(
                f"{archive.name}: {len(same)} samples stand in two places; the first is {name}",
                "members with one name up to its first dot belong together (tar --sort=name), and no two samples "
                "share it",
            )

    def add_sample(self, archive: Archive, number: int, key: bytes, group: dict[bytes, Member], keys: array) -> None:
        """Add one sample, if it has an image. Raises DataError for two, and for a label that cannot be read."""
        images = [kind for kind in group if is_image_kind(kind)]
        if not images:
            self.notes[ORPHANS] += b"cls" in group
            return
        plain = images if len(images) == 1 else [kind for kind in images if b"." not in kind]
        if len(plain) != 1:
            listing = ", ".join(printable(os.fsdecode(group[kind].name)) for kind in images[:2])
            raise DataError(
                f"{archive.name}: two images of one sample: {listing}",
                "a name is cut at the first dot of its last part: rename them",
            )
        image = group[plain[0]]
        label = -1
        if b"cls" in group:
            label = self.parse_cls(archive, group[b"cls"])
        if label < 0 and b"json" in group:
            label = self.parse_json(archive, group[b"json"])
        self.names += image.name
        home = key[: key.rfind(b"/") + 1]
        self.archive.append(number)
        self.start.append(image.start)
        self.size.append(image.size)
        self.label.append(label)
        self.home.append(self.folders.setdefault(home, len(self.folders)))
        self.end.append(len(self.names))
        keys.append(hash(key))

    def parse_cls(self, archive: Archive, member: Member) -> int:
        """The word in a .cls member, -1 for an empty one. Raises DataError for what is no text."""
        content = read_label(archive, member)
        if content not in self.parsed:
            try:
                text = content.decode("utf-8").strip()
            except UnicodeDecodeError:
                raise DataError(f"{archive.name}: {printable(os.fsdecode(member.name))} is not UTF-8 text") from None
            word = int(text) if text.isdecimal() and len(text) < 10 else text
            self.parsed[content] = self.words.setdefault((word,), len(self.words)) if text else -1
        return self.parsed[content]

    def parse_json(self, archive: Archive, member: Member) -> int:
        """The word or words in a .json member, -1 where it says none. Raises DataError for what is not JSON."""
        try:
            document = json.loads(read_label(archive, member))
        except (ValueError, RecursionError):
            raise DataError(f"{archive.name}: {printable(os.fsdecode(member.name))} is not JSON") from None
        if not isinstance(document, dict):
            return -1
        labels = [words for name in FIELDS if name in document and (words := parse_words(document[name])) is not None]
        named = [words for words in labels if not any(isinstance(word, int) for word in words)]
        return self.words.setdefault((named or labels)[0], len(self.words)) if labels else -1

    def build(self, paths: Sequence[Path], stamps: Sequence[Stamp]) -> Index:
        """The index of all that was added."""
        return make_index(
            [os.fspath(path) for path in paths],
            stamps,
            {name: np.asarray(getattr(self, name), dtype=np.int64) for name in COLUMNS},
            np.frombuffer(bytes(self.names), dtype=np.uint8),
            {
                "words": list(self.words),
                "folders": list(map(os.fsdecode, self.folders)),
                "notes": {message: n for message, n in self.notes.items() if n},
            },
        )


COLUMNS = ("archive", "start", "size", "label", "home", "end")


def make_index(
    paths: Sequence[str],
    stamps: Sequence[Stamp],
    columns: dict[str, np.ndarray],
    names: np.ndarray,
    extra: dict[str, Any],
) -> Index:
    """An index of columns of int64, the small numbers made small."""
    small = {name: columns[name].astype(np.int32) for name in ("archive", "label", "home")}
    return Index(
        tuple(paths),
        tuple(stamps),
        small["archive"],
        columns["start"],
        columns["size"],
        small["label"],
        small["home"],
        columns["end"],
        names,
        tuple(tuple(words) for words in extra["words"]),
        tuple(extra["folders"]),
        extra["notes"],
    )


@lru_cache(maxsize=1024)
def is_image_kind(kind: bytes) -> bool:
    """Whether `seg.png` is the end of an image's name."""
    return f".{os.fsdecode(kind.rsplit(b'.', 1)[-1])}" in SUFFIXES


def split_name(name: bytes) -> tuple[bytes, bytes, bytes]:
    """`./a/b.seg.png` -> `a/b`, `.`, `seg.png`; hidden names and those without a dot have no last part."""
    while name[:2] == b"./":
        name = name[2:]
    base = name.rfind(b"/") + 1
    dot = name.find(b".", base)
    return (name[:dot], b".", name[dot + 1 :].lower()) if dot > base else (name, b"", b"")


def read_label(archive: Archive, member: Member) -> bytes:
    """The content of a member that says a label. Raises DataError where that is too long for one."""
    if member.size > MAX_LABEL:
        raise DataError(
            f"{archive.name}: {printable(os.fsdecode(member.name))} has {member.size:,} bytes, too many for a label"
        )
    return archive.read(member)


def parse_words(value: Any) -> tuple[Word, ...] | None:
    """A label in JSON: a word, a number, or a list of those; None for anything else."""
    values = value if isinstance(value, list) else [value]
    if all((type(word) is int and word >= 0) or (isinstance(word, str) and word) for word in values):
        return tuple(dict.fromkeys(values))
    return None


def index(paths: Sequence[Path]) -> Index:
    """The index of these archives: the stored one unless an archive has changed, else a new one.

    A new index takes about a minute for a million members. It is stored below `XDG_CACHE_HOME`, if that can be written.
    Raises DataError for a file that is no tar archive or damaged, labels that cannot be read, and ambiguous names.
    """
    stamps = [stamp(path) for path in paths]
    path = cache_path(paths)
    built = load_index(path, paths, stamps)
    if built is None:
        builder = IndexBuilder()
        for number, (archive, expected) in enumerate(zip(paths, stamps, strict=True)):
            builder.add_archive(number, archive, expected)
        built = builder.build(paths, stamps)
        with suppress(OSError):
            store_index(path, built)
    return built


def cache_path(paths: Sequence[Path]) -> Path:
    """The file that stores the index of these archives."""
    words = "\n".join(os.path.abspath(path) for path in paths).encode("utf-8", "surrogateescape")
    return cache("tars") / f"{hashlib.sha256(words).hexdigest()}.npz"


def store_index(path: Path, built: Index) -> None:
    """Write an index, whole or not at all. Raises OSError."""
    extra = {
        "format": FORMAT,
        "words": built.words,
        "folders": built.folders,
        "notes": built.notes,
        "stamps": built.stamps,
    }
    text = np.frombuffer(json.dumps(extra).encode(), dtype=np.uint8)
    columns = (built.archive, built.start, built.size, built.labels, built.homes, built.ends)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic(path, shared=True) as file:
        np.savez(file, text=text, names=built.names, **dict(zip(COLUMNS, columns, strict=True)))


def load_index(path: Path, paths: Sequence[Path], stamps: Sequence[Stamp]) -> Index | None:
    """The stored index, if it is whole and of these very archives; else None."""
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as stored:
            held = {name: stored[name] for name in stored.files}
        extra = json.loads(held["text"].tobytes())
        if extra["format"] != FORMAT or [Stamp(*pair) for pair in extra["stamps"]] != list(stamps):
            return None
        columns = {name: held[name].astype(np.int64) for name in COLUMNS}
        return make_index([os.fspath(path) for path in paths], stamps, columns, held["names"], extra)
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
        return None
