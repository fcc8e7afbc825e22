"""Random access to the members of a tar archive. `tarfile` parses the headers; members are neither extracted nor opened
by name."""

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
MAX_EXTENDED_HEADER_BYTES = 2**20  # maximum bytes of an extended header
MAX_OPEN_ARCHIVES = 64  # maximum open archives per process
EXTENDED_HEADER_TYPES = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE, b"X")
#: first bytes of a compressed archive -> decompression tool
COMPRESSION_SIGNATURES = (
    (b"\x1f\x8b", "gunzip"),
    (b"BZh", "bunzip2"),
    (b"\xfd7zXZ\0", "unxz"),
    (b"\x28\xb5\x2f\xfd", "unzstd"),
)
COPY_ARCHIVE_HINT = "copy it again, or remove it"


class ArchiveMember(NamedTuple):
    """A regular file in an archive: its name, its offset in the archive, and its size in bytes."""

    name: bytes
    start: int
    size: int


class FileStamp(NamedTuple):
    """Size (bytes) and modification time (ns) of a file, for detecting changes."""

    size: int
    changed: int


def read_file_stamp(path: Path) -> FileStamp:
    """Read the stamp of an archive. Raises DataError for anything but a regular file."""
    try:
        return stamp_from_status(os.stat(path), path)
    except OSError as error:
        raise unreadable_archive_error(path, error) from None


def stamp_from_status(status: os.stat_result, path: str | Path) -> FileStamp:
    """Convert the status of a file to its stamp. Raises DataError for anything but a regular file."""
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{escape_unprintable(path)}: not a regular file")
    return FileStamp(status.st_size, status.st_mtime_ns)


def unreadable_archive_error(path: str | Path, error: OSError) -> DataError:
    """Return the error for an archive that the system cannot read."""
    return DataError(f"{escape_unprintable(path)}: cannot be read ({describe_exception(error)})", COPY_ARCHIVE_HINT)


