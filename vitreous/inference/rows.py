"""Predictions as records of output files: JSON lines, CSV rows, Parquet rows and npz entries.

Paths are preserved exactly. JSON and CSV keep non-UTF-8 bytes as Python does (surrogateescape). Parquet text must be
UTF-8, so such a path is readable in `path`, and its bytes are in `path_bytes`.
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

ROWS_PER_CHUNK = 4096  # rows per chunk of an output file


class RowFormat(Protocol):
    """The output format of a command, which converts predictions to rows of output files.

    `formats`: file suffixes. `rows_per_chunk`: number of rows in memory in formats that write in chunks. A format for
    .csv also has `csv_columns`, `to_csv_rows(prediction)` and `starts_image(cells)`, one for .parquet
    `to_arrow_table(predictions)`; an example is `tasks.base.PredictionFormat`.
    """

    formats: tuple[str, ...]
    rows_per_chunk: int

    def to_dict(self, prediction: Any, /) -> dict[str, Any]:
        """Return the row of a prediction as JSON values, with at least path and error."""
        ...


class EmbeddingRows:
    """The output format of `embed`: one row per image, with its path, its features, and the error if it is
    unreadable."""

    formats: tuple[str, ...] = (".npz", ".parquet", ".jsonl")
    rows_per_chunk = ROWS_PER_CHUNK

    def to_dict(self, embedding: Embedding) -> dict[str, Any]:
        """Return the row of an image as JSON values: path, embedding (null if unreadable), and error."""
        # the shortest decimals that represent the float32 values
        values = None if embedding.values is None else [float(str(value)) for value in embedding.values]
        return {"path": embedding.path, "embedding": values, "error": embedding.error}

    def to_arrow_table(self, embeddings: Sequence[Embedding]) -> pa.Table:
        """Return the rows of images as an Arrow table with the columns of JSON."""
        import pyarrow as pa

        values = pa.array([embedding.values for embedding in embeddings], pa.list_(pa.float32()))
        return pa.table(
            {**build_path_columns(embeddings), "embedding": values, "error": build_error_column(embeddings)}
        )


def encode_json_line(document: dict[str, Any]) -> bytes:
    """Encode a JSON object as one line: UTF-8, or ASCII if a path in it is not valid UTF-8."""
    text = json.dumps(document, ensure_ascii=False)
    return (text if is_utf8(text) else json.dumps(document)).encode() + b"\n"


def embedding_arrays(embeddings: Sequence[Embedding]) -> dict[str, np.ndarray]:
    """Build the arrays of an npz file: `embeddings` (n, D) float32, NaN if unreadable, `paths` and `errors` as text."""
    return {
        "embeddings": stack_embeddings(embeddings),
        "paths": np.array([embedding.path for embedding in embeddings]),
        "errors": np.array([embedding.error or "" for embedding in embeddings]),
    }
