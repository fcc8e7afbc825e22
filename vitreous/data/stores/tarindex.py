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
from dataclasses import KW_ONLY, dataclass, field
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from vitreous.data.decoding.clips import VIDEOS
from vitreous.data.decoding.decode import MAX_BYTES, SUFFIXES
from vitreous.data.stores.tar import COPY, Archive, Member, Stamp, read_at, stamp
from vitreous.errors import DataError, printable
from vitreous.system.disk import atomic, cache

Word = str | int  # a class by its name, or by its number
MAX_LABEL = 2**20  # bytes of a member that says a label
FIELDS = ("class_name", "class", "label", "cls")
FORMAT = 4  # of a stored index
ORPHANS = "samples in archives have a label and no image, and are left out"


#: a sample: its archive, first byte and bytes of its image, position of its label in `Index.words` (-1: none) and of
#: its folder in `Index.folders`, and where its name ends in `Index.names`
SAMPLE = np.dtype([(name, "<i8") for name in ("archive", "start", "size", "label", "home", "end")])


@dataclass(frozen=True, eq=False)
class Index:
    """The samples of archives in order: (n,) of SAMPLE.

    `names`: the images' names, one after the other, uint8. `words`: the distinct labels in `.cls` and `.json` members.
    `notes`: message -> count.
    """

    archives: tuple[str, ...]
    stamps: tuple[Stamp, ...]
    samples: np.ndarray
    names: np.ndarray
    words: tuple[tuple[Word, ...], ...]
    folders: tuple[str, ...]
    notes: dict[str, int]

    def member(self, row: int) -> bytes:
        """The name of an image in its archive."""
        return self.names[self.samples["end"][row - 1] if row else 0 : self.samples["end"][row]].tobytes()

    def name(self, row: int) -> str:
        """ARCHIVE/NAME of a sample, for messages."""
        archive = os.path.basename(self.archives[self.samples["archive"][row]])
        return printable(f"{archive}/{os.fsdecode(self.member(row))}")

    def read(self, row: int) -> bytes:
        """The bytes of an image. Raises DataError."""
        number, start, size = self.samples[row].tolist()[:3]
        if not 0 < size <= MAX_BYTES:
            raise DataError(f"{self.name(row)}: {f'larger than {MAX_BYTES >> 20} MiB' if size else 'empty file'}")
        return read_at(self.archives[number], self.stamps[number], start, size)

    def update(self, digest: Any, rows: np.ndarray) -> None:
        """Feed the names and sizes of rows (n,)."""
        digest.update(b"\n".join(map(self.member, rows.tolist())))
        digest.update(self.samples["size"][rows].tobytes())


