"""Where the samples of WebDataset archives are: one pass over the headers, and what it found kept for the next time.

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
FORMAT = 1  # of what is kept


@dataclass(frozen=True, eq=False)
class Index:
    """Samples in archives, in order: the archive of each, the first byte of its image and how many, (n,) each; and its
    labels.

    `said`: positions in `words`, the labels that a sample itself says, -1 where it says none; `homes`: positions in
    `folders`. `names` has the names of the images, one after the other, `ends` where each ends. `told`: what is to be
    said of it all.
    """

    archives: tuple[str, ...]
    stamps: tuple[Stamp, ...]
    archive: np.ndarray
    start: np.ndarray
    size: np.ndarray
    said: np.ndarray
    homes: np.ndarray
    ends: np.ndarray
    names: np.ndarray
    words: tuple[tuple[Word, ...], ...]
    folders: tuple[str, ...]
    told: dict[str, int]

    def name(self, row: int) -> bytes:
        """The name of an image in its archive."""
        return self.names[self.ends[row - 1] if row else 0 : self.ends[row]].tobytes()

    def called(self, row: int) -> str:
        """What to call a sample: its archive and its name there, in one printable line."""
        return printable(f"{os.path.basename(self.archives[self.archive[row]])}/{os.fsdecode(self.name(row))}")

    def read(self, row: int) -> bytes:
        """The bytes of an image. Raises DataError."""
        size, number = int(self.size[row]), int(self.archive[row])
        if not 0 < size <= MAX_BYTES:
            raise DataError(f"{self.called(row)}: " + (f"larger than {MAX_BYTES >> 20} MiB" if size else "empty file"))
        return read_at(self.archives[number], self.stamps[number], int(self.start[row]), size)


@dataclass
class Growing:
    """An index in the making. Numbers are in arrays, since a million samples as Python's objects take a gigabyte."""

    archive: array = field(default_factory=lambda: array("q"))
    start: array = field(default_factory=lambda: array("q"))
    size: array = field(default_factory=lambda: array("q"))
    said: array = field(default_factory=lambda: array("q"))
    home: array = field(default_factory=lambda: array("q"))
    end: array = field(default_factory=lambda: array("q"))
    names: bytearray = field(default_factory=bytearray)
    words: dict[tuple[Word, ...], int] = field(default_factory=dict)
    folders: dict[bytes, int] = field(default_factory=dict)
    known: dict[bytes, int] = field(default_factory=dict)  # the content of a .cls member -> its word
    told: Counter[str] = field(default_factory=Counter)

    def read(self, number: int, path: Path, known: Stamp) -> None:
        """Add the samples of one archive. Raises DataError."""
        if not known.size:
            raise DataError(f"{printable(path)}: empty file", "copy it anew, or leave it out")
        group, key, keys = dict[bytes, Member](), b"", array("q")
        with Archive(path, known, self.told) as archive:
            for member in archive.members():
                own, _, kind = split_name(member.name)
                if not kind:
                    continue
                if own != key:
                    self.add(archive, number, key, group, keys)
                    group, key = {}, own
                if kind in group:
                    raise DataError(
                        f"{archive.name}: two members {printable(os.fsdecode(member.name))}",
                        "rename or remove one of them",
                    )
                group[kind] = member
            self.add(archive, number, key, group, keys)
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

    def add(self, archive: Archive, number: int, key: bytes, group: dict[bytes, Member], keys: array) -> None:
        """Add one sample, if it has an image. Raises DataError for two, and for a label that cannot be read."""
        images = [kind for kind in group if shown(kind)]
        if not images:
            self.told["samples in archives have a label and no image, and are left out"] += b"cls" in group
            return
        plain = images if len(images) == 1 else [kind for kind in images if b"." not in kind]
        if len(plain) != 1:
            listing = ", ".join(printable(os.fsdecode(group[kind].name)) for kind in images[:2])
            raise DataError(
                f"{archive.name}: two images of one sample: {listing}",
                "a name is cut at the first dot of its last part: rename them",
            )
        image = group[plain[0]]
        said = -1
        if b"cls" in group:
            said = self.class_of(archive, group[b"cls"])
        if said < 0 and b"json" in group:
            said = self.described(archive, group[b"json"])
        self.names += image.name
        home = key[: key.rfind(b"/") + 1]
        self.archive.append(number)
        self.start.append(image.start)
        self.size.append(image.size)
        self.said.append(said)
        self.home.append(self.folders.setdefault(home, len(self.folders)))
        self.end.append(len(self.names))
        keys.append(hash(key))

    def class_of(self, archive: Archive, member: Member) -> int:
        """The word in a .cls member, -1 for an empty one. Raises DataError for what is no text."""
        content = label_bytes(archive, member)
        if content not in self.known:
            try:
                text = content.decode("utf-8").strip()
            except UnicodeDecodeError:
                raise DataError(f"{archive.name}: {printable(os.fsdecode(member.name))} is not UTF-8 text") from None
            word = int(text) if text.isdecimal() and len(text) < 10 else text
            self.known[content] = self.words.setdefault((word,), len(self.words)) if text else -1
        return self.known[content]

    def described(self, archive: Archive, member: Member) -> int:
        """The word or words in a .json member, -1 where it says none. Raises DataError for what is not JSON."""
        try:
            document = json.loads(label_bytes(archive, member))
        except (ValueError, RecursionError):
            raise DataError(f"{archive.name}: {printable(os.fsdecode(member.name))} is not JSON") from None
        if not isinstance(document, dict):
            return -1
        found = [words for name in FIELDS if name in document and (words := words_in(document[name])) is not None]
        named = [words for words in found if not any(isinstance(word, int) for word in words)]
        return self.words.setdefault((named or found)[0], len(self.words)) if found else -1

    def done(self, paths: Sequence[Path], stamps: Sequence[Stamp]) -> Index:
        """The index of all that was added."""
        return finished(
            [os.fspath(path) for path in paths],
            stamps,
            {name: np.asarray(getattr(self, name), dtype=np.int64) for name in COLUMNS},
            np.frombuffer(bytes(self.names), dtype=np.uint8),
            {
                "words": list(self.words),
                "folders": list(map(os.fsdecode, self.folders)),
                "told": {what: n for what, n in self.told.items() if n},
            },
        )


