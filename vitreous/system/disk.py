"""Atomic file writes, checksums, and the cache folder."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from vitreous.errors import ResourceError, escape_unprintable

STALE_SECONDS = 86_400  # age in seconds from which temporary files of other processes are considered abandoned


@contextmanager
def open_atomic(
    path: str | os.PathLike[str], mode: str = "wb", shared: bool = False, **options: Any
) -> Iterator[IO[Any]]:
    """Open a file for writing that appears at `path` only when the block ends without an exception, even after a crash.

    `shared`: whether several processes may write `path` at the same time (see `atomic_path`). `options` are those of
    `open`. Raises OSError.
    """
    with atomic_path(path, shared) as temporary, open(temporary, mode, **options) as file:
        yield file


@contextmanager
def atomic_path(path: str | os.PathLike[str], shared: bool = False) -> Iterator[Path]:
    """Yield a temporary path next to `path`, at which the block creates a file or a folder.

    When the block ends, the file or folder is flushed to disk and renamed to `path`. After an exception it is removed,
    and `path` is unchanged. With `shared`, the temporary name is unique, so that several processes may write `path` at
    the same time; files left by killed processes are removed after a day. Raises OSError.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp" if shared else f".{path.name}.tmp")
    if shared:
        remove_stale_files(path.parent)
    remove_path(temporary)
    try:
        yield temporary
        sync_and_rename(temporary, path)
    finally:
        with suppress(OSError):
            remove_path(temporary)


def sync_and_rename(temporary: Path, path: Path) -> None:
    """Flush a file, or a folder with all its content, to disk and rename it to `path`, replacing a file there. Raises
    OSError.

    Both must be on the same file system. The rename is flushed too, so a crash can neither lose it nor apply it before
    the content.
    """
    if temporary.is_dir():
        for entry in sorted(temporary.rglob("*")):
            fsync_path(entry)
    fsync_path(temporary)
    os.replace(temporary, path)
    fsync_path(path.parent)


def fsync_path(path: Path) -> None:
    """Flush a file or a folder to disk. Raises OSError."""
    if os.name == "nt" and path.is_dir():
        return  # Windows cannot open folders
    descriptor = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_path(path: Path) -> None:
    """Remove a file or a folder if it exists. Raises OSError for a file that cannot be removed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def remove_stale_files(folder: Path) -> None:
    """Remove temporary files of `atomic_path` that have not been written for a day."""
    for path in folder.glob(".*.tmp"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > STALE_SECONDS:
                remove_path(path)


def write_text_atomic(path: Path, text: str, errors: str = "strict") -> None:
    """Write a text file in UTF-8 atomically. Raises OSError."""
    with open_atomic(path, "w", encoding="utf-8", errors=errors, newline="") as file:
        file.write(text)


def write_output_file(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file that the user named. File names in the text that are not UTF-8 keep their bytes. Raises
    ResourceError if it cannot be written."""
    try:
        write_text_atomic(Path(path), text, "surrogateescape")
    except OSError as error:
        raise make_write_error(path, error) from None


def make_write_error(path: str | os.PathLike[str], error: OSError) -> ResourceError:
    """Return the error for an output file that cannot be written."""
    return ResourceError(
        f"cannot write {escape_unprintable(path)}: {error.strerror or error}",
        "free some disk space, or choose another file",
    )


def compute_sha256(path: str | os.PathLike[str]) -> str:
    """Compute the SHA-256 of a file, in hex. Raises OSError."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_utf8(text: str) -> bool:
    """Return whether a text can be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def get_cache_folder(name: str) -> Path:
    """Return the cache folder for reproducible data of the type `name`: below `XDG_CACHE_HOME`, or `~/.cache`."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if os.path.isabs(root) else Path(os.path.expanduser("~")) / ".cache") / "vitreous" / name
