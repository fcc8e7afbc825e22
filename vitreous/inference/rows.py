"""Answers as rows of files: what a line of JSON, a row of CSV, a row of Parquet and an entry of npz say of an image.

A path is written exactly. JSON and CSV keep bytes that are no UTF-8 as Python does (surrogateescape); Parquet, whose
text is UTF-8 alone, has such a path readable in `path`, and its bytes in `path_bytes`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from vitreous.errors import printable
from vitreous.inference.predict import Embedding, Prediction, stack_embeddings
from vitreous.system.disk import is_utf8
from vitreous.system.tables import marked

if TYPE_CHECKING:
    import pyarrow as pa

HEAD = ["path", "rank", "class", "probability", "error", "unsure"]
PART = 4096  # rows of a part of a file


class Kind(Protocol):
    """How the answers of a verb are written: `formats`, suffixes of files; `part`, rows that are in memory at a time
    where a format writes many at once. For .csv it has `head` and `cells(row)` too, for .parquet `table(rows)`."""

    formats: tuple[str, ...]
    part: int

    def plain(self, row: Any) -> dict[str, Any]:
        """A row as JSON has it, with at least path and error."""
        ...


class Predictions:
    """Rows of `predict`."""

    formats: tuple[str, ...] = (".jsonl", ".csv", ".parquet")
    part = PART
    head = HEAD

    def plain(self, row: Prediction) -> dict[str, Any]:
        """Path, classes with probabilities, error, unsure."""
        classes = [{"class": n, "probability": p} for n, p in zip(row.names, row.probabilities, strict=True)]
        return {"path": row.path, "classes": classes, "error": row.error, "unsure": row.unsure}

    def cells(self, row: Prediction) -> list[list[str]]:
        """CSV rows of one image: one per class, or one without. `marked` keeps spreadsheets from computing cells."""
        where, unsure = marked(row.path), "unsure" * row.unsure
        if not row.names:
            return [[where, "", "", "", marked(row.error or ""), unsure]]
        table = zip(row.names, row.probabilities, strict=True)
        return [[where, str(rank), marked(name), f"{p:.6f}", "", unsure] for rank, (name, p) in enumerate(table, 1)]

    def table(self, rows: Sequence[Prediction]) -> pa.Table:
        """The same columns, `classes` a list of structs."""
        import pyarrow as pa

        pair = pa.struct([("class", pa.string()), ("probability", pa.float64())])
        classes = [None if row.error else self.plain(row)["classes"] for row in rows]
        columns = {**paths(rows), "classes": pa.array(classes, pa.list_(pair)), "error": errors(rows)}
        return pa.table(columns | {"unsure": pa.array([row.unsure for row in rows], pa.bool_())})


class Embeddings:
    """Rows of `embed`."""

    formats: tuple[str, ...] = (".npz", ".parquet", ".jsonl")
    part = PART

    def plain(self, row: Embedding) -> dict[str, Any]:
        """Path, embedding (null where there is none), error."""
        # as short as float32 allows
        values = None if row.values is None else [float(str(value)) for value in row.values]
        return {"path": row.path, "embedding": values, "error": row.error}

    def table(self, rows: Sequence[Embedding]) -> pa.Table:
        """The same columns."""
        import pyarrow as pa

        values = pa.array([row.values for row in rows], pa.list_(pa.float32()))
        return pa.table({**paths(rows), "embedding": values, "error": errors(rows)})


def paths(rows: Sequence[Any]) -> dict[str, pa.Array]:
    """The columns `path` and `path_bytes`."""
    import pyarrow as pa

    names = [row.path if is_utf8(row.path) else printable(row.path) for row in rows]
    contents = [None if is_utf8(row.path) else os.fsencode(row.path) for row in rows]
    return {"path": pa.array(names, pa.string()), "path_bytes": pa.array(contents, pa.binary())}


def errors(rows: Sequence[Any]) -> pa.Array:
    """The column `error`."""
    import pyarrow as pa

    return pa.array([row.error for row in rows], pa.string())


def line(document: dict[str, Any]) -> bytes:
    """One line of JSON, in ASCII where a path is not UTF-8."""
    text = json.dumps(document, ensure_ascii=False)
    return (text if is_utf8(text) else json.dumps(document)).encode() + b"\n"


def arrays(rows: Sequence[Embedding]) -> dict[str, np.ndarray]:
    """Arrays for npz: `embeddings` (n, D) float32, NaN where there is none, `paths` and `errors` as text."""
    return {
        "embeddings": stack_embeddings(rows),
        "paths": np.array([row.path for row in rows]),
        "errors": np.array([row.error or "" for row in rows]),
    }
