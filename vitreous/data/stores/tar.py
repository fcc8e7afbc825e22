"""The members of a tar archive by place: `tarfile` reads the headers, nothing is extracted, no name in it is opened."""

from __future__ import annotations

import os
import stat
import tarfile
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, NamedTuple

from vitreous.data.decoding.decode import describe_exception
from vitreous.errors import DataError, escape_unprintable

TAR_BLOCK_SIZE = tarfile.BLOCKSIZE
MAX_EXTENDED_HEADER_BYTES = 2**20  # bytes of a header in front of a header
MAX_OPEN_ARCHIVES = 64  # archives that a process holds open
EXTENDED_HEADER_TYPES = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE, b"X")
#: first bytes of a compressed archive -> what undoes it
COMPRESSION_SIGNATURES = (
    (b"\x1f\x8b", "gunzip"),
    (b"BZh", "bunzip2"),
    (b"\xfd7zXZ\0", "unxz"),
    (b"\x28\xb5\x2f\xfd", "unzstd"),
)
COPY_ARCHIVE_HINT = "copy it anew, or leave it out"


class ArchiveMember(NamedTuple):
    """A regular file in an archive: its name, the place of its first byte in the archive, and its bytes."""

    name: bytes
    start: int
    size: int


class FileStamp(NamedTuple):
    """Size and modification time (ns) of a file, by which a changed one is recognised."""

    size: int
    changed: int


def read_file_stamp(path: Path) -> FileStamp:
    """The stamp of an archive. Raises DataError for anything but a regular file."""
    try:
        return stamp_from_status(os.stat(path), path)
    except OSError as error:
        raise unreadable_archive_error(path, error) from None


def stamp_from_status(status: os.stat_result, path: str | Path) -> FileStamp:
    """The stamp in a file's status. Raises DataError for anything but a regular file."""
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{escape_unprintable(path)}: not a regular file")
    return FileStamp(status.st_size, status.st_mtime_ns)


def unreadable_archive_error(path: str | Path, error: OSError) -> DataError:
    """The refusal of an archive that the system does not read."""
    return DataError(f"{escape_unprintable(path)}: cannot be read ({describe_exception(error)})", COPY_ARCHIVE_HINT)


