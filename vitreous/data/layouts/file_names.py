"""Find files by the names in annotations, regardless of Unicode form and parent folder.

Names are compared in Unicode form NFC, since file systems and tools store accents in different forms.
`resolve_unicode_path` finds a file by its full path, `FileIndex` by the end of its path.
"""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from vitreous.errors import DataError, escape_unprintable, format_first_names


def normalise_name(name: str) -> str:
    """Convert a name to Unicode form NFC, in which names are compared."""
    return unicodedata.normalize("NFC", name)


def resolve_unicode_path(path: str | os.PathLike[str]) -> str | None:
    """Return the path of an existing file or folder as the file system spells it: `path` itself, or the only path that
    differs from it in Unicode form alone. Returns None if neither exists."""
    text = os.fspath(path)
    if os.path.lexists(text):
        return text
    head, tail = os.path.split(text)
    folder = head if os.path.isdir(head or ".") else resolve_unicode_path(head) if tail else None
    if folder is None or (tail.isascii() and folder == head):
        return None
    name = index_normalised_names(folder or ".", os.stat(folder or ".").st_mtime_ns).get(normalise_name(tail))
    return os.path.join(folder, name) if name else None


@lru_cache(maxsize=64)
def index_normalised_names(folder: str, modified_ns: int) -> dict[str, str]:
    """Return {name in NFC: name} of the entries of a folder, with "" for ambiguous names. `modified_ns`, the
    modification time of the folder, makes the cache detect changes."""
    names: dict[str, str] = {}
    for name in os.listdir(folder):
        key = normalise_name(name)
        names[key] = "" if key in names else name
    return names


class FileIndex:
    """Index of the files `paths` below the folder `root`, for finding a file by its name or by the end of its path. If
    several files have the name, the file whose path shares the most components with it is found. With
    `ignore_suffixes`, names are compared without suffix."""

    def __init__(self, paths: Iterable[Path], root: Path, ignore_suffixes: bool = False) -> None:
        self.root, self.ignore_suffixes = root, ignore_suffixes
        self.paths: dict[str, list[tuple[tuple[str, ...], Path]]] = {}
        for path in paths:
            parts = self.split_path(os.fspath(path.with_suffix("") if ignore_suffixes else path))
            self.paths.setdefault(parts[-1], []).append((parts, path))
        self.depth = len(self.split_path(os.fspath(root)))

    @staticmethod
    def split_path(name: str) -> tuple[str, ...]:
        """Split a path, with slashes or backslashes, into its components in NFC, without empty components and `.`."""
        return tuple(part for part in normalise_name(name).replace("\\", "/").split("/") if part not in ("", "."))

    def match(self, name: str, origin: str) -> Path | None:
        """Return the file whose path shares the most trailing components with the path `name`; None if no file has its
        file name. Raises DataError, with `origin`, if several files match equally well."""
        name_parts = self.split_path(name)
        candidates = self.paths.get(name_parts[-1], []) if name_parts else []
        shared_counts = [count_shared_end_parts(parts, name_parts) for parts, _ in candidates]
        best = [
            candidate for candidate, count in zip(candidates, shared_counts, strict=True) if count == max(shared_counts)
        ]
        if len(best) > 1:
            best = [candidate for candidate in best if candidate[0][self.depth :] == name_parts] or best
        if len(best) > 1:
            best = [candidate for candidate in best if os.fspath(candidate[1]).endswith(name)] or best
        if len(best) > 1:
            path_list = format_first_names((os.fspath(path) for _, path in best), 3)
            problem = f"{origin}: {escape_unprintable(name)} matches {len(best)} files: {path_list}"
            raise DataError(problem, "use a longer path, or rename the files")
        return best[0][1] if best else None

    def find(self, name: str, origin: str) -> Path:
        """Return the file whose path ends best with `name`, as `match`. Raises DataError, with `origin`, if no file or
        several files match."""
        path = self.match(name, origin)
        if path is None:
            problem = f"{origin}: the image {escape_unprintable(name)} does not exist"
            raise DataError(problem, "restore it, or delete its annotations")
        return path


def count_shared_end_parts(parts: tuple[str, ...], other_parts: tuple[str, ...]) -> int:
    """Return the number of components that two paths share at their ends."""
    pairs = zip(reversed(parts), reversed(other_parts), strict=False)
    return next(
        (count for count, (part, other_part) in enumerate(pairs) if part != other_part),
        min(len(parts), len(other_parts)),
    )
