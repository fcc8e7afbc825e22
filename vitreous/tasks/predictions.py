"""Shared code for predictions of all tasks: columns of Arrow tables, and the HTML table for notebooks."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitreous.data.decoding.decode import decode_to_pillow
from vitreous.errors import DataError, escape_unprintable
from vitreous.system.disk import is_utf8
from vitreous.system.notebook import RawHTML, format_html_table

if TYPE_CHECKING:
    import pyarrow as pa

MAX_HTML_PREDICTIONS = 50  # maximum number of predictions in the HTML table of a notebook
THUMBNAIL_SIDE = 64  # maximum height and width of a thumbnail in pixels


class Predictions(list[Any]):
    """A list of predictions with an HTML table view for notebooks."""

    def _repr_html_(self) -> str:
        return format_predictions_html(self)


def build_path_columns(predictions: Sequence[Any]) -> dict[str, pa.Array]:
    """Build the Arrow columns `path` and `path_bytes`. If a path is not UTF-8, `path` is escaped and `path_bytes` has
    its bytes."""
    import pyarrow as pa

    names = [
        prediction.path if is_utf8(prediction.path) else escape_unprintable(prediction.path)
        for prediction in predictions
    ]
    path_bytes = [None if is_utf8(prediction.path) else os.fsencode(prediction.path) for prediction in predictions]
    return {"path": pa.array(names, pa.string()), "path_bytes": pa.array(path_bytes, pa.binary())}


def build_error_column(predictions: Sequence[Any]) -> pa.Array:
    """Build the Arrow column `error`."""
    import pyarrow as pa

    return pa.array([prediction.error for prediction in predictions], pa.string())


def format_predictions_html(predictions: Sequence[Any]) -> str:
    """Format predictions as an HTML table: image, path, and prediction or error."""
    cells = [
        (
            format_thumbnail_html(prediction.path),
            prediction.path,
            f"error: {prediction.error}" if prediction.error else prediction.cell_html(),
        )
        for prediction in predictions[:MAX_HTML_PREDICTIONS]
    ]
    note = (
        f"{len(predictions) - MAX_HTML_PREDICTIONS} more are not shown"
        if len(predictions) > MAX_HTML_PREDICTIONS
        else ""
    )
    return format_html_table(cells, ("", "image", predictions[0].column if predictions else "prediction"), note=note)


def format_thumbnail_html(path: str) -> RawHTML:
    """Return a thumbnail of an image file as HTML; "" if the file cannot be read."""
    if not Path(path).is_file():
        return RawHTML("")
    try:
        image = decode_to_pillow(path, 3)
    except DataError:
        return RawHTML("")
    image.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=85)
    return RawHTML(f'<img src="data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}">')