def open_archive(path: str, expected: FileStamp) -> BinaryIO:
    """Open an archive. Raises DataError for anything but a regular file, and for one that is not as `expected`."""
    try:
        file = os.fdopen(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb")
    except OSError as error:
        raise unreadable_archive_error(path, error) from None
    if stamp_from_status(os.fstat(file.fileno()), path) != expected:
        raise DataError(f"{escape_unprintable(path)}: has changed since it was opened", "start again")
    return file


#: For reads by place (`os.pread`), which forked processes may share.
open_archive_cached = lru_cache(maxsize=MAX_OPEN_ARCHIVES)(open_archive)


def read_archive_bytes(path: str, expected: FileStamp, start: int, size: int) -> bytes:
    """`size` bytes of an archive from `start`. Raises DataError where it has fewer, or is not as `expected`."""
    file = open_archive_cached(path, expected)
    try:
        content = os.pread(file.fileno(), size, start)
    except OSError as error:
        raise unreadable_archive_error(path, error) from None
    if len(content) != size:
        problem = f"ends at byte {start + len(content)} of a member that reaches to {start + size}"
        raise DataError(f"{escape_unprintable(path)}: {problem}", COPY_ARCHIVE_HINT)
    return content


class CheckedTarInfo(tarfile.TarInfo):
    """tarfile's header; raises where tarfile would end the archive in silence, go backwards, or read without bound."""

    @classmethod
    def frombuf(cls, buf: bytes, encoding: str, errors: str) -> CheckedTarInfo:
        """A block -> its header. Raises ValueError for an extended header of more than MAX_EXTENDED bytes."""
        header = super().frombuf(buf, encoding, errors)
        if header.size < 0 or (header.type in EXTENDED_HEADER_TYPES and header.size > MAX_EXTENDED_HEADER_BYTES):
            raise ValueError(f"a header of {header.size:,} bytes")
        return header

    @classmethod
    def fromtarfile(cls, tarfile: tarfile.TarFile) -> CheckedTarInfo:
        """The next header. Raises ValueError for a damaged or truncated one."""
        try:
            return super().fromtarfile(tarfile)
        except (InvalidHeaderError, TruncatedHeaderError) as error:
            raise ValueError(str(error)) from None


InvalidHeaderError: type[Exception] = tarfile.InvalidHeaderError  # type: ignore[attr-defined]
TruncatedHeaderError: type[Exception] = tarfile.TruncatedHeaderError  # type: ignore[attr-defined]


class TarArchive:
    """One archive, read once from its beginning to its end; `skipped` counts what was passed over, in words."""

    def __init__(self, path: Path, expected: FileStamp, skipped: Counter[str]) -> None:
        self.path, self.size, self.skipped = os.fspath(path), expected.size, skipped
        self.name = escape_unprintable(path)
        self.file = open_archive(self.path, expected)

    def __enter__(self) -> TarArchive:
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()

    def read(self, member: ArchiveMember) -> bytes:
        """The content of a member that `members` gave."""
        self.file.seek(member.start)
        return self.file.read(member.size)

    def members(self) -> Iterator[ArchiveMember]:
        """The regular files in order; directories, links, devices, pipes and sparse files are passed over.

        Raises DataError, with the byte, for what is no tar archive, and for a damaged or truncated one.
        """
        head = self.file.read(TAR_BLOCK_SIZE)
        if tool := next((tool for mark, tool in COMPRESSION_SIGNATURES if head.startswith(mark)), None):
            problem = f"{self.name}: a compressed archive cannot be read at any place"
            raise DataError(problem, f"unpack it with {tool} to a .tar")
        self.file.seek(0)
        for header in self.headers():
            if header.isreg() and not is_sparse(header):
                if header.name.endswith("/"):
                    continue
                name, stop = header.name.encode("utf-8", "surrogateescape"), header.offset_data + header.size
                if stop > self.size:
                    where = f"{escape_unprintable(header.name)} reaches to byte {stop:,} of {self.size:,}"
                    raise DataError(f"{self.name}: truncated: {where}", COPY_ARCHIVE_HINT)
                yield ArchiveMember(name, header.offset_data, header.size)
            elif not header.isdir():
                links, devices = header.islnk() or header.issym(), header.isdev()
                kind = "links" if links else "devices or pipes" if devices else "members of an unusual kind"
                self.skipped[f"{kind} in archives are left out"] += 1

    def headers(self) -> Iterator[tarfile.TarInfo]:
        """All headers in order. Raises DataError for a damaged or truncated one."""
        archive = tarfile.TarFile.__new__(tarfile.TarFile)  # as its constructor reads a header, and may fail at it
        at = 0
        try:
            archive.__init__(fileobj=self.file, tarinfo=CheckedTarInfo, encoding="utf-8", errors="surrogateescape")
            while (header := archive.next()) is not None:
                if archive.offset <= at or header.size < 0:
                    raise ValueError("a member of negative size")
                at = archive.offset
                archive.members.clear()  # type: ignore[attr-defined]  # a million of them would take a gigabyte
                yield header
        except (DataError, MemoryError, OSError):
            raise
        except Exception as error:  # tarfile leaves a damaged archive with whatever it stumbled over
            raise self.damaged_error(archive.offset, error) from None
        self.check_archive_end(archive.offset)

    def damaged_error(self, at: int, error: Exception) -> DataError:
        """The refusal of a header at that byte."""
        if self.file.tell() >= self.size:
            return DataError(
                f"{self.name}: truncated: ends at byte {self.size:,}, in the middle of a member", COPY_ARCHIVE_HINT
            )
        if not at:
            return DataError(f"{self.name}: not a tar archive")
        return DataError(f"{self.name}: damaged at byte {at:,} ({describe_exception(error)})", COPY_ARCHIVE_HINT)

    def check_archive_end(self, at: int) -> None:
        """Count an archive without the zeros that end one, or with more behind them; `at` is where they are due."""
        self.file.seek(at + 2 * TAR_BLOCK_SIZE)
        if 0 < at == self.size:
            self.skipped["archives have no mark at their end (were they copied whole?)"] += 1
        elif any(self.file.read(TAR_BLOCK_SIZE)):
            self.skipped["archives go on after their end, where nothing is read (joined with cat?)"] += 1


def is_sparse(header: tarfile.TarInfo) -> bool:
    """Whether a member's bytes in the archive are not those of its file."""
    return header.issparse() or any(key.startswith("GNU.sparse") for key in header.pax_headers)
