"""Rows of Arrow tables as samples, any of them at any time.

A row of Parquet cannot be read without its row group, often hundreds of images. So a column is written once as an Arrow
stream, which is mapped into memory: pyarrow does that in megabytes of memory, and imports two seconds faster than
the `datasets` library, which would do the same.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitreous.data.decoding.decode import MAX_BYTES, read_regular, reason
from vitreous.disk import atomic, cache
from vitreous.errors import DataError, ResourceError, UsageError, printable

if TYPE_CHECKING:
    import pyarrow as pa

ROWS = 256  # of one batch of an Arrow stream
SAMPLED = 16  # images that stand for all where samples are told from others
BUFFER = 2**20  # bytes that are read of a Parquet file at a time


@dataclass(frozen=True, eq=False)
class Rows:
    """Samples in Arrow streams: `column` has the bytes of an image file, or a struct of {bytes, path}.

    `rows`, (n,) int64: row numbers, counted through all streams. `home`: the folder that stored paths start from.
    """

    streams: tuple[str, ...]
    column: str
    labels: np.ndarray
    rows: np.ndarray
    origin: str
    home: str

    def __len__(self) -> int:
        return len(self.rows)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "chunks"}

    @cached_property
    def chunks(self) -> tuple[list[Any], np.ndarray]:
        """The column's chunks, mapped into memory, and the row at which each of them ends, (chunks,) int64."""
        chunks = [chunk for stream in self.streams for chunk in map_stream(stream).column(self.column).chunks]
        return chunks, np.cumsum([len(chunk) for chunk in chunks], dtype=np.int64)

    def raw(self, sample: int) -> bytes:
        """The bytes of an image file. Raises DataError where a row has none."""
        chunks, ends = self.chunks
        row = int(self.rows[sample])
        number = int(np.searchsorted(ends, row, side="right"))
        value = chunks[number][row - int(ends[number])].as_py()
        content, path = (value.get("bytes"), value.get("path")) if isinstance(value, dict) else (value, None)
        if content is None and path:
            return read_regular(os.path.join(self.home, path))
        if not content or len(content) > MAX_BYTES:
            raise DataError(
                f"{self.name(sample)}: " + (f"larger than {MAX_BYTES >> 20} MiB" if content else "no image")
            )
        return content

    def name(self, sample: int) -> str:
        return f"{self.origin}, row {self.rows[sample]}"

    def take(self, rows: np.ndarray, labels: np.ndarray | None = None) -> Rows:
        return replace(self, rows=self.rows[rows], labels=self.labels[rows] if labels is None else labels)

    def update(self, digest: Any) -> None:
        """Feed the length of every image, which is known without reading it, and the content of a few."""
        import pyarrow as pa
        import pyarrow.compute as pc

        chunks, _ = self.chunks
        contents = [pc.struct_field(chunk, "bytes") if pa.types.is_struct(chunk.type) else chunk for chunk in chunks]
        sizes = [np.asarray(pc.fill_null(pc.binary_length(content), -1), dtype=np.int64) for content in contents]
        digest.update(np.concatenate(sizes)[self.rows].tobytes() if sizes else b"")
        for sample in np.linspace(0, len(self) - 1, min(SAMPLED, len(self))).astype(int):
            with suppress(DataError):
                digest.update(self.raw(int(sample)))


@dataclass(frozen=True)
class Streams:
    """The rows of one split as Arrow streams, which the `datasets` library keeps."""

    files: tuple[str, ...]

    @property
    def schema(self) -> pa.Schema:
        """Names and types of the columns, as the first stream has them. Raises DataError."""
        return map_stream(self.files[0]).schema

    def values(self, column: str) -> pa.ChunkedArray:
        """A whole column. Raises DataError."""
        import pyarrow as pa

        chunks = [chunk for file in self.files for chunk in map_stream(file).column(column).chunks]
        return pa.chunked_array(chunks, self.schema.field(column).type)

    def first(self, column: str) -> Any:
        """The first value of a column that is not null, as a Python object; None where there is none."""
        return next((value.as_py() for value in self.values(column) if value.is_valid), None)

    def streams(self, column: str) -> tuple[str, ...]:
        """Arrow streams that have the column: the files themselves."""
        return self.files


