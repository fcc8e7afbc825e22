"""Index of WebDataset archives: the location of each sample, from one pass over the headers, cached on disk.

A sample consists of consecutive members whose names are equal up to the first dot of their last component: `dog/7.jpg`,
`dog/7.cls`. Its label is in the `.cls` member (a number or a word), else in the `.json` member (in the first of
`LABEL_FIELDS`), else it is the name of the folder. A sample without a label member may have a caption: the text of the
`.txt` member, else the first of `CAPTION_FIELDS` in the `.json` member.
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

from vitreous.data.decoding.clips import VIDEO_SUFFIXES
from vitreous.data.decoding.decode import IMAGE_FILE_SUFFIXES, MAX_FILE_BYTES
from vitreous.data.stores.tar import (
    COPY_ARCHIVE_HINT,
    ArchiveMember,
    FileStamp,
    TarArchive,
    read_archive_bytes,
    read_file_stamp,
)
from vitreous.errors import DataError, escape_unprintable
from vitreous.system.disk import get_cache_folder, open_atomic

LabelWord = str | int  # a class name, or a class index
MAX_LABEL_BYTES = 2**20  # maximum bytes of a label member
LABEL_FIELDS = ("class_name", "class", "label", "cls")
CAPTION_FIELDS = ("caption", "text", "title")
INDEX_FORMAT_VERSION = 5  # version of the cached index format
ORPHAN_LABELS_NOTE = "samples in archives have a label but no image, and are ignored"


#: a sample: index of its archive; offset and size of its image in bytes; index of its label in
#: `ArchiveIndex.label_words` (-1: none); index of its folder in `ArchiveIndex.folders` (`home`); end of its name in
#: `ArchiveIndex.names`; offset and size of the member with its caption, with a negative size for JSON (0: no caption)
SAMPLE_FIELDS = ("archive", "start", "size", "label", "home", "end", "text", "text_size")
SAMPLE_DTYPE = np.dtype([(name, "<i8") for name in SAMPLE_FIELDS])


@dataclass(frozen=True, eq=False)
class ArchiveIndex:
    """Store of the images in archives.

    `samples`, (n,) of SAMPLE_DTYPE, are the samples in order. `names` are the concatenated names of their images,
    uint8. `label_words` are the distinct labels in `.cls` and `.json` members. `folders` are the distinct folders of
    the samples. `notes` maps a message about ignored members to a count.
    """

    archives: tuple[str, ...]
    stamps: tuple[FileStamp, ...]
    samples: np.ndarray
    names: np.ndarray
    label_words: tuple[tuple[LabelWord, ...], ...]
    folders: tuple[str, ...]
    notes: dict[str, int]

    def get_member_name(self, index: int) -> bytes:
        """Return the name of an image's member in its archive."""
        return self.names[self.samples["end"][index - 1] if index else 0 : self.samples["end"][index]].tobytes()

    def name(self, index: int) -> str:
        """Return ARCHIVE/NAME of a sample, for messages."""
        archive = os.path.basename(self.archives[self.samples["archive"][index]])
        return escape_unprintable(f"{archive}/{os.fsdecode(self.get_member_name(index))}")

    def read(self, index: int) -> bytes:
        """Return the bytes of an image. Raises DataError."""
        archive_index, start, size = self.samples[index].tolist()[:3]
        if not 0 < size <= MAX_FILE_BYTES:
            raise DataError(
                f"{self.name(index)}: {f'larger than {MAX_FILE_BYTES >> 20} MiB' if size else 'empty file'}"
            )
        return read_archive_bytes(self.archives[archive_index], self.stamps[archive_index], start, size)

    def read_caption(self, index: int) -> str:
        """Return the caption of a sample; "" if it has none. Raises DataError for a caption that is not UTF-8."""
        archive_index, start, size = (int(self.samples[name][index]) for name in ("archive", "text", "text_size"))
        if not size:
            return ""
        content = read_archive_bytes(self.archives[archive_index], self.stamps[archive_index], start, abs(size))
        try:
            return find_json_caption(json.loads(content)) if size < 0 else content.decode("utf-8")
        except UnicodeDecodeError:
            raise DataError(f"the caption of {self.name(index)} is not UTF-8 text", "save it as UTF-8") from None

    def update(self, digest: Any, indices: np.ndarray) -> None:
        """Update a hashlib digest with the names and sizes of the images at `indices` (n,)."""
        digest.update(b"\n".join(map(self.get_member_name, indices.tolist())))
        digest.update(self.samples["size"][indices].tobytes())