@dataclass
class IndexBuilder:
    """Builds an index. Numbers are in an array, since a million samples as Python objects take a gigabyte."""

    samples: array = field(default_factory=lambda: array("q"))  # the fields of SAMPLE, one sample after the other
    names: bytearray = field(default_factory=bytearray)
    words: dict[tuple[Word, ...], int] = field(default_factory=dict)
    folders: dict[bytes, int] = field(default_factory=dict)
    _: KW_ONLY
    parsed: dict[bytes, int] = field(default_factory=dict)  # content of a .cls member -> position of its label
    notes: Counter[str] = field(default_factory=Counter)

    def add_archive(self, number: int, path: Path, expected: Stamp) -> None:
        """Add the samples of one archive. Raises DataError."""
        if not expected.size:
            raise DataError(f"{printable(path)}: empty file", COPY)
        keys, names = array("q"), array("q")  # the hash of each sample's name, and where its image's name begins
        with Archive(path, expected, self.notes) as archive:
            parts = ((*split_name(member.name), member) for member in archive.members())
            for key, members in groupby((part for part in parts if part[1]), itemgetter(0)):
                group: dict[bytes, Member] = {}
                for _, kind, member in members:
                    if kind in group:
                        name = printable(os.fsdecode(member.name))
                        raise DataError(f"{archive.name}: two members {name}", "rename or remove one of them")
                    group[kind] = member
                begin = len(self.names)
                if self.add_sample(archive, number, key, group):
                    keys.append(hash(key))
                    names.append(begin)
        order = np.argsort(keys, kind="stable")
        same = np.flatnonzero(np.diff(np.asarray(keys)[order]) == 0)
        if len(same):
            first = int(order[same[0] + 1])
            stop = [*names, len(self.names)][first + 1]
            name = printable(os.fsdecode(bytes(self.names[names[first] : stop])))
            hint = "members with one name up to its first dot belong together (tar --sort=name), and no two share it"
            raise DataError(f"{archive.name}: {len(same)} samples stand in two places; the first is {name}", hint)

    def add_sample(self, archive: Archive, number: int, key: bytes, group: dict[bytes, Member]) -> bool:
        """Add one sample, if it has an image. Raises DataError for two, and for a label that cannot be read."""
        images = [kind for kind in group if ending(kind) in SUFFIXES]
        images = images or [
            kind for kind in group if ending(kind) in VIDEOS
        ]  # a picture beside a clip is what is meant
        if not images:
            self.notes[ORPHANS] += b"cls" in group
            return False
        plain = images if len(images) == 1 else [kind for kind in images if b"." not in kind]
        if len(plain) != 1:
            listing = ", ".join(printable(os.fsdecode(group[kind].name)) for kind in images[:2])
            hint = "a name is cut at the first dot of its last part: rename them"
            raise DataError(f"{archive.name}: two images of one sample: {listing}", hint)
        image = group[plain[0]]
        label = self.parse_cls(archive, group[b"cls"]) if b"cls" in group else -1
        if label < 0 and b"json" in group:
            label = self.parse_json(archive, group[b"json"])
        home = self.folders.setdefault(key[: key.rfind(b"/") + 1], len(self.folders))
        self.names += image.name
        self.samples.extend((number, image.start, image.size, label, home, len(self.names)))
        return True

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
        samples, names = np.frombuffer(self.samples.tobytes(), SAMPLE), np.frombuffer(bytes(self.names), np.uint8)
        folders, notes = tuple(map(os.fsdecode, self.folders)), {text: n for text, n in self.notes.items() if n}
        archives = tuple(map(os.fspath, paths))
        return Index(
            archives, tuple(stamps), samples=samples, names=names, words=tuple(self.words), folders=folders, notes=notes
        )


@lru_cache(maxsize=1024)
def ending(kind: bytes) -> str:
    """The suffix `.png` of what follows a sample's name, `seg.png`."""
    return f".{os.fsdecode(kind.rsplit(b'.', 1)[-1])}"


def split_name(name: bytes) -> tuple[bytes, bytes]:
    """`./a/b.seg.png` -> `a/b` and `seg.png`; hidden names and those without a dot have no second part."""
    while name[:2] == b"./":
        name = name[2:]
    dot = name.find(b".", base := name.rfind(b"/") + 1)
    return (name[:dot], name[dot + 1 :].lower()) if dot > base else (name, b"")


def read_label(archive: Archive, member: Member) -> bytes:
    """The content of a member that says a label. Raises DataError where that is too long for one."""
    if member.size > MAX_LABEL:
        name = printable(os.fsdecode(member.name))
        raise DataError(f"{archive.name}: {name} has {member.size:,} bytes, too many for a label")
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
    names = ("words", "folders", "notes", "stamps")
    text = json.dumps({"format": FORMAT, **{name: getattr(built, name) for name in names}}).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic(path, shared=True) as file:
        np.savez(file, text=np.frombuffer(text, np.uint8), names=built.names, samples=built.samples)


def load_index(path: Path, paths: Sequence[Path], stamps: Sequence[Stamp]) -> Index | None:
    """The stored index, if it is whole and of these very archives; else None."""
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as stored:
            samples, names, extra = stored["samples"], stored["names"], json.loads(stored["text"].tobytes())
        if (extra["format"], extra["stamps"]) != (FORMAT, [list(pair) for pair in stamps]) or samples.dtype != SAMPLE:
            return None
        words = tuple(map(tuple, extra["words"]))
        archives = tuple(map(os.fspath, paths))
        return Index(
            archives,
            tuple(stamps),
            samples=samples,
            names=names,
            words=words,
            folders=tuple(extra["folders"]),
            notes=extra["notes"],
        )
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
        return None
