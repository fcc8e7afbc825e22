"""Image-text pairs in Parquet files and datasets of the Hugging Face Hub: a column of images and one of captions.

The column of captions is named as in `CAPTION_COLUMNS`, or set after a #: `x.parquet#caption=COLUMN`. A cell has one
caption or a list of captions.
"""

from __future__ import annotations

import numpy as np

from vitreous.data.layouts.pair_table import CAPTION_COLUMNS
from vitreous.data.pairs import build_pair_data
from vitreous.data.split import Data, StoreSplit, create_empty_labels
from vitreous.data.stores.image_parts import ConcatenatedStore
from vitreous.data.stores.rows import ArrowStreams, ImageColumn
from vitreous.errors import UsageError, escape_unprintable, suggest_nearest

LABEL_COLUMN_NAMES = ("label", "labels", "class", "target", "category")


def find_caption_column(name: str, table: ArrowStreams, columns: dict[str, str]) -> str | None:
    """Return the column of captions: that of {role: column} `columns`, else the first of `CAPTION_COLUMNS` with texts
    or lists of texts. Returns None if there is none, or if there is a column of labels. Raises UsageError for a
    selected column that does not exist or has no texts."""
    import pyarrow.types as pt

    types = {field.name: field.type for field in table.schema}
    if "caption" in columns and columns["caption"] not in types:
        hint = suggest_nearest(columns["caption"], types) or f"columns: {', '.join(types)}"
        raise UsageError(f"{name} has no column {columns['caption']}", hint)
    candidates = [columns["caption"]] if "caption" in columns else [c for c in types if c.lower() in CAPTION_COLUMNS]
    has_labels = "label" in columns or any(column.lower() in LABEL_COLUMN_NAMES for column in types)
    for column in candidates if "caption" in columns or not has_labels else ():
        is_list = pt.is_list(types[column]) or pt.is_large_list(types[column])
        value_type = types[column].value_type if is_list else types[column]
        if pt.is_string(value_type) or pt.is_large_string(value_type):
            return column
    if "caption" in columns:
        problem = f"the column {escape_unprintable(columns['caption'])} ({types[columns['caption']]}) contains no texts"
        raise UsageError(f"{name}: {problem}", f"select one: {name}#caption=COLUMN")
    return None


def open_caption_tables(
    name: str, tables: dict[str, ArrowStreams], image: str, caption: str, *, base_folder: str, split_seed: int
) -> Data:
    """Open image-text pairs from one table per split, with the columns `image` and `caption`. Paths in the image column
    are relative to the folder `base_folder`. Raises DataError if no training image has a caption."""
    image_indices, captions, pairs_by_split = list[int](), list[str](), dict[str, np.ndarray]()
    stores: list[ImageColumn] = []
    counts: list[int] = []
    for split, table in tables.items():
        start, first_image = len(captions), sum(counts)
        cells = table.values(caption).to_pylist()
        for index, cell in enumerate(cells):
            for text in cell if isinstance(cell, list) else [cell]:
                image_indices.append(first_image + index)
                captions.append(text or "")
        pairs_by_split[split] = np.arange(start, len(captions))
        stores.append(ImageColumn(table.streams(image), image, f"{name}, {split}", base_folder))
        counts.append(len(cells))
    store = ConcatenatedStore(tuple(stores), tuple(np.cumsum([0, *counts]).tolist()))
    return build_pair_data(
        name,
        StoreSplit(store, np.arange(sum(counts)), create_empty_labels(sum(counts))),
        np.array(image_indices, np.int64),
        captions,
        pairs_by_split=pairs_by_split,
        split_seed=split_seed,
        notes=[],
        unsplit=len(tables) == 1,
    )