@dataclass
class ArchiveIndexBuilder:
    """Builder of an `ArchiveIndex`. Samples are stored as numbers in an array, since a million samples as Python
    objects would take a gigabyte."""

    samples: array = field(default_factory=lambda: array("q"))  # the fields of SAMPLE_DTYPE, sample by sample
    names: bytearray = field(default_factory=bytearray)
    label_words: dict[tuple[LabelWord, ...], int] = field(default_factory=dict)
    folders: dict[bytes, int] = field(default_factory=dict)
    _: KW_ONLY
    parsed: dict[bytes, int] = field(default_factory=dict)  # content of a .cls member -> index of its label
    notes: Counter[str] = field(default_factory=Counter)

    def add_archive(self, archive_index: int, path: Path, expected: FileStamp) -> None:
        """Add the samples of one archive, the file `path`. Raises DataError for a damaged archive, and for samples with
        ambiguous names or unreadable labels."""
        if not expected.size:
            raise DataError(f"{escape_unprintable(path)}: empty file", COPY_ARCHIVE_HINT)
        keys, name_starts = array("q"), array("q")  # hash of each sample's name; start of its image's name in `names`
        with TarArchive(path, expected, self.notes) as archive:
            split_members = ((*split_member_name(member.name), member) for member in archive.members())
            for key, members in groupby(
                (split_member for split_member in split_members if split_member[1]), itemgetter(0)
            ):
                group: dict[bytes, ArchiveMember] = {}
                for _, extension, member in members:
                    if extension in group:
                        name = escape_unprintable(os.fsdecode(member.name))
                        raise DataError(f"{archive.name}: two members {name}", "rename or delete one of them")
                    group[extension] = member
                name_start = len(self.names)
                if self.add_sample(archive, archive_index, key, group):
                    keys.append(hash(key))
                    name_starts.append(name_start)
        order = np.argsort(keys, kind="stable")
        repeated = np.flatnonzero(np.diff(np.asarray(keys)[order]) == 0)
        if len(repeated):
            first_repeated = int(order[repeated[0] + 1])
            stop = [*name_starts, len(self.names)][first_repeated + 1]
            name = escape_unprintable(os.fsdecode(bytes(self.names[name_starts[first_repeated] : stop])))
            hint = "store members of a sample together (tar --sort=name), and use unique names up to the first dot"
            raise DataError(f"{archive.name}: {len(repeated)} samples are in two places; the first is {name}", hint)

    def add_sample(
        self, archive: TarArchive, archive_index: int, key: bytes, group: dict[bytes, ArchiveMember]
    ) -> bool:
        """Add one sample, whose members are `group`, {extension: member}, and return whether it has an image. Raises
        DataError for two images, and for an unreadable label."""
        images = [extension for extension in group if get_member_suffix(extension) in IMAGE_FILE_SUFFIXES]
        images = images or [
            extension for extension in group if get_member_suffix(extension) in VIDEO_SUFFIXES
        ]  # an image next to a clip is preferred
        if not images:
            self.notes[ORPHAN_LABELS_NOTE] += b"cls" in group
            return False
        plain_images = images if len(images) == 1 else [extension for extension in images if b"." not in extension]
        if len(plain_images) != 1:
            listing = ", ".join(escape_unprintable(os.fsdecode(group[extension].name)) for extension in images[:2])
            hint = "rename them: a sample's name ends at the first dot"
            raise DataError(f"{archive.name}: two images of one sample: {listing}", hint)
        image = group[plain_images[0]]
        label = self.parse_cls(archive, group[b"cls"]) if b"cls" in group else -1
        if label < 0 and b"json" in group:
            label = self.parse_json(archive, group[b"json"])
        text_start, text_size = find_caption_member(archive, group) if label < 0 else (0, 0)
        folder_index = self.folders.setdefault(key[: key.rfind(b"/") + 1], len(self.folders))
        self.names += image.name
        fields = (archive_index, image.start, image.size, label, folder_index, len(self.names), text_start, text_size)
        self.samples.extend(fields)
        return True

    def parse_cls(self, archive: TarArchive, member: ArchiveMember) -> int:
        """Parse the label in a .cls member and return its index in `label_words`, -1 for an empty member. Raises
        DataError if it is not text."""
        content = read_label_member(archive, member)
        if content not in self.parsed:
            try:
                text = content.decode("utf-8").strip()
            except UnicodeDecodeError:
                name = escape_unprintable(os.fsdecode(member.name))
                raise DataError(f"{archive.name}: {name} is not UTF-8 text", "save the label as UTF-8") from None
            label = int(text) if text.isdecimal() and len(text) < 10 else text
            self.parsed[content] = self.label_words.setdefault((label,), len(self.label_words)) if text else -1
        return self.parsed[content]

    def parse_json(self, archive: TarArchive, member: ArchiveMember) -> int:
        """Parse the label in a .json member and return its index in `label_words`, -1 if it has no label. Raises
        DataError if it is not JSON."""
        try:
            document = json.loads(read_label_member(archive, member))
        except (ValueError, RecursionError):
            name = escape_unprintable(os.fsdecode(member.name))
            raise DataError(f"{archive.name}: {name} is not JSON", "fix or delete this member") from None
        if not isinstance(document, dict):
            return -1
        labels = [
            label
            for name in LABEL_FIELDS
            if name in document and (label := parse_json_label(document[name])) is not None
        ]
        named_labels = [label for label in labels if not any(isinstance(label_word, int) for label_word in label)]
        return self.label_words.setdefault((named_labels or labels)[0], len(self.label_words)) if labels else -1

    def build(self, paths: Sequence[Path], stamps: Sequence[FileStamp]) -> ArchiveIndex:
        """Return the index of all added archives."""
        samples, names = np.frombuffer(self.samples.tobytes(), SAMPLE_DTYPE), np.frombuffer(bytes(self.names), np.uint8)
        folders, notes = tuple(map(os.fsdecode, self.folders)), {text: n for text, n in self.notes.items() if n}
        archives = tuple(map(os.fspath, paths))
        return ArchiveIndex(
            archives,
            tuple(stamps),
            samples=samples,
            names=names,
            label_words=tuple(self.label_words),
            folders=folders,
            notes=notes,
        )


