"""Files of answers that cannot grow in place: parts in a folder beside the file, joined at the end."""

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
    """Answers in files of `kind.part` rows each, in a folder beside the file that they are joined into."""

    suffix = ""

    def __init__(self, path: str, kind: Any) -> None:
        self.path, self.kind, self.home = path, kind, Path(f"{path}.parts")
        self.home.mkdir(parents=True, exist_ok=True)
        self.waiting: list[Any] = []

    def parts(self) -> list[Path]:
        """The parts that there are, in order."""
        return sorted(self.home.glob(f"[0-9]*{self.suffix}"))

    def written(self) -> Iterator[tuple[str, bool]]:
        """The images of every part."""
        for part in self.parts():
            yield from self.read(part)

    def add(self, rows: Sequence[Any]) -> None:
        """Keep rows until they are a part."""
        self.waiting += rows
        while len(self.waiting) >= self.kind.part:
            self.write_part(self.waiting[: self.kind.part])
            del self.waiting[: self.kind.part]

    def write_part(self, rows: Sequence[Any]) -> None:
        """Write a part, so that it is there whole or not at all."""
        with atomic_path(self.home / f"{len(self.parts()):06}{self.suffix}") as temporary:
            self.write(temporary, rows)

    def finish(self) -> None:
        """Join the parts."""
        self.close()
        with atomic_path(self.path) as temporary:
            self.join(temporary, self.parts())
        shutil.rmtree(self.home)

    def close(self) -> None:
        """Write the rows that wait: a smaller part is as good. There is at least one part, perhaps of no rows."""
        if self.home.exists() and (self.waiting or not self.parts()):
            self.write_part(self.waiting)
            self.waiting = []

    @abstractmethod
    def read(self, part: Path) -> Iterator[tuple[str, bool]]:
        """The names in a part, and whether each could not be read."""

    @abstractmethod
    def write(self, path: Path, rows: Sequence[Any]) -> None:
        """Write rows as a file."""

    @abstractmethod
    def join(self, path: Path, parts: list[Path]) -> None:
        """Write all parts as one file."""


class ParquetOutputFile(ChunkedOutputFile):
    """Parquet: a row group a part."""

    suffix = ".parquet"

    def __init__(self, path: str, kind: Any) -> None:
        require_pyarrow()
        super().__init__(path, kind)

    def read(self, part: Path) -> Iterator[tuple[str, bool]]:
        """The names in a part, and whether each could not be read."""
        import pyarrow.parquet as pq

        for row in pq.read_table(part, columns=["path", "path_bytes", "error"]).to_pylist():
            name = row["path"] if row["path_bytes"] is None else os.fsdecode(row["path_bytes"])
            yield name, row["error"] is not None

    def write(self, path: Path, rows: Sequence[Any]) -> None:
        """Write rows as one row group."""
        import pyarrow.parquet as pq

        pq.write_table(self.kind.table(rows), path)

    def join(self, path: Path, parts: list[Path]) -> None:
        """Write all parts as one file, a part at a time."""
        import pyarrow.parquet as pq

        with pq.ParquetWriter(path, pq.read_schema(parts[0])) as writer:
            for part in parts:
                writer.write_table(pq.read_table(part))


class NpzOutputFile(ChunkedOutputFile):
    """npz: arrays `embeddings`, `paths` and `errors`, without pickles."""

    suffix = ".npz"

    def read(self, part: Path) -> Iterator[tuple[str, bool]]:
        """The names in a part, and whether each could not be read."""
        names, failed = load_npz_array(part, "paths"), load_npz_array(part, "errors") != ""
        yield from zip(names.tolist(), failed.tolist(), strict=True)

    def write(self, path: Path, rows: Sequence[Any]) -> None:
        """Write the arrays of rows."""
        with open(path, "wb") as file:
            contents: dict[str, Any] = embedding_arrays(rows)
            np.savez(file, **contents)

    def join(self, path: Path, parts: list[Path]) -> None:
        """Write all parts as one file, an array and a part at a time."""
        with zipfile.ZipFile(path, "w", allowZip64=True) as archive:
            for name in ("embeddings", "paths", "errors"):
                kinds = [(array.shape, array.dtype) for array in (load_npz_array(part, name) for part in parts)]
                rest = tuple(max(sizes) for sizes in zip(*(shape[1:] for shape, _ in kinds), strict=True))
                shape = (sum(shape[0] for shape, _ in kinds), *rest)
                dtype = np.result_type(*(dtype for _, dtype in kinds))
                with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                    described = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
                    np.lib.format.write_array_header_1_0(file, described)
                    for part in parts:
                        array = load_npz_array(part, name)
                        if array.shape[1:] != rest:  # a part of which no image could be read
                            array = np.full((len(array), *rest), np.nan, dtype)
                        file.write(array.astype(dtype, copy=False).tobytes())


def load_npz_array(part: Path, name: str) -> np.ndarray:
    """An array of a part, (n, ...)."""
    with np.load(part, allow_pickle=False) as archive:
        return archive[name]


class CocoOutputFile(ChunkedOutputFile):
    """COCO's results as one JSON list; and where ids are running numbers, which images and classes have them, in
    `NAME.images.json`, which is a file of COCO annotations without any."""

    suffix = ".jsonl"

    def read(self, part: Path) -> Iterator[tuple[str, bool]]:
        """The names in a part, and whether each could not be read."""
        for record in read_jsonl_records([part]):
            yield record["path"], record["error"] is not None

    def write(self, path: Path, rows: Sequence[Any]) -> None:
        """Write a line for each image."""
        path.write_bytes(b"".join(encode_json_line(self.kind.to_dict(row)) for row in rows))

    def join(self, path: Path, parts: list[Path]) -> None:
        """Write the results of all parts, an image at a time; those without an id of their own are counted from 1."""
        images = Path(self.path).with_suffix(".images.json")
        with open(path, "wb") as file, atomic_path(images) as temporary, open(temporary, "wb") as listing:
            file.write(b"[")
            listing.write(b'{"images":[')
            comma, between = b"\n", b"\n"
            for number, record in enumerate(read_jsonl_records(parts), 1):
                own = number if record["id"] is None else record["id"]
                for result in record["results"]:
                    file.write(comma + encode_json_line({"image_id": own, **result}).rstrip())
                    comma = b",\n"
                if record["error"] is None:
                    image = {"id": own, "file_name": record["file_name"]} | record["size"]
                    listing.write(between + encode_json_line(image).rstrip())
                    between = b",\n"
            file.write(b"\n]\n")
            listing.write(b'\n],"annotations":[],"categories":' + json.dumps(self.kind.categories).encode() + b"}\n")


def read_jsonl_records(parts: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """The lines of parts that are JSONL, one at a time."""
    for part in parts:
        with open(part, "rb") as file:
            yield from map(json.loads, file)
