"""What is kept on the disk: small files that are there whole or not at all, and the folder of what can be made
again."""

from __future__ import annotations

import os
from pathlib import Path

from vitreous.errors import ResourceError, printable


def write_text(path: Path, text: str, errors: str = "strict") -> None:
    """Write a small file in UTF-8 so that it is there whole or not at all, also after a crash. Raises OSError."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "w", encoding="utf-8", errors=errors, newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def put(path: str | os.PathLike[str], text: str) -> None:
    """The same for a file that a user named; bytes of names that are no UTF-8 stay what they are. Raises
    ResourceError."""
    try:
        write_text(Path(path), text, "surrogateescape")
    except OSError as error:
        raise cannot(path, error) from None


def cannot(path: str | os.PathLike[str], error: OSError) -> ResourceError:
    """The refusal of a file that cannot be written."""
    return ResourceError(
        f"cannot write {printable(path)}: {error.strerror or error}", "make room, or choose another file"
    )


def encodes(text: str) -> bool:
    """Whether a text can be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def cache(kind: str) -> Path:
    """Where things of a kind are kept that can be made or fetched again: in `XDG_CACHE_HOME`, or the user's own."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if os.path.isabs(home) else Path(os.path.expanduser("~")) / ".cache") / "vitreous" / kind
