"""Files that are on the disk whole or not at all, and the folder of what can be made again."""

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

STALE_SECONDS = 86_400  # seconds without a write after which another process's temporary file counts as left behind


@contextmanager
def open_atomic(
    path: str | os.PathLike[str], mode: str = "wb", shared: bool = False, **options: Any
) -> Iterator[IO[Any]]:
    """Open a file to write that appears at `path` only when the block ends without an exception, also after a crash.

    `shared`: several processes may write `path` at once (see `atomic_path`); `options` are those of `open`. Raises
    OSError.
    """
    with atomic_path(path, shared) as temporary, open(temporary, mode, **options) as file:
        yield file


@contextmanager
def atomic_path(path: str | os.PathLike[str], shared: bool = False) -> Iterator[Path]:
    """A temporary path beside `path`, for the block to write a file or make a folder there.

    When the block ends, the file or folder is synced and renamed to `path`; after an exception it is removed and `path`
    is as before. `shared`: the temporary name is unique, since several processes may write `path` at once; leftovers of
    killed ones go after a day. Raises OSError.
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
    """Sync a file, or a folder with all that it holds, and rename it to `path`, replacing a file there. Raises OSError.

    Both lie on one file system. The rename is synced too, so that it cannot be lost, nor come before the content.
    """
    if temporary.is_dir():
        for part in sorted(temporary.rglob("*")):
            fsync_path(part)
    fsync_path(temporary)
    os.replace(temporary, path)
    fsync_path(path.parent)


def fsync_path(path: Path) -> None:
    """Bring a file or a folder to the disk. Raises OSError."""
    if os.name == "nt" and path.is_dir():
        return  # Windows opens no folders
    descriptor = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_path(path: Path) -> None:
    """Remove a file or a folder, if there is one. Raises OSError for a file that cannot be removed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def remove_stale_files(folder: Path) -> None:
    """Remove temporary files of `atomic_path` that nobody has written to for a day."""
    for path in folder.glob(".*.tmp"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > STALE_SECONDS:
                remove_path(path)


def write_text_atomic(path: Path, text: str, errors: str = "strict") -> None:
    """Write a text file in UTF-8, whole or not at all. Raises OSError."""
    with open_atomic(path, "w", encoding="utf-8", errors=errors, newline="") as file:
        file.write(text)


def write_output_file(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file that the user named; names in it that are not UTF-8 keep their bytes. Raises ResourceError."""
    try:
        write_text_atomic(Path(path), text, "surrogateescape")
    except OSError as error:
        raise make_write_error(path, error) from None


def make_write_error(path: str | os.PathLike[str], error: OSError) -> ResourceError:
    """The refusal of a file that cannot be written."""
    return ResourceError(
        f"cannot write {escape_unprintable(path)}: {error.strerror or error}", "make room, or choose another file"
    )


def compute_sha256(path: str | os.PathLike[str]) -> str:
    """The SHA-256 of a file, in hex. Raises OSError."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_utf8(text: str) -> bool:
    """Whether a text can be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def get_cache_folder(kind: str) -> Path:
    """The folder for things of a kind that can be made or fetched again: below `XDG_CACHE_HOME`, or `~/.cache`."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if os.path.isabs(home) else Path(os.path.expanduser("~")) / ".cache") / "vitreous" / kind
