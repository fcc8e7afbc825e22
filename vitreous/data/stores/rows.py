"""Random access to the images in Arrow and Parquet tables.

A row of a Parquet file cannot be read without its row group, which often has hundreds of images. The image column is
therefore written once to an Arrow stream, a file that is memory-mapped. pyarrow needs only megabytes of memory for
this, and is imported two seconds faster than the `datasets` library, which can do the same.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitreous.data.decoding.decode import MAX_FILE_BYTES, describe_exception, read_input_file
from vitreous.data.layouts.file_names import resolve_unicode_path
from vitreous.errors import DataError, ResourceError, UsageError, escape_unprintable, install_hint
from vitreous.system.disk import get_cache_folder, open_atomic

if TYPE_CHECKING:
    import pyarrow as pa

STREAM_BATCH_ROWS = 256  # rows per batch of an Arrow stream
FINGERPRINT_SAMPLES = 16  # number of images whose content is part of the fingerprint
PARQUET_BUFFER_BYTES = 2**20  # bytes read from a Parquet file at a time


@dataclass(frozen=True, eq=False)
class ImageColumn:
    """Store of the images in a column of Arrow streams; rows are counted over all streams. A value is the bytes of an
    image file, or a struct {bytes, path}, whose path is relative to `base_folder`. `origin` is the name of the table
    for messages."""

    streams: tuple[str, ...]
    column: str
    origin: str
    base_folder: str

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "chunks"}

    @cached_property
    def chunks(self) -> tuple[list[Any], np.ndarray]:
        """The memory-mapped chunks of the column, and the row at which each chunk ends, (chunks,) int64."""
        chunks = [chunk for stream in self.streams for chunk in map_arrow_stream(stream).column(self.column).chunks]
        return chunks, np.cumsum([len(chunk) for chunk in chunks], dtype=np.int64)

    def read(self, index: int) -> bytes:
        """Return the bytes of the image file in a row. Raises DataError for a row without an image, or with a too large
        one."""
        chunks, row_ends = self.chunks
        chunk_index = int(np.searchsorted(row_ends, index, side="right"))
        value = chunks[chunk_index][index - int(row_ends[chunk_index])].as_py()
        content, path = (value.get("bytes"), value.get("path")) if isinstance(value, dict) else (value, None)
        if content is None and path:
            full_path = os.path.join(self.base_folder, path)
            return read_input_file(resolve_unicode_path(full_path) or full_path)
        if not content or len(content) > MAX_FILE_BYTES:
            raise DataError(
                f"{self.name(index)}: {f'larger than {MAX_FILE_BYTES >> 20} MiB' if content else 'no image'}"
            )
        return content

    def name(self, index: int) -> str:
        """Return the name of an image for messages."""
        return f"{self.origin}, row {index}"

    def update(self, digest: Any, indices: np.ndarray) -> None:
        """Update a hashlib digest with the byte lengths of the images at `indices` (n,), which are known without
        reading them, and with the content of up to FINGERPRINT_SAMPLES images."""
        import pyarrow as pa
        import pyarrow.compute as pc

        chunks, _ = self.chunks
        contents = [pc.struct_field(chunk, "bytes") if pa.types.is_struct(chunk.type) else chunk for chunk in chunks]
        sizes = [np.asarray(pc.fill_null(pc.binary_length(content), -1), dtype=np.int64) for content in contents]
        digest.update(np.concatenate(sizes)[indices].tobytes() if sizes else b"")
        for sample in np.linspace(0, len(indices) - 1, min(FINGERPRINT_SAMPLES, len(indices))).astype(int):
            with suppress(DataError):
                digest.update(self.read(int(indices[sample])))


@dataclass(frozen=True)
class ArrowStreams:
    """Table of a split that is stored as Arrow streams, such as those in the cache of the `datasets` library. Every
    method raises DataError for a damaged file."""

    files: tuple[Path, ...]

    @property
    def schema(self) -> pa.Schema:
        """Names and types of the columns in the first stream."""
        return map_arrow_stream(self.files[0]).schema

    def chunks(self, column: str) -> Iterator[pa.Array]:
        """Yield the values of a column in chunks."""
        for file in self.files:
            yield from map_arrow_stream(file).column(column).chunks

    def values(self, column: str) -> pa.ChunkedArray:
        """Load a complete column, such as that of the labels, into memory."""
        import pyarrow as pa

        return pa.chunked_array(list(self.chunks(column)), self.schema.field(column).type)

    def find_first_value(self, column: str) -> Any:
        """Return the first non-null value of a column as a Python object; None if there is none."""
        return next((value.as_py() for chunk in self.chunks(column) for value in chunk if value.is_valid), None)

    def streams(self, column: str) -> tuple[str, ...]:
        """Return the paths of Arrow streams that contain the column: the files themselves."""
        return tuple(map(os.fspath, self.files))


class ParquetFiles(ArrowStreams):
    """Table of a split that is stored as Parquet files with the same columns."""

    @property
    def schema(self) -> pa.Schema:
        """Names and types of the columns. Raises DataError if the files differ in them."""
        schemas = []
        for file in self.files:
            with open_parquet_file(file) as parquet:
                schemas.append(parquet.schema_arrow)
            if not schemas[0].equals(schemas[-1]):
                problem = f"{escape_unprintable(file)} differs in columns from {escape_unprintable(self.files[0])}"
                raise DataError(problem, "use only files with the same columns")
        return schemas[0]

    def chunks(self, column: str) -> Iterator[pa.Array]:
        """Yield the values of a column in chunks."""
        for file in self.files:
            with open_parquet_file(file) as parquet:
                for batch in parquet.iter_batches(STREAM_BATCH_ROWS, columns=[column], use_threads=False):
                    yield batch.column(0)

    def streams(self, column: str) -> tuple[str, ...]:
        """Return the paths of Arrow streams that contain the column, which are written to the cache if missing. Raises
        ResourceError if the disk is full."""
        return tuple(os.fspath(cache_parquet_column(file, column)) for file in self.files)


@contextmanager
def open_parquet_file(file: Path) -> Iterator[Any]:
    """Open a `pyarrow.parquet.ParquetFile` with buffered reading.

    Raises DataError for an invalid or damaged Parquet file, also while the block reads it; UsageError without pyarrow.
    """
    require_pyarrow()
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file, buffer_size=PARQUET_BUFFER_BYTES, pre_buffer=False) as parquet:
            yield parquet
    except (pa.ArrowException, OSError) as error:
        problem = f"{escape_unprintable(file)}: cannot be read as Parquet ({describe_exception(error)})"
        raise DataError(problem, "download it again, or remove it") from None


def map_arrow_stream(path: str | Path) -> pa.Table:
    """Memory-map an Arrow stream as a table. Raises DataError for a damaged file."""
    import pyarrow as pa

    try:
        return pa.ipc.open_stream(pa.memory_map(os.fspath(path))).read_all()
    except (pa.ArrowException, OSError) as error:
        problem = f"{escape_unprintable(path)}: cannot be read as an Arrow stream ({describe_exception(error)})"
        raise DataError(problem, "delete it, and it is created again") from None


def cache_parquet_column(file: Path, column: str) -> Path:
    """Write a column of a Parquet file to an Arrow stream in the cache, unless it is cached already. Returns the path
    of the stream.

    A changed file is written again. XDG_CACHE_HOME sets the location of the cache. Raises ResourceError if the disk is
    full.
    """
    import pyarrow as pa

    status = file.stat()
    identity = repr((os.path.abspath(file), status.st_size, status.st_mtime_ns, column))
    digest = hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()
    stream = get_cache_folder("arrow") / f"{digest[:32]}.arrow"
    with open_parquet_file(file) as parquet:
        if stream.is_file():
            with suppress(DataError):
                if map_arrow_stream(stream).num_rows == parquet.metadata.num_rows:
                    return stream
        require_cache_space(stream.parent, file, count_unpacked_bytes(parquet, column))
        schema = pa.schema([parquet.schema_arrow.field(column)])
        with open_atomic(stream, shared=True) as sink, pa.ipc.new_stream(sink, schema) as writer:
            for batch in parquet.iter_batches(STREAM_BATCH_ROWS, columns=[column], use_threads=False):
                writer.write_batch(batch)
    return stream


def count_unpacked_bytes(parquet: Any, column: str) -> int:
    """Return the uncompressed bytes of a column in an open Parquet file."""
    groups = (parquet.metadata.row_group(index) for index in range(parquet.num_row_groups))
    column_chunks = (group.column(index) for group in groups for index in range(group.num_columns))
    return sum(
        column_chunk.total_uncompressed_size
        for column_chunk in column_chunks
        if column_chunk.path_in_schema.split(".")[0] == column
    )


def require_cache_space(folder: Path, file: Path, size: int) -> None:
    """Create the cache folder, and check that it has space for `size` bytes, unpacked from `file`. Raises ResourceError
    if it has not, or is not writable."""
    hint = "free disk space, or set XDG_CACHE_HOME to a folder on a larger disk"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free_bytes = shutil.disk_usage(folder).free
    except OSError as error:
        raise ResourceError(f"{folder} is not writable ({describe_exception(error)})", hint) from None
    if free_bytes < size:
        raise ResourceError(
            f"{escape_unprintable(file)} unpacks to {size:,} bytes, {folder} has {free_bytes:,} free", hint
        )


def require_pyarrow() -> None:
    """Raise UsageError if pyarrow is not installed."""
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        problem = "Parquet files need pyarrow, which is not installed"
        raise UsageError(problem, install_hint("datasets")) from None
