"""Answers as rows of files: what a line of JSON, a row of CSV, a row of Parquet and an entry of npz say of an image.

A path is written exactly. JSON and CSV keep bytes that are no UTF-8 as Python does (surrogateescape); Parquet, whose
text is UTF-8 alone, has such a path readable in `path`, and its bytes in `path_bytes`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from vitreous.inference.predict import Embedding, stack_embeddings
from vitreous.system.disk import is_utf8
from vitreous.tasks.predictions import build_error_column, build_path_columns

if TYPE_CHECKING:
    import pyarrow as pa

ROWS_PER_CHUNK = 4096  # rows of a part of a file


class RowFormat(Protocol):
    """How the answers of a verb are written: `formats`, suffixes of files; `part`, rows that are in memory at a time
    where a format writes many at once. For .csv it has `head`, `cells(row)` and `starts_image(cells)` too, for .parquet
    `table(rows)`: `tasks.base.PredictionFormat` is one."""

    formats: tuple[str, ...]
    part: int

    def to_dict(self, row: Any, /) -> dict[str, Any]:
        """A row as JSON has it, with at least path and error."""
        ...


class EmbeddingRows:
    """Rows of `embed`."""

    formats: tuple[str, ...] = (".npz", ".parquet", ".jsonl")
    part = ROWS_PER_CHUNK

    def to_dict(self, row: Embedding) -> dict[str, Any]:
        """Path, embedding (null where there is none), error."""
        # as short as float32 allows
        values = None if row.values is None else [float(str(value)) for value in row.values]
        return {"path": row.path, "embedding": values, "error": row.error}

    def table(self, rows: Sequence[Embedding]) -> pa.Table:
        """The same columns."""
        import pyarrow as pa

        values = pa.array([row.values for row in rows], pa.list_(pa.float32()))
        return pa.table({**build_path_columns(rows), "embedding": values, "error": build_error_column(rows)})


def encode_json_line(document: dict[str, Any]) -> bytes:
    """One line of JSON, in ASCII where a path is not UTF-8."""
    text = json.dumps(document, ensure_ascii=False)
    return (text if is_utf8(text) else json.dumps(document)).encode() + b"\n"


def embedding_arrays(rows: Sequence[Embedding]) -> dict[str, np.ndarray]:
    """Arrays for npz: `embeddings` (n, D) float32, NaN where there is none, `paths` and `errors` as text."""
    return {
        "embeddings": stack_embeddings(rows),
        "paths": np.array([row.path for row in rows]),
        "errors": np.array([row.error or "" for row in rows]),
    }
