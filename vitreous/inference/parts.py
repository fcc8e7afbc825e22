"""Output files that cannot be appended to: rows are written to chunk files in a folder next to the file, and joined at
the end."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitreous.data.stores.rows import require_pyarrow
from vitreous.inference.rows import embedding_arrays, encode_json_line
from vitreous.system.disk import atomic_path


class ChunkedOutputFile(ABC):
    """Predictions in chunk files of `rows_per_chunk` rows each, in the folder `PATH.parts`, and joined to one file at
    the end."""

    suffix = ""

    def __init__(self, path: str, row_format: Any) -> None:
        self.path, self.row_format, self.chunk_folder = path, row_format, Path(f"{path}.parts")
        self.chunk_folder.mkdir(parents=True, exist_ok=True)
        self.buffered_rows: list[Any] = []

    def list_chunk_files(self) -> list[Path]:
        """List the existing chunk files in order."""
        return sorted(self.chunk_folder.glob(f"[0-9]*{self.suffix}"))

    def read_written(self) -> Iterator[tuple[str, bool]]:
        """Yield the image names in all chunk files, in order, and whether each image was unreadable."""
        for chunk_path in self.list_chunk_files():
            yield from self.read(chunk_path)

    def add(self, predictions: Sequence[Any]) -> None:
        """Buffer rows, and write a chunk file whenever they fill one."""
        self.buffered_rows += predictions
        while len(self.buffered_rows) >= self.row_format.rows_per_chunk:
            self.write_chunk(self.buffered_rows[: self.row_format.rows_per_chunk])
            del self.buffered_rows[: self.row_format.rows_per_chunk]

    def write_chunk(self, predictions: Sequence[Any]) -> None:
        """Write the next chunk file atomically."""
        with atomic_path(self.chunk_folder / f"{len(self.list_chunk_files()):06}{self.suffix}") as temporary:
            self.write(temporary, predictions)

    def finish(self) -> None:
        """Join the chunk files to the final file, and remove them."""
        self.close()
        with atomic_path(self.path) as temporary:
            self.join(temporary, self.list_chunk_files())
        shutil.rmtree(self.chunk_folder)

    def close(self) -> None:
        """Write the buffered rows as a smaller chunk file. There is at least one chunk file, which may have no rows."""
        if self.chunk_folder.exists() and (self.buffered_rows or not self.list_chunk_files()):
            self.write_chunk(self.buffered_rows)
            self.buffered_rows = []

    @abstractmethod
    def read(self, chunk_path: Path) -> Iterator[tuple[str, bool]]:
        """Yield the image names in a chunk file, in order, and whether each image was unreadable."""

    @abstractmethod
    def write(self, path: Path, predictions: Sequence[Any]) -> None:
        """Write rows as a chunk file."""

    @abstractmethod
    def join(self, path: Path, chunk_paths: list[Path]) -> None:
        """Join all chunk files into the file `path`."""


class ParquetOutputFile(ChunkedOutputFile):
    """A Parquet file with one row group per chunk."""

    suffix = ".parquet"

    def __init__(self, path: str, row_format: Any) -> None:
        require_pyarrow()
        super().__init__(path, row_format)

    def read(self, chunk_path: Path) -> Iterator[tuple[str, bool]]:
        """Yield the image names in a chunk file, in order, and whether each image was unreadable."""
        import pyarrow.parquet as pq

        for record in pq.read_table(chunk_path, columns=["path", "path_bytes", "error"]).to_pylist():
            name = record["path"] if record["path_bytes"] is None else os.fsdecode(record["path_bytes"])
            yield name, record["error"] is not None

    def write(self, path: Path, predictions: Sequence[Any]) -> None:
        """Write rows as a Parquet file with one row group."""
        import pyarrow.parquet as pq

        pq.write_table(self.row_format.to_arrow_table(predictions), path)

    def join(self, path: Path, chunk_paths: list[Path]) -> None:
        """Join all chunk files into one file, one chunk at a time."""
        import pyarrow.parquet as pq

        with pq.ParquetWriter(path, pq.read_schema(chunk_paths[0])) as writer:
            for chunk_path in chunk_paths:
                writer.write_table(pq.read_table(chunk_path))


class NpzOutputFile(ChunkedOutputFile):
    """An npz file with the arrays `embeddings`, `paths` and `errors`, without pickles."""

    suffix = ".npz"

    def read(self, chunk_path: Path) -> Iterator[tuple[str, bool]]:
        """Yield the image names in a chunk file, in order, and whether each image was unreadable."""
        names, failed = load_npz_array(chunk_path, "paths"), load_npz_array(chunk_path, "errors") != ""
        yield from zip(names.tolist(), failed.tolist(), strict=True)

    def write(self, path: Path, predictions: Sequence[Any]) -> None:
        """Write a chunk of predictions to an npz file: their embeddings, paths and errors."""
        with open(path, "wb") as file:
            arrays: dict[str, Any] = embedding_arrays(predictions)
            np.savez(file, **arrays)

    def join(self, path: Path, chunk_paths: list[Path]) -> None:
        """Join all chunk files into one file, one array and one chunk at a time."""
        with zipfile.ZipFile(path, "w", allowZip64=True) as archive:
            for name in ("embeddings", "paths", "errors"):
                array_specs = [
                    (array.shape, array.dtype)
                    for array in (load_npz_array(chunk_path, name) for chunk_path in chunk_paths)
                ]
                trailing_shape = tuple(
                    max(sizes) for sizes in zip(*(shape[1:] for shape, _ in array_specs), strict=True)
                )
                shape = (sum(shape[0] for shape, _ in array_specs), *trailing_shape)
                dtype = np.result_type(*(dtype for _, dtype in array_specs))
                with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                    npy_header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
                    np.lib.format.write_array_header_1_0(file, npy_header)
                    for chunk_path in chunk_paths:
                        array = load_npz_array(chunk_path, name)
                        if array.shape[1:] != trailing_shape:  # a chunk without any readable image
                            array = np.full((len(array), *trailing_shape), np.nan, dtype)
                        file.write(array.astype(dtype, copy=False).tobytes())


def load_npz_array(chunk_path: Path, name: str) -> np.ndarray:
    """Load one array of an npz chunk file, (n, ...) for n rows."""
    with np.load(chunk_path, allow_pickle=False) as archive:
        return archive[name]


class CocoOutputFile(ChunkedOutputFile):
    """COCO results as one JSON list. If images are numbered, `NAME.images.json` has the ids of images and classes, as a
    COCO file without annotations."""

    suffix = ".jsonl"

    def read(self, chunk_path: Path) -> Iterator[tuple[str, bool]]:
        """Yield the image names in a chunk file, in order, and whether each image was unreadable."""
        for record in read_jsonl_records([chunk_path]):
            yield record["path"], record["error"] is not None

    def write(self, path: Path, predictions: Sequence[Any]) -> None:
        """Write rows as JSONL, one line per image."""
        path.write_bytes(b"".join(encode_json_line(self.row_format.to_dict(prediction)) for prediction in predictions))

    def join(self, path: Path, chunk_paths: list[Path]) -> None:
        """Join the results of all chunk files to one JSON list, one image at a time; images without ids are numbered
        from 1."""
        images = Path(self.path).with_suffix(".images.json")
        with open(path, "wb") as file, atomic_path(images) as temporary, open(temporary, "wb") as images_file:
            file.write(b"[")
            images_file.write(b'{"images":[')
            result_separator, image_separator = b"\n", b"\n"
            for index, record in enumerate(read_jsonl_records(chunk_paths), 1):
                image_id = index if record["id"] is None else record["id"]
                for result in record["results"]:
                    file.write(result_separator + encode_json_line({"image_id": image_id, **result}).rstrip())
                    result_separator = b",\n"
                if record["error"] is None:
                    image = {"id": image_id, "file_name": record["file_name"]} | record["size"]
                    images_file.write(image_separator + encode_json_line(image).rstrip())
                    image_separator = b",\n"
            file.write(b"\n]\n")
            images_file.write(
                b'\n],"annotations":[],"categories":' + json.dumps(self.row_format.categories).encode() + b"}\n"
            )


def read_jsonl_records(chunk_paths: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """Yield the records of JSONL chunk files, one at a time."""
    for chunk_path in chunk_paths:
        with open(chunk_path, "rb") as file:
            yield from map(json.loads, file)
