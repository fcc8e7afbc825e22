"""What is kept on the disk: small files that are there whole or not at all, and the folder of what can be made again."""

from __future__ import annotations

import os
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Write a small file so that it is there whole or not at all, also after a crash. Raises OSError."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def cache(kind: str) -> Path:
    """Where things of a kind are kept that can be made or fetched again: in `XDG_CACHE_HOME`, or the user's own."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if os.path.isabs(home) else Path(os.path.expanduser("~")) / ".cache") / "vitreous" / kind
