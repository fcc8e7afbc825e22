"""Output files of predictions, written incrementally in order: valid if the job stops, and resumable.

    x.jsonl   one line per image          appended; an incomplete line is removed
    x.csv     one row per image and class appended; the last image is repeated, since its rows may be incomplete
    x.parquet x.npz x.json                chunk files in x.parquet.parts/, joined at the end

The job file `x.jsonl.job.json` next to the file records model, options, and whether it is finished. A job with another
model, other options or other images cannot resume the file: the names of the written images are compared with the
job's.
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

NEW_FILE_HINT = "remove the file to start again, or set another one with --out"


class OutputFile:
    """An output file of predictions, its job file, and the number of rows so far.

    `made_by`: model and options as JSON values, which the job file records. `is_finished`: the file is complete. Raises
    UsageError for a suffix that is not in `row_format.formats`, for an unfinished file unless `resume`, and for a file
    of another model or other options; ResourceError if it cannot be written.
    """

    def __init__(self, path: str, row_format: RowFormat, made_by: dict[str, Any], resume: bool = False) -> None:
        suffix = os.path.splitext(path)[1].lower()
        if suffix not in row_format.formats:
            raise UsageError(
                f"--out {escape_unprintable(path)}: unknown format",
                f"use a file name that ends in {' or '.join(row_format.formats)}",
            )
        self.path, self.made_by, self.described = path, made_by, Path(f"{path}.job.json")
        previous = self.read_description()
        unfinished = previous is not None and not previous.get("finished")
        if unfinished and not resume:
            hint = f"continue it with --resume, or {NEW_FILE_HINT}"
            raise UsageError(f"{escape_unprintable(path)} is not finished", hint)
        if resume and previous is None and os.path.lexists(path):
            raise UsageError(
                f"{self.described.name} is missing: {escape_unprintable(path)} has unknown settings", NEW_FILE_HINT
            )
        resume = resume and previous is not None
        if resume and previous and (differences := describe_differences(previous.get("settings", {}), made_by)):
            raise UsageError(f"{escape_unprintable(path)} has other settings: {differences}", NEW_FILE_HINT)
        self.is_finished = resume and not unfinished
        self.num_rows, self.num_unreadable = (
            (int(previous["rows"]), int(previous["unreadable"])) if previous and self.is_finished else (0, 0)
        )
        try:
            if not self.is_finished:
                if not resume:
                    remove_output_file(path)
                write_text_atomic(self.described, self.format_description(False))
                self.sink = SINKS[suffix](path, row_format)
        except OSError as error:
            raise make_write_error(path, error) from None

    def read_description(self) -> dict[str, Any] | None:
        """Read the job file; None if it does not exist. Raises UsageError for an invalid one."""
        try:
            document: Json = json.loads(self.described.read_text("utf-8"))
            if not isinstance(document, dict) or not {"settings", "rows", "unreadable", "finished"} <= set(document):
                raise ValueError
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            raise UsageError(f"{escape_unprintable(self.described)} is not a job file", NEW_FILE_HINT) from None
        return document

    def format_description(self, finished: bool) -> str:
        """Build the content of the job file."""
        fields = {
            "finished": finished,
            "rows": self.num_rows,
            "unreadable": self.num_unreadable,
            "settings": self.made_by,
        }
        return json.dumps(fields, indent=1) + "\n"

    def remaining(self, items: Iterator[Any]) -> Iterator[Any]:
        """Skip the items that are written already, and return the others. Raises UsageError if the written ones are
        other images."""
        for name, failed in () if self.is_finished else self.sink.read_written():
            item = next(items, None)
            if item is None or item.name != name:
                job_image = "has no more images" if item is None else f"has {escape_unprintable(item.name)}"
                message = (
                    f"image {self.num_rows + 1} in {escape_unprintable(self.path)} is {escape_unprintable(name)}, "
                    f"but this job {job_image}"
                )
                raise UsageError(message, NEW_FILE_HINT)
            self.num_rows, self.num_unreadable = self.num_rows + 1, self.num_unreadable + failed
        return items

    def add(self, predictions: Sequence[Any]) -> None:
        """Write predictions to the file. Raises ResourceError if it cannot be written."""
        try:
            self.sink.add(predictions)
        except OSError as error:
            raise make_write_error(self.path, error) from None
        self.num_rows += len(predictions)
        self.num_unreadable += sum(prediction.error is not None for prediction in predictions)

    def finish(self) -> None:
        """Complete the file on the disk, and record in the job file that it is finished. Raises ResourceError."""
        try:
            self.sink.finish()
            write_text_atomic(self.described, self.format_description(True))
        except OSError as error:
            raise make_write_error(self.path, error) from None

    def close(self) -> None:
        """Close an unfinished file; its rows are kept, so that another job can resume it."""
        if not self.is_finished:
            self.sink.close()


def describe_differences(previous: dict[str, Any], made_by: dict[str, Any]) -> str:
    """Describe the settings that differ between an unfinished file and this job; "" if there are none."""
    made_by = json.loads(json.dumps(made_by))
    names = (name for name in {**previous, **made_by} if previous.get(name) != made_by.get(name))
    return ", ".join(f"{name} {previous.get(name)}, now {made_by.get(name)}" for name in names)


def remove_output_file(path: str) -> None:
    """Remove an output file and its chunk files, if they exist."""
    shutil.rmtree(f"{path}.parts", ignore_errors=True)
    Path(path).unlink(missing_ok=True)


class AppendableFile(ABC):
    """An output file that rows are appended to. It only contains complete rows, unless the disk is full."""

    def __init__(self, path: str, row_format: Any) -> None:
        self.row_format = row_format
        self.file = open(path, "r+b" if os.path.lexists(path) else "w+b")  # noqa: SIM115

    @abstractmethod
    def read_written(self) -> Iterator[tuple[str, bool]]:
        """Yield the names of the images that are already in the file, in order, and whether each was unreadable.
        Incomplete rows are removed. Must be iterated once, before `add`."""

    @abstractmethod
    def add(self, predictions: Sequence[Any]) -> None:
        """Append the rows of predictions."""

    def truncate(self, size: int) -> None:
        """Truncate the file to its first `size` bytes, and continue writing there."""
        self.file.seek(size)
        self.file.truncate()

    def finish(self) -> None:
        """Flush the file to the disk and close it."""
        os.fsync(self.file.fileno())
        self.file.close()

    def close(self) -> None:
        """Close the file; its rows are kept."""
        self.file.close()


class JsonLinesFile(AppendableFile):
    """A JSONL file that rows are appended to."""

    def read_written(self) -> Iterator[tuple[str, bool]]:
        """Yield the image name of every complete line, and whether the image was unreadable; remove an incomplete last
        line."""
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
        self.truncate(size)

    def add(self, predictions: Sequence[Any]) -> None:
        """Append one line per prediction."""
        self.file.write(b"".join(encode_json_line(self.row_format.to_dict(prediction)) for prediction in predictions))
        self.file.flush()


class CsvFile(AppendableFile):
    """A CSV file that rows are appended to."""

    def read_written(self) -> Iterator[tuple[str, bool]]:
        """Yield the image names in the file except the last one, and whether each was unreadable; remove the rows of
        the last image, which may be incomplete."""
        image, position, size = None, 0, 0

        def read_complete_lines() -> Iterator[str]:
            """Yield the lines of the file that end in a newline."""
            nonlocal position
            for text in self.file:
                if not text.endswith(b"\n"):
                    return
                position += len(text)
                yield text.decode("utf-8", "surrogateescape")

        self.file.seek(0)
        rows, head = csv.reader(read_complete_lines(), strict=True), list(self.row_format.csv_columns)
        with suppress(csv.Error):
            if next(rows, None) == head:
                start = size = position
                for row in rows:
                    if len(row) == len(head) and self.row_format.starts_image(row):  # the first row of an image
                        if image is not None:
                            yield image
                            size = start
                        image = row[0].removeprefix("'"), bool(row[head.index("error")])
                    start = position
        self.truncate(size)
        if not size:
            self.write([head])

    def write(self, rows: Sequence[Sequence[str]]) -> None:
        """Write CSV rows, and flush them to the operating system."""
        self.file.write(format_csv(rows).encode("utf-8", "surrogateescape"))
        self.file.flush()

    def add(self, predictions: Sequence[Any]) -> None:
        """Append the rows of predictions: one or several per image."""
        self.write([row for prediction in predictions for row in self.row_format.to_csv_rows(prediction)])


SINKS: dict[str, type[AppendableFile | ChunkedOutputFile]] = {
    ".jsonl": JsonLinesFile,
    ".csv": CsvFile,
    ".parquet": ParquetOutputFile,
    ".npz": NpzOutputFile,
    ".json": CocoOutputFile,
}