@lru_cache(maxsize=1024)
def get_member_suffix(extension: bytes) -> str:
    """Return the suffix of a member's extension: `.png` for `seg.png`."""
    return f".{os.fsdecode(extension.rsplit(b'.', 1)[-1])}"


def split_member_name(name: bytes) -> tuple[bytes, bytes]:
    """Split the name of a member into the name of its sample and its extension: `./a/b.seg.png` into `a/b` and
    `seg.png`. The extension of hidden files, and of names without a dot, is empty."""
    while name[:2] == b"./":
        name = name[2:]
    dot = name.find(b".", base := name.rfind(b"/") + 1)
    return (name[:dot], name[dot + 1 :].lower()) if dot > base else (name, b"")


def read_label_member(archive: TarArchive, member: ArchiveMember) -> bytes:
    """Return the content of a label member. Raises DataError if it is too long."""
    if member.size > MAX_LABEL_BYTES:
        name = escape_unprintable(os.fsdecode(member.name))
        problem = f"{name} has {member.size:,} bytes, which exceeds the limit of a label"
        raise DataError(f"{archive.name}: {problem}", "check that it is a label, or delete it")
    return archive.read(member)


def find_caption_member(archive: TarArchive, group: dict[bytes, ArchiveMember]) -> tuple[int, int]:
    """Return the offset and the size of the member with the caption of a sample, with a negative size for JSON; (0, 0)
    if it has no caption. Raises DataError for a too long member."""
    if b"txt" in group and group[b"txt"].size <= MAX_LABEL_BYTES:
        return group[b"txt"].start, group[b"txt"].size
    if b"json" not in group:
        return 0, 0
    member = group[b"json"]
    has_caption = bool(find_json_caption(json.loads(read_label_member(archive, member))))
    return (member.start, -member.size) if has_caption else (0, 0)