@dataclass(frozen=True)
class Parquet:
    """The rows of one split as Parquet files of the same columns. Every method raises DataError for a damaged file."""

    files: tuple[Path, ...]

    @property
    def schema(self) -> pa.Schema:
        """Names and types of the columns. Raises DataError for files that differ in them."""
        schemas = []
        for file in self.files:
            with open_parquet(file) as parquet:
                schemas.append(parquet.schema_arrow)
            if not schemas[0].equals(schemas[-1]):
                raise DataError(
                    f"{printable(file)} has other columns than {printable(self.files[0])}",
                    "keep files of the same columns together",
                )
        return schemas[0]

    def values(self, column: str) -> pa.ChunkedArray:
        """A whole column, for those that are small."""
        import pyarrow as pa

        chunks: list[Any] = []
        for file in self.files:
            with open_parquet(file) as parquet:
                chunks += parquet.read(columns=[column]).column(column).chunks
        return pa.chunked_array(chunks, self.schema.field(column).type)

    def first(self, column: str) -> Any:
        """The first value of a column that is not null, as a Python object; None where there is none."""
        for file in self.files:
            with open_parquet(file) as parquet:
                for batch in parquet.iter_batches(16, columns=[column]):
                    for value in batch.column(0):
                        if value.is_valid:
                            return value.as_py()
        return None

    def streams(self, column: str) -> tuple[str, ...]:
        """Arrow streams that have the column, written into the cache where missing. Raises ResourceError."""
        return tuple(os.fspath(unpack_column(file, column)) for file in self.files)


Table = Streams | Parquet


@contextmanager
def open_parquet(file: Path) -> Iterator[Any]:
    """A `pyarrow.parquet.ParquetFile`, read a buffer at a time.

    Raises DataError for a file that is no Parquet or damaged, also while the block reads it; UsageError without
    pyarrow.
    """
    require_pyarrow()
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file, buffer_size=BUFFER, pre_buffer=False) as parquet:
            yield parquet
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{printable(file)}: cannot be read as Parquet ({reason(error)})", "fetch it again, or leave it out"
        ) from None


def map_stream(stream: str) -> pa.Table:
    """An Arrow stream as a table whose contents are mapped into memory. Raises DataError for a damaged one."""
    import pyarrow as pa

    try:
        return pa.ipc.open_stream(pa.memory_map(stream)).read_all()
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{printable(stream)}: cannot be read as an Arrow stream ({reason(error)})",
            "remove it, and it is made again",
        ) from None


def unpack_column(file: Path, column: str) -> Path:
    """One column of a Parquet file as an Arrow stream in the cache, made anew when the file changes.

    Raises ResourceError where the disk has no room for it; XDG_CACHE_HOME says on which it is.
    """
    import pyarrow as pa

    status = file.stat()
    identity = repr((os.path.abspath(file), status.st_size, status.st_mtime_ns, column))
    digest = hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()
    stream = cache("arrow") / f"{digest[:32]}.arrow"
    with open_parquet(file) as parquet:
        if stream.is_file():
            with suppress(DataError):
                if map_stream(os.fspath(stream)).num_rows == parquet.metadata.num_rows:
                    return stream
        with ExitStack() as stack:
            sink = stack.enter_context(open_sink(stream, file, unpacked_bytes(parquet, column)))
            schema = pa.schema([parquet.schema_arrow.field(column)])
            writer = stack.enter_context(pa.ipc.new_stream(sink, schema))
            for batch in parquet.iter_batches(ROWS, columns=[column], use_threads=False):
                writer.write_batch(batch)
    return stream


def unpacked_bytes(parquet: Any, column: str) -> int:
    """The bytes that a column of an open Parquet file takes uncompressed."""
    groups = (parquet.metadata.row_group(number) for number in range(parquet.num_row_groups))
    parts = (group.column(number) for group in groups for number in range(group.num_columns))
    return sum(part.total_uncompressed_size for part in parts if part.path_in_schema.split(".")[0] == column)


def open_sink(stream: Path, file: Path, size: int) -> AbstractContextManager[Any]:
    """A file of the cache to write `size` bytes of `file` to. Raises ResourceError where that cannot be."""
    hint = "make room, or set XDG_CACHE_HOME to a folder on a larger disk"
    try:
        stream.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(stream.parent).free
    except OSError as error:
        raise ResourceError(f"nothing can be stored in {stream.parent} ({reason(error)})", hint) from None
    if free < size:
        raise ResourceError(f"{printable(file)} unpacks to {size:,} bytes, {stream.parent} has room for {free:,}", hint)
    return atomic(stream, shared=True)


def require_pyarrow() -> None:
    """Raise UsageError where pyarrow is not installed."""
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise UsageError(
            "Parquet files need pyarrow, which is not installed", "pip install 'vitreous[datasets]'"
        ) from None
