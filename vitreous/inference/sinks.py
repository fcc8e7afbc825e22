"""Files that answers are written to as they come: in order, as good as they are when the job stops, and continued from
there.

    x.jsonl   a line an image           grows in place; a line that was not finished is cut off
    x.csv     a row an image and class  the same, and the last image is done again, since rows of it may be lacking
    x.parquet x.npz x.json              parts of some rows in x.parquet.parts/, joined at the end

Beside the file lies `x.jsonl.job.json`: which model with which options made it, and whether it is finished. Another
model or other options never continue it, and neither do other images: those that were written are compared by name with
those that are to come.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from vitreous.config import Json
from vitreous.errors import UsageError, escape_unprintable
from vitreous.inference.parts import ChunkedOutputFile, CocoOutputFile, NpzOutputFile, ParquetOutputFile
from vitreous.inference.rows import RowFormat, encode_json_line
from vitreous.system.disk import make_write_error, write_text_atomic
from vitreous.system.tables import format_csv

NEW_FILE_HINT = "remove it to begin anew, or name another file with --out"


class OutputFile:
    """One file, what made it, and its rows so far. `made_by`: model and options, as JSON has them.

    Raises UsageError for a suffix that is none of `kind.formats`, for a file that was begun unless `resume`, and for
    one that was begun by another model or with other options; ResourceError where it cannot be written. `finished`:
    there is nothing left to do.
    """

    def __init__(self, path: str, kind: RowFormat, made_by: dict[str, Any], resume: bool = False) -> None:
        suffix = os.path.splitext(path)[1].lower()
        if suffix not in kind.formats:
            raise UsageError(
                f"--out {escape_unprintable(path)}: cannot tell the format", f"end it in {', '.join(kind.formats)}"
            )
        self.path, self.made_by, self.described = path, made_by, Path(f"{path}.job.json")
        before = self.read_description()
        unfinished = before is not None and not before.get("finished")
        if unfinished and not resume:
            hint = f"continue it with --resume, or {NEW_FILE_HINT}"
            raise UsageError(f"{escape_unprintable(path)} was begun and is not finished", hint)
        if resume and before is None and os.path.lexists(path):
            raise UsageError(
                f"{self.described.name} is not there: nobody knows what made {escape_unprintable(path)}", NEW_FILE_HINT
            )
        resume = resume and before is not None
        if resume and before and (other := describe_differences(before.get("made_by", {}), made_by)):
            raise UsageError(f"{escape_unprintable(path)} was begun otherwise: {other}", NEW_FILE_HINT)
        self.finished = resume and not unfinished
        self.rows, self.bad = (int(before["rows"]), int(before["unreadable"])) if before and self.finished else (0, 0)
        try:
            if not self.finished:
                if not resume:
                    remove_output_file(path)
                write_text_atomic(self.described, self.document(False))
                self.sink = SINKS[suffix](path, kind)
        except OSError as error:
            raise make_write_error(path, error) from None

    def read_description(self) -> dict[str, Any] | None:
        """The job file, or None where there is none. Raises UsageError for one that cannot be read."""
        try:
            document: Json = json.loads(self.described.read_text("utf-8"))
            if not isinstance(document, dict) or not {"made_by", "rows", "unreadable", "finished"} <= set(document):
                raise ValueError
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            raise UsageError(f"{escape_unprintable(self.described)} describes no job", NEW_FILE_HINT) from None
        return document

    def document(self, finished: bool) -> str:
        """The description."""
        fields = {"finished": finished, "rows": self.rows, "unreadable": self.bad, "made_by": self.made_by}
        return json.dumps(fields, indent=1) + "\n"

    def remaining(self, items: Iterator[Any]) -> Iterator[Any]:
        """Items without those that were written. Raises UsageError where those were others."""
        for name, failed in () if self.finished else self.sink.written():
            item = next(items, None)
            if item is None or item.name != name:
                position = "the images end before" if item is None else f"now comes {escape_unprintable(item.name)}"
                message = (
                    f"{escape_unprintable(self.path)}, image {self.rows + 1}, is {escape_unprintable(name)}; {position}"
                )
                raise UsageError(message, NEW_FILE_HINT)
            self.rows, self.bad = self.rows + 1, self.bad + failed
        return items

    def add(self, rows: Sequence[Any]) -> None:
        """Write answers. Raises ResourceError."""
        try:
            self.sink.add(rows)
        except OSError as error:
            raise make_write_error(self.path, error) from None
        self.rows += len(rows)
        self.bad += sum(row.error is not None for row in rows)

    def finish(self) -> None:
        """Complete the file on the disk, and record that it is finished. Raises ResourceError."""
        try:
            self.sink.finish()
            write_text_atomic(self.described, self.document(True))
        except OSError as error:
            raise make_write_error(self.path, error) from None

    def close(self) -> None:
        """Keep what was written."""
        if not self.finished:
            self.sink.close()


def describe_differences(before: dict[str, Any], made_by: dict[str, Any]) -> str:
    """The options of which a file was begun with other values, in words; an empty string where there are none."""
    made_by = json.loads(json.dumps(made_by))
    names = (name for name in {**before, **made_by} if before.get(name) != made_by.get(name))
    return ", ".join(f"{name} {before.get(name)}, now {made_by.get(name)}" for name in names)


def remove_output_file(path: str) -> None:
    """Remove a file of answers and its parts."""
    shutil.rmtree(f"{path}.parts", ignore_errors=True)
    Path(path).unlink(missing_ok=True)


class AppendableFile(ABC):
    """A file of answers that grows in place: only whole rows are in it, but for a full disk."""

    def __init__(self, path: str, kind: Any) -> None:
        self.kind = kind
        self.file = open(path, "r+b" if os.path.lexists(path) else "w+b")  # noqa: SIM115

    @abstractmethod
    def written(self) -> Iterator[tuple[str, bool]]:
        """Names of the images written before, in order, and whether each was unreadable. Iterated once, before
        `add`."""

    @abstractmethod
    def add(self, rows: Sequence[Any]) -> None:
        """Write answers behind those."""

    def cut(self, size: int) -> None:
        """Cut the file off behind its first `size` bytes, where writing goes on."""
        self.file.seek(size)
        self.file.truncate()

    def finish(self) -> None:
        """Complete the file on the disk."""
        os.fsync(self.file.fileno())
        self.file.close()

    def close(self) -> None:
        """Keep what was written."""
        self.file.close()


class JsonLinesFile(AppendableFile):
    """JSONL, in place."""

    def written(self) -> Iterator[tuple[str, bool]]:
        """Whole lines; what is behind them is cut off."""
        size = 0
        self.file.seek(0)
        for text in self.file:
            try:
                record = json.loads(text if text.endswith(b"\n") else b"")
                image = record["path"], record["error"] is not None
            except (ValueError, TypeError, KeyError):
                break
            size += len(text)
            yield image
        self.cut(size)

    def add(self, rows: Sequence[Any]) -> None:
        """Write a line for each."""
        self.file.write(b"".join(encode_json_line(self.kind.to_dict(row)) for row in rows))
        self.file.flush()


class CsvFile(AppendableFile):
    """CSV, in place."""

    def written(self) -> Iterator[tuple[str, bool]]:
        """All images but the last one, rows of which may be lacking; it is cut off."""
        image, position, size = None, 0, 0

        def whole_lines() -> Iterator[str]:
            nonlocal position
            for text in self.file:
                if not text.endswith(b"\n"):
                    return
                position += len(text)
                yield text.decode("utf-8", "surrogateescape")

        self.file.seek(0)
        rows, head = csv.reader(whole_lines(), strict=True), list(self.kind.head)
        with suppress(csv.Error):
            if next(rows, None) == head:
                start = size = position
                for row in rows:
                    if len(row) == len(head) and self.kind.starts_image(row):  # the first row of an image
                        if image is not None:
                            yield image
                            size = start
                        image = row[0].removeprefix("'"), bool(row[head.index("error")])
                    start = position
        self.cut(size)
        if not size:
            self.write([head])

    def write(self, rows: Sequence[Sequence[str]]) -> None:
        """Write rows, and pass them to the system."""
        self.file.write(format_csv(rows).encode("utf-8", "surrogateescape"))
        self.file.flush()

    def add(self, rows: Sequence[Any]) -> None:
        """Write the rows of each."""
        self.write([row for answer in rows for row in self.kind.cells(answer)])


SINKS: dict[str, type[AppendableFile | ChunkedOutputFile]] = {
    ".jsonl": JsonLinesFile,
    ".csv": CsvFile,
    ".parquet": ParquetOutputFile,
    ".npz": NpzOutputFile,
    ".json": CocoOutputFile,
}
