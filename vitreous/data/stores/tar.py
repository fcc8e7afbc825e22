"""The members of a tar archive, from its headers alone: nothing is extracted, and no name in it is ever opened.

The formats of POSIX.1-1988 (ustar) and POSIX.1-2001 (pax), and GNU's. Python's own `tarfile` reads them too, but not by
place, and slower.
"""

from __future__ import annotations

import os
import re
import stat
import struct
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, NamedTuple
from zlib import adler32

from vitreous.data.decoding.decode import reason
from vitreous.errors import DataError, printable

BLOCK = 512
AHEAD = 8192  # bytes that are read at a time, since small members follow each other
MAX_EXTENDED = 2**20  # bytes of a header in front of a header
OPEN = 64  # archives that a process holds open
REGULAR, LINKS, SPECIAL = b"0\0007", b"12", b"346"
#: how an archive that is compressed begins, and what to undo it with
COMPRESSED = ((b"\x1f\x8b", "gunzip"), (b"BZh", "bunzip2"), (b"\xfd7zXZ\0", "unxz"), (b"\x28\xb5\x2f\xfd", "unzstd"))
COPY = "copy it anew, or leave it out"
ZEROS = bytes(BLOCK)
HEADER = struct.Struct("100s24x12s12x8sc100x6s82x155s12x")  # name, size, checksum, kind, magic, prefix
ADLER = 65521  # zlib's checksum has the sum of all bytes modulo this, which is found twenty times faster than by `sum`


class Member(NamedTuple):
    """A regular file in an archive: its name as it stands there, and where its bytes are."""

    name: bytes
    start: int
    size: int


class Stamp(NamedTuple):
    """What tells whether a file is still the one that was looked at: its bytes, and when they were last changed, in
    ns."""

    size: int
    changed: int