COLUMNS = ("archive", "start", "size", "said", "home", "end")


def finished(
    paths: Sequence[str],
    stamps: Sequence[Stamp],
    columns: dict[str, np.ndarray],
    names: np.ndarray,
    further: dict[str, Any],
) -> Index:
    """An index of columns of int64, the small numbers made small."""
    small = {name: columns[name].astype(np.int32) for name in ("archive", "said", "home")}
    return Index(
        tuple(paths),
        tuple(stamps),
        small["archive"],
        columns["start"],
        columns["size"],
        small["said"],
        small["home"],
        columns["end"],
        names,
        tuple(tuple(words) for words in further["words"]),
        tuple(further["folders"]),
        further["told"],
    )


@lru_cache(maxsize=1024)
def shown(kind: bytes) -> bool:
    """Whether `seg.png` is the end of an image's name."""
    return f".{os.fsdecode(kind.rsplit(b'.', 1)[-1])}" in SUFFIXES


def split_name(name: bytes) -> tuple[bytes, bytes, bytes]:
    """`./a/b.seg.png` -> `a/b`, `.`, `seg.png`; hidden names and those without a dot have no last part."""
    while name[:2] == b"./":
        name = name[2:]
    base = name.rfind(b"/") + 1
    dot = name.find(b".", base)
    return (name[:dot], b".", name[dot + 1 :].lower()) if dot > base else (name, b"", b"")


def label_bytes(archive: Archive, member: Member) -> bytes:
    """The content of a member that says a label. Raises DataError where that is too long for one."""
    if member.size > MAX_LABEL:
        raise DataError(
            f"{archive.name}: {printable(os.fsdecode(member.name))} has {member.size:,} bytes, too many for a label"
        )
    return archive.read(member)


def words_in(value: Any) -> tuple[Word, ...] | None:
    """A label in JSON: a word, a number, or a list of those; None for anything else."""
    values = value if isinstance(value, list) else [value]
    if all((type(word) is int and word >= 0) or (isinstance(word, str) and word) for word in values):
        return tuple(dict.fromkeys(values))
    return None


def index(paths: Sequence[Path]) -> Index:
    """The samples of these archives: from what an earlier look has kept, if none of them has changed, else by looking.

    A million samples take seconds. What is kept lies in `XDG_CACHE_HOME`; if nothing can be kept, that is no error.
    Raises DataError for what is no tar archive, or a damaged one; for labels that are none, and names that are not told
    apart.
    """
    stamps = [stamp(path) for path in paths]
    place = kept_at(paths)
    found = recall(place, paths, stamps)
    if found is None:
        growing = Growing()
        for number, (path, known) in enumerate(zip(paths, stamps, strict=True)):
            growing.read(number, path, known)
        found = growing.done(paths, stamps)
        with suppress(OSError):
            keep(place, found)
    return found


def kept_at(paths: Sequence[Path]) -> Path:
    """The file that keeps the index of these archives."""
    words = "\n".join(os.path.abspath(path) for path in paths).encode("utf-8", "surrogateescape")
    return cache("tars") / f"{hashlib.sha256(words).hexdigest()}.npz"


def keep(place: Path, found: Index) -> None:
    """Write an index, whole or not at all. Raises OSError."""
    further = {
        "format": FORMAT,
        "words": found.words,
        "folders": found.folders,
        "told": found.told,
        "stamps": found.stamps,
    }
    text = np.frombuffer(json.dumps(further).encode(), dtype=np.uint8)
    columns = (found.archive, found.start, found.size, found.said, found.homes, found.ends)
    place.parent.mkdir(parents=True, exist_ok=True)
    with atomic(place, shared=True) as file:
        np.savez(file, text=text, names=found.names, **dict(zip(COLUMNS, columns, strict=True)))


def recall(place: Path, paths: Sequence[Path], stamps: Sequence[Stamp]) -> Index | None:
    """The index that was kept, if it is whole and of these very archives."""
    try:
        with np.load(io.BytesIO(place.read_bytes()), allow_pickle=False) as stored:
            held = {name: stored[name] for name in stored.files}
        further = json.loads(held["text"].tobytes())
        if further["format"] != FORMAT or [Stamp(*pair) for pair in further["stamps"]] != list(stamps):
            return None
        columns = {name: held[name].astype(np.int64) for name in COLUMNS}
        return finished([os.fspath(path) for path in paths], stamps, columns, held["names"], further)
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
        return None
