"""Files that answers are written to as they come: in order, as good as they are when the job stops, and continued from
there.

    x.jsonl   a line an image           grows in place; a line that was not finished is cut off
    x.csv     a row an image and class  the same, and the last image is done again, since rows of it may be lacking
    x.parquet x.npz                     parts of 4096 rows in x.parquet.parts/, joined at the end

Beside the file lies `x.jsonl.job.json`: which model with which options made it, and whether it is finished. Another
model or other options never continue it, and neither do other images: those that were written are compared by name with
those that are to come.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from vitreous.disk import write_error, write_text
from vitreous.errors import UsageError, printable
from vitreous.serving.parts import NpzParts, ParquetParts
from vitreous.serving.rows import HEAD, Kind, cells, line
from vitreous.tables import as_csv

ANEW = "remove it to begin anew, or name another file with --out"


class Sink(Protocol):
    """A file of answers in the making."""

    def names(self) -> Iterator[str]:
        """The images that were written before, in order."""
        ...

    def add(self, rows: Sequence[Any]) -> None:
        """Write answers behind those."""
        ...

    def finish(self) -> int:
        """Have the file whole on the disk; how many images could not be read."""
        ...

    def close(self) -> None:
        """Leave it as it is."""
        ...


class AnswerFile:
    """One file, what made it, and its rows so far. `made_by`: model and options, as JSON has them.

    Raises UsageError for a suffix that is none of `kind.formats`, for a file that was begun unless `resume`, and for
    one that was begun by another model or with other options; ResourceError where it cannot be written. `finished`:
    there is nothing left to do.
    """

    def __init__(self, path: str, kind: Kind, made_by: dict[str, Any], resume: bool = False) -> None:
        suffix = os.path.splitext(path)[1].lower()
        if suffix not in kind.formats:
            raise UsageError(f"--out {printable(path)}: cannot tell the format", f"end it in {', '.join(kind.formats)}")
        self.path, self.made_by, self.described = path, made_by, Path(f"{path}.job.json")
        before = self.read_description()
        unfinished = before is not None and not before.get("finished")
        if unfinished and not resume:
            raise UsageError(
                f"{printable(path)} was begun and is not finished", f"continue it with --resume, or {ANEW}"
            )
        if resume and before is None and os.path.lexists(path):
            raise UsageError(f"{self.described.name} is not there: nobody knows what made {printable(path)}", ANEW)
        resume = resume and before is not None
        if resume and before and (other := differing(before.get("made_by", {}), made_by)):
            raise UsageError(f"{printable(path)} was begun otherwise: {other}", ANEW)
        self.finished = resume and not unfinished
        self.rows, self.bad = (int(before["rows"]), int(before["unreadable"])) if before and self.finished else (0, 0)
        try:
            if not self.finished:
                if not resume:
                    remove_answers(path)
                write_text(self.described, self.document(False))
                self.sink: Sink = SINKS[suffix](path, kind)
        except OSError as error:
            raise write_error(path, error) from None

    def read_description(self) -> dict[str, Any] | None:
        """What lies beside the file; None where there is nothing. Raises UsageError for what is no such description."""
        try:
            document = json.loads(self.described.read_text("utf-8"))
            if not isinstance(document, dict) or not {"made_by", "rows", "unreadable", "finished"} <= set(document):
                raise ValueError
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            raise UsageError(f"{printable(self.described)} describes no job", ANEW) from None
        return document

    def document(self, finished: bool) -> str:
        """The description."""
        fields = {"finished": finished, "rows": self.rows, "unreadable": self.bad, "made_by": self.made_by}
        return json.dumps(fields, indent=1) + "\n"

    def remaining(self, items: Iterator[Any]) -> Iterator[Any]:
        """Items without those that were written. Raises UsageError where those were others."""
        for name in () if self.finished else self.sink.names():
            item = next(items, None)
            if item is None or item.name != name:
                position = "the images end before" if item is None else f"now comes {printable(item.name)}"
                raise UsageError(
                    f"{printable(self.path)}, image {self.rows + 1}, is {printable(name)}; {position}", ANEW
                )
            self.rows += 1
        return items

    def add(self, rows: Sequence[Any]) -> None:
        """Write answers. Raises ResourceError."""
        try:
            self.sink.add(rows)
        except OSError as error:
            raise write_error(self.path, error) from None
        self.rows += len(rows)

    def finish(self) -> None:
        """Have it whole on the disk, and say so beside it. Raises ResourceError."""
        try:
            self.bad = self.sink.finish()
            write_text(self.described, self.document(True))
        except OSError as error:
            raise write_error(self.path, error) from None

    def close(self) -> None:
        """Leave what was written as it is."""
        if not self.finished:
            self.sink.close()


def differing(before: dict[str, Any], made_by: dict[str, Any]) -> str:
    """The options of which a file was begun with other values, in words; an empty string where there are none."""
    made_by = json.loads(json.dumps(made_by))
    names = (name for name in {**before, **made_by} if before.get(name) != made_by.get(name))
    return ", ".join(f"{name} {before.get(name)}, now {made_by.get(name)}" for name in names)


def remove_answers(path: str) -> None:
    """Remove a file of answers and its parts."""
    shutil.rmtree(f"{path}.parts", ignore_errors=True)
    Path(path).unlink(missing_ok=True)


def open_to_append(path: str) -> BinaryIO:
    """A file to read and to write on; a new one where there is none."""
    return open(path, "r+b" if os.path.lexists(path) else "w+b")


class AppendedFile:
    """A file that grows in place: whole rows only are in it, but for a full disk. `bad` counts images that could not be
    read."""

    def __init__(self, path: str, kind: Kind) -> None:
        self.file, self.kind, self.bad = open_to_append(path), kind, 0

    def finish(self) -> int:
        """How many could not be read."""
        os.fsync(self.file.fileno())
        self.file.close()
        return self.bad

    def close(self) -> None:
        """Leave it as it is."""
        self.file.close()


class Lines(AppendedFile):
    """JSONL, in place."""

    def names(self) -> Iterator[str]:
        """Read once, before anything is added; what is no whole line goes."""
        end = 0
        self.file.seek(0)
        for one in self.file:
            try:
                record = json.loads(one if one.endswith(b"\n") else b"")
                name, failed = record["path"], record["error"] is not None
            except (ValueError, TypeError, KeyError):
                break
            end += len(one)
            self.bad += failed
            yield name
        self.file.seek(end)
        self.file.truncate()

    def add(self, rows: Sequence[Any]) -> None:
        """A line for each."""
        self.file.write(b"".join(line(self.kind.plain(row)) for row in rows))
        self.file.flush()
        self.bad += sum(row.error is not None for row in rows)


class Csv(AppendedFile):
    """CSV, in place."""

    def names(self) -> Iterator[str]:
        """Read once, before anything is added; the last image goes, and what is no whole row."""
        self.file.seek(0)
        at = last = before = 0
        name, failed = None, False

        def lines() -> Iterator[str]:
            nonlocal at
            for one in self.file:
                if not one.endswith(b"\n"):
                    return
                at += len(one)
                yield one.decode("utf-8", "surrogateescape")

        rows = csv.reader(lines(), strict=True)
        try:
            if next(rows, None) == HEAD:
                last = at
                for row in rows:
                    if len(row) == len(HEAD) and row[1] in ("", "1"):
                        if name is not None:
                            self.bad += failed
                            yield name
                            last = before
                        name, failed = row[0].removeprefix("'"), bool(row[4])
                    before = at
        except csv.Error:
            pass
        self.file.seek(last)
        self.file.truncate()
        if not last:
            self.write([HEAD])

    def write(self, rows: Sequence[Sequence[str]]) -> None:
        """Rows, on the disk as far as the system goes."""
        self.file.write(as_csv(rows).encode("utf-8", "surrogateescape"))
        self.file.flush()

    def add(self, rows: Sequence[Any]) -> None:
        """The rows of each."""
        self.write([row for one in rows for row in cells(one)])
        self.bad += sum(row.error is not None for row in rows)


SINKS: dict[str, Callable[[str, Kind], Sink]] = {
    ".jsonl": Lines,
    ".csv": Csv,
    ".parquet": ParquetParts,
    ".npz": NpzParts,
}