def stamp(path: Path) -> Stamp:
    """The stamp of an archive. Raises DataError for what is no regular file."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise DataError(f"{printable(path)}: cannot be read ({reason(error)})") from None
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{printable(path)}: not a regular file")
    return Stamp(status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=OPEN)
def opened(path: str, known: Stamp) -> BinaryIO:
    """An archive, open for as long as a process reads it often. Raises DataError where it is none, or no longer the one
    known.

    Processes that are forked share it without harm, since bytes are read by their place (`os.pread`).
    """
    name = printable(path)
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        raise DataError(f"{name}: cannot be read ({reason(error)})") from None
    file = os.fdopen(descriptor, "rb", buffering=0)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{name}: not a regular file")
    if (status.st_size, status.st_mtime_ns) != known:
        raise DataError(f"{name}: has changed since it was opened", "start again")
    return file  # type: ignore[return-value]


def read_at(path: str, known: Stamp, start: int, size: int) -> bytes:
    """Bytes of an archive. Raises DataError where there are not so many."""
    file = opened(path, known)
    try:
        content = os.pread(file.fileno(), size, start)
    except OSError as error:
        raise DataError(f"{printable(path)}: cannot be read ({reason(error)})", COPY) from None
    if len(content) != size:
        raise DataError(
            f"{printable(path)}: ends at byte {start + len(content)} of a member that reaches to {start + size}", COPY
        )
    return content


class Archive:
    """One archive, read from its beginning to its end. `told` counts what was passed over, in words."""

    def __init__(self, path: Path, known: Stamp, told: Counter[str]) -> None:
        self.path, self.known, self.told = os.fspath(path), known, told
        self.name = printable(path)
        self.begin, self.ahead = 0, b""

    def bytes(self, start: int, size: int) -> bytes:
        """Some bytes. Raises DataError where the archive ends before."""
        low = start - self.begin
        if low < 0 or low + size > len(self.ahead):
            if start + size > self.known.size:
                raise DataError(
                    f"{self.name}: truncated: ends at byte {self.known.size:,}, in the middle of a member", COPY
                )
            self.begin, low = start, 0
            self.ahead = read_at(self.path, self.known, start, max(size, min(AHEAD, self.known.size - start)))
        return self.ahead[low : low + size]

    def members(self) -> Iterator[Member]:
        """The regular files in order; directories, links, devices and pipes are passed over.

        Raises DataError, with the byte, for what is no tar archive, or a damaged or truncated one.
        """
        at, called, records, end = 0, b"", dict[bytes, bytes](), self.known.size
        head = self.bytes(0, min(BLOCK, end))
        if tool := next((tool for mark, tool in COMPRESSED if head.startswith(mark)), None):
            raise DataError(
                f"{self.name}: a compressed archive cannot be read at any place", f"unpack it with {tool} to a .tar"
            )
        while at < end:
            header = self.bytes(at, BLOCK)
            name, digits, checksum, kind, magic, prefix = HEADER.unpack(header)
            size = octal(digits)
            # of all bytes, the checksum's own as blanks
            total = (adler32(header, 0) & 0xFFFF) - sum(checksum) + 8 * ord(" ")
            if size < 0 or (total - octal(checksum)) % ADLER:
                if header == ZEROS:
                    break
                raise DataError(
                    f"{self.name}: damaged at byte {at:,}" if at else f"{self.name}: not a tar archive",
                    COPY if at else "",
                )
            at += BLOCK
            if kind in b"LKxg":
                content = self.extended(at, size)
                at += -(-size // BLOCK) * BLOCK
                if kind == b"L":
                    called = content.rstrip(b"\0")
                elif kind == b"x":
                    records = self.records(content, at)
                continue
            start, name = at, called or name_of(name, magic, prefix)
            sparse = kind == b"S"
            if records:
                name, size = records.get(b"path") or name, self.size_in(records, size)
                sparse = sparse or any(key.startswith(b"GNU.sparse") for key in records)
            called, records = b"", {}
            if kind == b"S":
                start = self.beyond(header, at)
            at = start if kind in LINKS + SPECIAL + b"5" else start + -(-size // BLOCK) * BLOCK
            if sparse or kind not in REGULAR + b"5":
                what = (
                    "links"
                    if kind in LINKS
                    else "devices or pipes"
                    if kind in SPECIAL
                    else "members of an unusual kind"
                )
                self.told[f"{what} in archives are left out"] += 1
            elif kind != b"5" and not name.endswith(b"/"):
                if start + size > end:
                    where = f"{printable(os.fsdecode(name))} reaches to byte {start + size:,} of {end:,}"
                    raise DataError(f"{self.name}: truncated: {where}", COPY)
                yield Member(name, start, size)
        self.tell_end(at)

    def tell_end(self, at: int) -> None:
        """Count an archive without the zeros that end one, or with more behind them; `at` is where they stand, or
        would."""
        if 0 < at == self.known.size:
            self.told["archives have no mark at their end (were they copied whole?)"] += 1
        elif at + 3 * BLOCK <= self.known.size and self.bytes(at + 2 * BLOCK, BLOCK) != ZEROS:
            self.told["archives go on after their end, where nothing is read (joined with cat?)"] += 1

    def size_in(self, records: dict[bytes, bytes], size: int) -> int:
        """The size that records of pax give a member, if they do. Raises DataError for what is no size."""
        digits = records.get(b"size", b"%d" % size)
        if not digits.isdigit() or len(digits) > 19:
            raise DataError(f"{self.name}: damaged: a member of no size", COPY)
        return int(digits)

    def extended(self, at: int, size: int) -> bytes:
        """What a header in front of a header says. Raises DataError where that is too much."""
        if size > MAX_EXTENDED:
            raise DataError(f"{self.name}: damaged at byte {at:,}: a name of {size:,} bytes", COPY)
        return self.bytes(at, size)

    def records(self, content: bytes, at: int) -> dict[bytes, bytes]:
        """Records of pax, each `LENGTH KEY=VALUE\\n`. Raises DataError for others."""
        found, low = {}, 0
        while low < len(content):
            length = _LENGTH.match(content, low)
            end = low + int(length[1]) if length else 0
            key, equals, value = content[length.end() : end - 1].partition(b"=") if length else (b"", b"", b"")
            if not equals or end > len(content) or content[end - 1 : end] != b"\n":
                raise DataError(f"{self.name}: damaged before byte {at:,}: a record that is none", COPY)
            found[key] = value
            low = end
        return found

    def beyond(self, header: bytes, at: int) -> int:
        """Where the bytes of a sparse file of GNU's old format begin: behind the blocks of its map."""
        more = header[482]
        while more:
            more = self.bytes(at, BLOCK)[504]
            at += BLOCK
        return at


def name_of(name: bytes, magic: bytes, prefix: bytes) -> bytes:
    """The name in a header, with what POSIX puts in front of long ones."""
    name, prefix = name.partition(b"\0")[0], prefix.partition(b"\0")[0] if magic == b"ustar\0" else b""
    return prefix + b"/" + name if prefix else name


def octal(field: bytes) -> int:
    """A number in a header: octal digits, or with the highest bit set a binary number (GNU); -1 where it is neither."""
    try:
        return int(field.partition(b"\0")[0].strip() or b"0", 8)
    except ValueError:
        return int.from_bytes(field[1:], "big") if field[0] == 0x80 else -1


_LENGTH = re.compile(rb"(\d{1,7}) ")
