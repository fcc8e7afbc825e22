"""Files that cannot grow: answers in parts beside them, joined at the end. Parquet, and numpy's npz."""

from __future__ import annotations

import os
import shutil
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitreous.data.stores.rows import require_pyarrow
from vitreous.disk import atomic_path
from vitreous.serving.rows import Kind, arrays

PART = 4096  # rows of a part


class Parts:
    """Files of `PART` rows each, in a folder beside the file that they are joined into."""

    suffix = ""

    def __init__(self, path: str, kind: Kind) -> None:
        self.path, self.kind, self.home = path, kind, Path(f"{path}.parts")
        self.home.mkdir(parents=True, exist_ok=True)
        self.waiting: list[Any] = []
        self.bad = 0

    def parts(self) -> list[Path]:
        """The parts that there are, in order."""
        return sorted(self.home.glob(f"[0-9]*{self.suffix}"))

    def names(self) -> Iterator[str]:
        """Of every part."""
        for part in self.parts():
            names, bad = self.read(part)
            self.bad += bad
            yield from names

    def add(self, rows: Sequence[Any]) -> None:
        """Keep them until they are a part."""
        self.waiting += rows
        self.bad += sum(row.error is not None for row in rows)
        while len(self.waiting) >= PART:
            self.write_rows(self.waiting[:PART])
            del self.waiting[:PART]

    def write_rows(self, rows: Sequence[Any]) -> None:
        """Write a part, so that it is there whole or not at all."""
        place = self.home / f"{len(self.parts()):06}{self.suffix}"
        with atomic_path(place) as temporary:
            self.write(temporary, rows)

    def finish(self) -> int:
        """Join the parts; how many images could not be read."""
        self.flush()
        with atomic_path(self.path) as temporary:
            self.join(temporary)
        shutil.rmtree(self.home)
        return self.bad

    def flush(self) -> None:
        """Write what waits, and a part where there is none."""
        if self.waiting or not self.parts():
            self.write_rows(self.waiting)
            self.waiting = []

    def close(self) -> None:
        """What waits becomes a part: a smaller one is as good."""
        if self.home.exists():
            self.flush()

    def read(self, part: Path) -> tuple[Sequence[str], int]:
        """The names in a part, and how many images could not be read."""
        raise NotImplementedError

    def write(self, path: Path, rows: Sequence[Any]) -> None:
        """Write rows."""
        raise NotImplementedError

    def join(self, path: Path) -> None:
        """Write all parts as one file."""
        raise NotImplementedError


class ParquetParts(Parts):
    """Parquet: a row group a part."""

    suffix = ".parquet"

    def __init__(self, path: str, kind: Kind) -> None:
        require_pyarrow()
        super().__init__(path, kind)

    def read(self, part: Path) -> tuple[Sequence[str], int]:
        """From its columns."""
        import pyarrow.parquet as pq

        rows = pq.read_table(part, columns=["path", "path_bytes", "error"]).to_pylist()
        names = [row["path"] if row["path_bytes"] is None else os.fsdecode(row["path_bytes"]) for row in rows]
        return names, sum(row["error"] is not None for row in rows)

    def write(self, path: Path, rows: Sequence[Any]) -> None:
        """One row group."""
        import pyarrow.parquet as pq

        pq.write_table(self.kind.table(rows), path)

    def join(self, path: Path) -> None:
        """A part at a time."""
        import pyarrow.parquet as pq

        parts = self.parts()
        with pq.ParquetWriter(path, pq.read_schema(parts[0])) as writer:
            for part in parts:
                writer.write_table(pq.read_table(part))


class NpzParts(Parts):
    """npz: arrays `embeddings`, `paths` and `errors`, without pickles."""

    suffix = ".npz"

    def read(self, part: Path) -> tuple[Sequence[str], int]:
        """From its arrays."""
        with np.load(part, allow_pickle=False) as archive:
            return archive["paths"].tolist(), int((archive["errors"] != "").sum())

    def write(self, path: Path, rows: Sequence[Any]) -> None:
        """The arrays of these rows."""
        with open(path, "wb") as file:
            np.savez(file, **arrays(rows))  # type: ignore[arg-type]

    def join(self, path: Path) -> None:
        """An array at a time, a part at a time."""
        parts = self.parts()
        with zipfile.ZipFile(path, "w", allowZip64=True) as archive:
            for name in ("embeddings", "paths", "errors"):
                kinds = [(array.shape, array.dtype) for array in (load_array(part, name) for part in parts)]
                shape = (
                    sum(shape[0] for shape, _ in kinds),
                    *np.max([shape[1:] for shape, _ in kinds], axis=0).astype(int).tolist(),
                )
                dtype = np.result_type(*(dtype for _, dtype in kinds))
                with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                    described = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
                    np.lib.format.write_array_header_1_0(file, described)  # type: ignore[arg-type]
                    for part in parts:
                        array = load_array(part, name)
                        if array.shape[1:] != shape[1:]:  # a part of which no image could be read
                            array = np.full((len(array), *shape[1:]), np.nan, dtype)
                        file.write(array.astype(dtype, copy=False).tobytes())


def load_array(part: Path, name: str) -> np.ndarray:
    """An array of a part."""
    with np.load(part, allow_pickle=False) as archive:
        return archive[name]
