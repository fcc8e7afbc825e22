"""Rows of Arrow tables as samples: Parquet files unpacked once, and what the `datasets` library keeps.

Parquet gives no single row: a shuffled epoch would unpack a row group, often hundreds of images, for each. So its
images are written once as an Arrow stream that is mapped into memory. pyarrow does that alone, in a memory of megabytes
whatever the size of the row groups; the `datasets` library would do the same after two seconds of imports, and is asked
only for what the Hub has.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

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
    """Rows of Arrow streams: `column` has the bytes of an image file, or a struct {bytes, path} of which one is there.

    `rows`, (n,) int64: which of all rows of the streams, counted through. `home`: the folder that stored paths start
    from.
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
        """The column in pieces, mapped into memory, and the row at which each of them ends, (pieces,) int64."""
        pieces = [piece for stream in self.streams for piece in mapped(stream).column(self.column).chunks]
        return pieces, np.cumsum([len(piece) for piece in pieces], dtype=np.int64)

    def raw(self, sample: int) -> bytes:
        """The bytes of an image file. Raises DataError where a row has none."""
        pieces, ends = self.chunks
        row = int(self.rows[sample])
        piece = int(np.searchsorted(ends, row, side="right"))
        value = pieces[piece][row - int(ends[piece])].as_py()
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
        """How many bytes each image has, which can be known of all without reading them, and a few images."""
        import pyarrow as pa
        import pyarrow.compute as pc

        pieces, _ = self.chunks
        contents = [pc.struct_field(piece, "bytes") if pa.types.is_struct(piece.type) else piece for piece in pieces]
        sizes = [np.asarray(pc.fill_null(pc.binary_length(content), -1), dtype=np.int64) for content in contents]
        digest.update(np.concatenate(sizes)[self.rows].tobytes() if sizes else b"")
        for sample in np.linspace(0, len(self) - 1, min(SAMPLED, len(self))).astype(int):
            with suppress(DataError):
                digest.update(self.raw(int(sample)))


class Table(Protocol):
    """The rows of one split, as they are stored."""

    @property
    def schema(self) -> pa.Schema:
        """Names and types of the columns."""
        ...

    def values(self, column: str) -> pa.ChunkedArray:
        """A whole column, for those that are small."""
        ...

    def first(self, column: str) -> Any:
        """The first value of a column that is not null, as a Python object; None where there is none."""
        ...

    def streams(self, column: str) -> tuple[str, ...]:
        """Arrow streams that have the column's values, in order."""
        ...


@dataclass(frozen=True)
class Streams:
    """Arrow streams, as the `datasets` library keeps them."""

    files: tuple[str, ...]

    @property
    def schema(self) -> pa.Schema:
        """As the first stream has it."""
        return mapped(self.files[0]).schema

    def values(self, column: str) -> pa.ChunkedArray:
        """A whole column."""
        import pyarrow as pa

        return pa.chunked_array(
            [piece for file in self.files for piece in mapped(file).column(column).chunks],
            self.schema.field(column).type,
        )

    def first(self, column: str) -> Any:
        """The first value that is not null."""
        return next((value.as_py() for value in self.values(column) if value.is_valid), None)

    def streams(self, column: str) -> tuple[str, ...]:
        """The files themselves."""
        return self.files


@dataclass(frozen=True)
class Parquet:
    """Parquet files of the same columns."""

    files: tuple[Path, ...]

    @property
    def schema(self) -> pa.Schema:
        """Names and types of the columns. Raises DataError for what is no Parquet file, and for files that differ in
        them."""
        found = None
        for file in self.files:
            with opened(file) as parquet:
                schema = parquet.schema_arrow
            if found is not None and not found.equals(schema):
                raise DataError(
                    f"{printable(file)} has other columns than {printable(self.files[0])}",
                    "keep files of the same columns together",
                )
            found = schema if found is None else found
        assert found is not None
        return found

    def values(self, column: str) -> pa.ChunkedArray:
        """A whole column."""
        import pyarrow as pa

        pieces: list[Any] = []
        for file in self.files:
            with opened(file) as parquet:
                pieces += parquet.read(columns=[column]).column(column).chunks
        return pa.chunked_array(pieces, self.schema.field(column).type)

    def first(self, column: str) -> Any:
        """The first value that is not null."""
        for file in self.files:
            with opened(file) as parquet:
                for batch in parquet.iter_batches(16, columns=[column]):
                    for value in batch.column(0):
                        if value.is_valid:
                            return value.as_py()
        return None

    def streams(self, column: str) -> tuple[str, ...]:
        """The column of every file as an Arrow stream, written where there is none. Raises DataError, ResourceError."""
        return tuple(os.fspath(unpacked(file, column)) for file in self.files)


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """A Parquet file, read a buffer at a time. Raises DataError for what is none, also where that shows only on
    reading."""
    arrow()
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file, buffer_size=BUFFER, pre_buffer=False) as parquet:
            yield parquet
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{printable(file)}: cannot be read as Parquet ({reason(error)})", "fetch it again, or leave it out"
        ) from None


def mapped(stream: str) -> pa.Table:
    """An Arrow stream as a table whose contents are mapped into memory. Raises DataError for what is none."""
    import pyarrow as pa

    try:
        return pa.ipc.open_stream(pa.memory_map(stream)).read_all()
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{printable(stream)}: cannot be read as an Arrow stream ({reason(error)})",
            "remove it, and it is made again",
        ) from None


def unpacked(file: Path, column: str) -> Path:
    """One column of a Parquet file as an Arrow stream in the cache, kept for as long as the file stays as it is.

    Raises ResourceError where the disk has no room for it; XDG_CACHE_HOME says on which it is.
    """
    import pyarrow as pa

    found = file.stat()
    words = repr((os.path.abspath(file), found.st_size, found.st_mtime_ns, column)).encode("utf-8", "surrogateescape")
    place = cache("arrow") / f"{hashlib.sha256(words).hexdigest()[:32]}.arrow"
    with opened(file) as parquet:
        if place.is_file():
            with suppress(DataError):
                if mapped(os.fspath(place)).num_rows == parquet.metadata.num_rows:
                    return place
        groups = [parquet.metadata.row_group(group) for group in range(parquet.num_row_groups)]
        parts = [group.column(part) for group in groups for part in range(group.num_columns)]
        need = sum(part.total_uncompressed_size for part in parts if part.path_in_schema.split(".")[0] == column)
        way = "make room, or set XDG_CACHE_HOME to a folder on a larger disk"
        with ExitStack() as stack:
            try:
                place.parent.mkdir(parents=True, exist_ok=True)
                if (free := shutil.disk_usage(place.parent).free) < need:
                    raise ResourceError(
                        f"{printable(file)} unpacks to {need:,} bytes, {place.parent} has room for {free:,}", way
                    )
                sink = stack.enter_context(atomic(place, shared=True))
            except OSError as error:
                raise ResourceError(f"nothing can be stored in {place.parent} ({reason(error)})", way) from None
            schema = pa.schema([parquet.schema_arrow.field(column)])
            writer = stack.enter_context(pa.ipc.new_stream(sink, schema))
            for batch in parquet.iter_batches(ROWS, columns=[column], use_threads=False):
                writer.write_batch(batch)
    return place


def arrow() -> None:
    """Raise UsageError where pyarrow is not installed."""
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise UsageError(
            "Parquet files need pyarrow, which is not installed", "pip install 'vitreous[datasets]'"
        ) from None