def open_archive(path: str, expected: FileStamp) -> BinaryIO:
    """Open an archive for reading. Raises DataError for anything but a regular file, and if its size or modification
    time is not as `expected`."""
    try:
        file = os.fdopen(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb")
    except OSError as error:
        raise unreadable_archive_error(path, error) from None
    if stamp_from_status(os.fstat(file.fileno()), path) != expected:
        raise DataError(f"{escape_unprintable(path)}: changed since it was opened", "start again")
    return file


#: `open_archive` with a cache of open files; read them by offset (`os.pread`) only, since forked processes share them
open_archive_cached = lru_cache(maxsize=MAX_OPEN_ARCHIVES)(open_archive)


def read_archive_bytes(path: str, expected: FileStamp, start: int, size: int) -> bytes:
    """Read `size` bytes of an archive from byte `start`. Raises DataError if the archive is shorter, or not as
    `expected`."""
    file = open_archive_cached(path, expected)
    try:
        content = os.pread(file.fileno(), size, start)
    except OSError as error:
        raise unreadable_archive_error(path, error) from None
    if len(content) != size:
        problem = f"ends at byte {start + len(content)}, inside a member that ends at {start + size}"
        raise DataError(f"{escape_unprintable(path)}: {problem}", COPY_ARCHIVE_HINT)
    return content


class CheckedTarInfo(tarfile.TarInfo):
    """Header of a tar member that raises ValueError where tarfile's class would silently end the archive, go backwards,
    or read without limit."""

    @classmethod
    def frombuf(cls, buf: bytes, encoding: str, errors: str) -> CheckedTarInfo:
        """Parse a block of an archive as a header. Raises ValueError for a negative size, and for an extended header of
        more than MAX_EXTENDED_HEADER_BYTES."""
        header = super().frombuf(buf, encoding, errors)
        if header.size < 0 or (header.type in EXTENDED_HEADER_TYPES and header.size > MAX_EXTENDED_HEADER_BYTES):
            raise ValueError(f"a header of {header.size:,} bytes")
        return header

    @classmethod
    def fromtarfile(cls, tarfile: tarfile.TarFile) -> CheckedTarInfo:
        """Read the next header. Raises ValueError for a damaged or truncated one."""
        try:
            return super().fromtarfile(tarfile)
        except (InvalidHeaderError, TruncatedHeaderError) as error:
            raise ValueError(str(error)) from None


InvalidHeaderError: type[Exception] = tarfile.InvalidHeaderError  # type: ignore[attr-defined]
TruncatedHeaderError: type[Exception] = tarfile.TruncatedHeaderError  # type: ignore[attr-defined]


class TarArchive:
    """A tar archive that is read once from beginning to end. `skipped` counts ignored members, and faults at the end of
    the archive, by description."""

    def __init__(self, path: Path, expected: FileStamp, skipped: Counter[str]) -> None:
        self.path, self.size, self.skipped = os.fspath(path), expected.size, skipped
        self.name = escape_unprintable(path)
        self.file = open_archive(self.path, expected)

    def __enter__(self) -> TarArchive:
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()

    def read(self, member: ArchiveMember) -> bytes:
        """Return the content of a member that `members` has yielded."""
        self.file.seek(member.start)
        return self.file.read(member.size)

    def members(self) -> Iterator[ArchiveMember]:
        """Yield the regular files in order; directories, links, devices, pipes and sparse files are skipped.

        Raises DataError, with the byte offset, for anything but a tar archive, and for a damaged or truncated one.
        """
        first_block = self.file.read(TAR_BLOCK_SIZE)
        if tool := next(
            (tool for signature, tool in COMPRESSION_SIGNATURES if first_block.startswith(signature)), None
        ):
            problem = f"{self.name}: a compressed archive does not allow random access"
            raise DataError(problem, f"unpack it with {tool} to a .tar")
        self.file.seek(0)
        for header in self.headers():
            if header.isreg() and not is_sparse(header):
                if header.name.endswith("/"):
                    continue
                name, stop = header.name.encode("utf-8", "surrogateescape"), header.offset_data + header.size
                if stop > self.size:
                    location = f"{escape_unprintable(header.name)} ends at byte {stop:,} of {self.size:,}"
                    raise DataError(f"{self.name}: truncated: {location}", COPY_ARCHIVE_HINT)
                yield ArchiveMember(name, header.offset_data, header.size)
            elif not header.isdir():
                links, devices = header.islnk() or header.issym(), header.isdev()
                description = "links" if links else "devices or pipes" if devices else "members of an unsupported type"
                self.skipped[f"{description} in archives are ignored"] += 1

    def headers(self) -> Iterator[tarfile.TarInfo]:
        """Yield the headers of all members in order. Raises DataError for a damaged or truncated header."""
        archive = tarfile.TarFile.__new__(tarfile.TarFile)  # its constructor reads a header, which may fail
        last_offset = 0
        try:
            archive.__init__(fileobj=self.file, tarinfo=CheckedTarInfo, encoding="utf-8", errors="surrogateescape")
            while (header := archive.next()) is not None:
                if archive.offset <= last_offset or header.size < 0:
                    raise ValueError("a member of negative size")
                last_offset = archive.offset
                archive.members.clear()  # type: ignore[attr-defined]  # a million members would take a gigabyte
                yield header
        except (DataError, MemoryError, OSError):
            raise
        except Exception as error:  # tarfile raises arbitrary exceptions for a damaged archive
            raise self.damaged_error(archive.offset, error) from None
        self.check_archive_end(archive.offset)

    def damaged_error(self, offset: int, error: Exception) -> DataError:
        """Return the error for a damaged header at byte `offset`."""
        if self.file.tell() >= self.size:
            return DataError(f"{self.name}: truncated: ends at byte {self.size:,}, inside a member", COPY_ARCHIVE_HINT)
        if not offset:
            return DataError(f"{self.name}: not a tar archive", COPY_ARCHIVE_HINT)
        return DataError(f"{self.name}: damaged at byte {offset:,} ({describe_exception(error)})", COPY_ARCHIVE_HINT)

    def check_archive_end(self, offset: int) -> None:
        """Check the two zero blocks that end an archive, expected at byte `offset`. An archive without them, or with
        data after them, is counted in `skipped`."""
        self.file.seek(offset + 2 * TAR_BLOCK_SIZE)
        if 0 < offset == self.size:
            self.skipped["archives have no end marker (check whether they were copied completely)"] += 1
        elif any(self.file.read(TAR_BLOCK_SIZE)):
            self.skipped["archives have data after the end marker, which is ignored (concatenated with cat?)"] += 1


def is_sparse(header: tarfile.TarInfo) -> bool:
    """Return whether a member is a sparse file, whose stored bytes differ from the content of the file."""
    return header.issparse() or any(key.startswith("GNU.sparse") for key in header.pax_headers)