def find_json_caption(document: Any) -> str:
    """Return the caption in a JSON document, the first of `CAPTION_FIELDS` with a text; "" if it has none."""
    values = [document.get(name) for name in CAPTION_FIELDS] if isinstance(document, dict) else []
    return next((value for value in values if isinstance(value, str)), "")


def parse_json_label(value: Any) -> tuple[LabelWord, ...] | None:
    """Parse a JSON value as a label: a word, an integer from 0, or a list of those; None for anything else."""
    values = value if isinstance(value, list) else [value]
    if all(
        (type(label_word) is int and label_word >= 0) or (isinstance(label_word, str) and label_word)
        for label_word in values
    ):
        return tuple(dict.fromkeys(values))
    return None


def open_archive_index(paths: Sequence[Path]) -> ArchiveIndex:
    """Load the cached index of these archives, or build it if it is missing or an archive has changed.

    Building takes about a minute for a million members. The index is cached below `XDG_CACHE_HOME`, if that is
    writable. Raises DataError for invalid or damaged archives, unreadable labels, and ambiguous names.
    """
    stamps = [read_file_stamp(path) for path in paths]
    path = get_index_path(paths)
    index = load_index(path, paths, stamps)
    if index is None:
        builder = ArchiveIndexBuilder()
        for archive_index, (archive, expected) in enumerate(zip(paths, stamps, strict=True)):
            builder.add_archive(archive_index, archive, expected)
        index = builder.build(paths, stamps)
        with suppress(OSError):
            store_index(path, index)
    return index


def get_index_path(paths: Sequence[Path]) -> Path:
    """Return the cache file for the index of these archives."""
    joined_paths = "\n".join(os.path.abspath(path) for path in paths).encode("utf-8", "surrogateescape")
    return get_cache_folder("tars") / f"{hashlib.sha256(joined_paths).hexdigest()}.npz"


def store_index(path: Path, index: ArchiveIndex) -> None:
    """Write an index to a cache file atomically. Raises OSError if the file cannot be written."""
    names = ("label_words", "folders", "notes", "stamps")
    text = json.dumps({"format": INDEX_FORMAT_VERSION, **{name: getattr(index, name) for name in names}}).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_atomic(path, shared=True) as file:
        np.savez(file, text=np.frombuffer(text, np.uint8), names=index.names, samples=index.samples)


def load_index(path: Path, paths: Sequence[Path], stamps: Sequence[FileStamp]) -> ArchiveIndex | None:
    """Load the cached index from `path`; None if it is missing, damaged, or does not match these archives."""
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as stored:
            samples, names, metadata = stored["samples"], stored["names"], json.loads(stored["text"].tobytes())
        if (metadata["format"], metadata["stamps"]) != (
            INDEX_FORMAT_VERSION,
            [list(pair) for pair in stamps],
        ) or samples.dtype != SAMPLE_DTYPE:
            return None
        label_words = tuple(map(tuple, metadata["label_words"]))
        archives = tuple(map(os.fspath, paths))
        return ArchiveIndex(
            archives,
            tuple(stamps),
            samples=samples,
            names=names,
            label_words=label_words,
            folders=tuple(metadata["folders"]),
            notes=metadata["notes"],
        )
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
        return None
