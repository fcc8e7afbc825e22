"""Find files by the names in annotations, regardless of Unicode form and parent folder.

Names are compared in Unicode form NFC, since file systems and tools store accents in different forms.
`resolve_unicode_path` resolves a path, `FileIndex` the end of a path.
"""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from vitreous.errors import DataError, escape_unprintable, format_first_names


def normalise_name(name: str) -> str:
    """Return a name in Unicode form NFC, in which names are compared."""
    return unicodedata.normalize("NFC", name)


def resolve_unicode_path(path: str | os.PathLike[str]) -> str | None:
    """Return a path that exists, spelled as in the file system: the path itself, or the only one that differs in
    Unicode form alone; None if there is none."""
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
def index_normalised_names(folder: str, changed: int) -> dict[str, str]:
    """Return {name in NFC: name} of a folder, without ambiguous names; `changed` is the folder's modification time."""
    names: dict[str, str] = {}
    for name in os.listdir(folder):
        key = normalise_name(name)
        names[key] = "" if key in names else name
    return names


class FileIndex:
    """Index of the files of a folder by the longest unique end of their paths. With `ignore_suffixes`, files are looked
    up without suffix."""

    def __init__(self, paths: Iterable[Path], home: Path, stems: bool = False) -> None:
        self.root, self.ignore_suffixes = home, stems
        self.paths: dict[str, list[tuple[tuple[str, ...], Path]]] = {}
        for path in paths:
            parts = self.split_path(os.fspath(path.with_suffix("") if stems else path))
            self.paths.setdefault(parts[-1], []).append((parts, path))
        self.depth = len(self.split_path(os.fspath(home)))

    @staticmethod
    def split_path(name: str) -> tuple[str, ...]:
        """Return the components of a path of any system, in NFC."""
        return tuple(part for part in normalise_name(name).replace("\\", "/").split("/") if part not in ("", "."))

    def match(self, name: str, origin: str) -> Path | None:
        """Return the file of this name; None if there is none. Raises DataError, with `origin`, if several files
        match."""
        name_parts = self.split_path(name)
        candidates = self.paths.get(name_parts[-1], []) if name_parts else []
        lengths = [count_shared_end_parts(parts, name_parts) for parts, _ in candidates]
        best = [candidate for candidate, length in zip(candidates, lengths, strict=True) if length == max(lengths)]
        if len(best) > 1:
            best = [candidate for candidate in best if candidate[0][self.depth :] == name_parts] or best
        if len(best) > 1:
            best = [candidate for candidate in best if os.fspath(candidate[1]).endswith(name)] or best
        if len(best) > 1:
            listed = format_first_names((os.fspath(path) for _, path in best), 3)
            problem = f"{origin}: {escape_unprintable(name)} matches {len(best)} files: {listed}"
            raise DataError(problem, "use a longer path, or rename the files")
        return best[0][1] if best else None

    def find(self, name: str, origin: str) -> Path:
        """Return the file of this name. Raises DataError, with `origin`, unless exactly one file matches."""
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
