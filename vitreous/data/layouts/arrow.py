"""Parquet files, and the data sets of the Hugging Face Hub.

    x.parquet   DIR/{train,validation,test}-*.parquet   DIR/{train,val,test}/*.parquet   hf:org/name
                hf:org/name@config

The columns of image and label are found by their type, or said after a #: `hf:org/name#image=img,label=fine_label`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from vitreous.data.layouts.folder import SPLITS, class_order, natural
from vitreous.data.layouts.table import MOST
from vitreous.data.split import Data, Split, with_val
from vitreous.data.stores.rows import Parquet, Rows, Streams, Table
from vitreous.errors import DataError, UsageError, nearest, printable

LAYOUT = "expected x.parquet, or DIR with train-*.parquet and, if you like, validation-*.parquet and test-*.parquet"
WORDS = {word: split for split, words in SPLITS.items() for word in words}
LABELS = ("label", "labels", "class", "target", "category")
# how files of the known formats begin
MAGIC = (b"\xff\xd8\xff", b"\x89PNG\r\n", b"GIF8", b"BM", b"RIFF", b"II*\0", b"MM\0*")
REPOSITORY = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def said(source: str) -> tuple[str, dict[str, str]]:
    """A source -> what is before the #, and the columns after it. Raises UsageError for anything but image= and
    label=."""
    base, _, words = source.partition("#")
    columns: dict[str, str] = {}
    for word in filter(None, words.split(",")):
        role, _, columns[role] = word.partition("=")
    for role, column in columns.items():
        if role not in ("image", "label") or not column:
            raise UsageError(f"{source}: cannot read {printable(role)}", f"write {base}#image=COLUMN,label=COLUMN")
    return base, columns


def is_parquet(name: str) -> bool:
    """Whether a source is a Parquet file, or a folder that has some, itself or one level deeper."""
    path = Path(said(name)[0] if "#" in name and not os.path.lexists(name) else name)
    return (
        os.path.lexists(path)
        if path.suffix.lower() == ".parquet" and not path.is_dir()
        else next(shards(path), None) is not None
    )


def shards(root: Path) -> Iterator[Path]:
    """The Parquet files of a folder, and of the folders in it."""
    for pattern in ("*.parquet", "*/*.parquet"):
        yield from (
            path
            for path in root.glob(pattern)
            if not any(part.startswith(".") for part in path.relative_to(root).parts)
        )


def parquet(source: str, split_seed: int = 0) -> Data:
    """The data set of a Parquet file or a folder of them.

    The split is in a file's name, or else that of its folder; where none says any, all are for training.
    Raises DataError for files of no split beside others, of other columns, or that cannot be read; UsageError for
    columns that have to be said.
    """
    base, columns = said(source) if "#" in source and not os.path.lexists(source) else (source, {})
    root = Path(base)
    files = sorted(shards(root), key=lambda path: natural(os.fspath(path))) if root.is_dir() else [root]
    parts: dict[str, list[Path]] = {}
    for file in files:
        parts.setdefault(split_of(file, root) if root.is_dir() else "", []).append(file)
    if len(parts) > 1 and "" in parts:
        raise DataError(f"{printable(parts[''][0])} belongs to no split, others do", LAYOUT)
    kinds = sorted({file.parent for file in files if file.parent != root and file.parent.name not in (*WORDS, "data")})
    if root.is_dir() and len(kinds) > 1:
        raise UsageError(
            f"{printable(root)} holds several data sets: {', '.join(printable(kind) for kind in kinds)}",
            "name one of them",
        )
    unsplit = list(parts) == [""]
    tables: dict[str, Table] = {split or "train": Parquet(tuple(found)) for split, found in parts.items()}
    home = root if root.is_dir() else root.parent
    metadata = tables.get("train", next(iter(tables.values()))).schema.metadata or {}
    features = json.loads(metadata.get(b"huggingface", b"{}")).get("info", {}).get("features", {})
    return replace(opened(printable(base), tables, features, columns, os.fspath(home), split_seed), unsplit=unsplit)


def split_of(file: Path, root: Path) -> str:
    """The split that the name of a file says, or else that of its folder; or an empty string."""
    words = re.findall(r"[a-z]+", file.stem.lower())
    return next(
        (WORDS[word] for word in words if word in WORDS),
        WORDS.get(file.parent.name.lower(), "") if file.parent != root else "",
    )


def hub(source: str, split_seed: int = 0) -> Data:
    """A data set of the Hugging Face Hub, fetched into HF_HOME where it is not there yet. Nothing of it is executed.

    Raises UsageError for a name that is none, or without the `datasets` library; DataError where the set cannot be had.
    """
    base, columns = said(source)
    name, _, config = base.removeprefix("hf:").partition("@")
    if not REPOSITORY.fullmatch(name):
        raise UsageError(f"{base} names no repository", "write hf:org/name, hf:org/name@config")
    if os.path.exists(name):
        raise UsageError(
            f"{base} would read {name} here, not the Hub's", f"write {name} for what is here, or go to another folder"
        )
    try:
        import datasets
    except ImportError:
        raise UsageError(
            f"{base} needs the library datasets, which is not installed", "pip install 'vitreous[datasets]'"
        ) from None
    try:
        found = datasets.load_dataset(name, config or None)
    except Exception as error:  # what it raises is not listed anywhere
        raise unavailable(base, error) from None
    tables: dict[str, Table] = {}
    notes = []
    for split, part in found.items():
        files = tuple(str(file["filename"]) for file in part.cache_files)
        if str(split) not in WORDS or not files:
            notes.append(f"the split {split} is left out")
            continue
        tables[WORDS[str(split)]] = Streams(files)
    features: dict[str, Any] = dict(next(iter(found.values())).features.to_dict())
    data = opened(base, tables, features, columns, "", split_seed)
    return replace(data, notes=notes + data.notes)


def unavailable(base: str, error: Exception) -> DataError:
    """What to tell of a data set that the library could not bring."""
    import datasets

    text = " ".join(str(error).split())[:300]
    if "Config name is missing" in text or "BuilderConfig" in text:
        return DataError(f"{base}: {text}", f"choose one: {base.partition('@')[0]}@CONFIG")
    if "script" in text.lower() and "support" in text.lower():
        return DataError(
            f"{base} is made by a script, and scripts are not run", "look for a copy of it in Parquet files"
        )
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return DataError(
            f"{base} is not in the cache, and HF_HUB_OFFLINE forbids to download it", "unset HF_HUB_OFFLINE once"
        )
    if isinstance(error, datasets.exceptions.DatasetNotFoundError):
        way = (
            "check the name; for one that is private or asks for terms, set HF_TOKEN to a token of an account that "
            "has access"
        )
        return DataError(f"{base}: there is no such data set on the Hub, or no access to it", way)
    way = "check the network (HF_ENDPOINT names another server), or name a folder of Parquet files"
    return DataError(f"{base} is not in the cache and could not be downloaded ({type(error).__name__}: {text})", way)


def opened(
    name: str, tables: dict[str, Table], features: dict[str, Any], columns: dict[str, str], home: str, split_seed: int
) -> Data:
    """The data set of a table for each split. `features` are the columns' types as the Hub's data sets note them."""
    if "train" not in tables:
        raise DataError(f"{name} has {', '.join(tables) or 'no split that is known'} but no split train", LAYOUT)
    image, label = chosen(name, tables["train"], features, columns)
    names, splits, notes = class_names(features.get(label)), dict[str, Split](), []
    classes: list[str] = names or []
    for split in sorted(tables, key=list(SPLITS).index):
        table = tables[split]
        words, codes, counts = coded(table.values(label), names)
        bare = codes < 0
        if split != "train" and len(codes) and bare.all():
            notes.append(f"{split} has no labels and is left out")
            continue
        if bare.any():
            raise DataError(
                f"{name}: {bare.sum()} of {len(bare)} labels of {split} are missing; the first is in row "
                f"{np.argmax(bare)}"
            )
        if split == "train" and not names:
            classes = class_order(words)
        if len(classes) < 2:
            raise DataError(
                f"{name} has "
                + (f"one class only ({printable(classes[0])}); a classifier needs two" if classes else "no rows")
            )
        labels = labelled(f"{name}: {split}", words, codes, counts, classes)
        splits[split] = Rows(table.streams(image), image, labels, np.arange(len(labels)), f"{name}, {split}", home)
    splits, whole = with_val(splits, split_seed, notes)
    return Data(name, tuple(classes), splits, notes, whole=whole)


def chosen(name: str, table: Table, features: dict[str, Any], columns: dict[str, str]) -> tuple[str, str]:
    """The columns of image and label: as said, or the only ones that can be. Raises UsageError with those that there
    are."""
    import pyarrow as pa

    types = {field.name: field.type for field in table.schema}
    for column in columns.values():
        if column not in types:
            raise UsageError(f"{name} has no column {column}", nearest(column, types) or f"it has {', '.join(types)}")
    plain = {column: inner(kind) for column, kind in types.items()}
    sayable = [
        c for c, kind in plain.items() if pa.types.is_integer(kind) or pa.types.is_boolean(kind) or is_text(kind)
    ]
    holders = [
        c
        for c, kind in types.items()
        if is_bytes(kind) or (pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0)
    ]
    images = [c for c in holders if isinstance(features.get(c), dict) and features[c].get("_type") == "Image"]
    images = (
        images
        or [c for c in holders if pa.types.is_struct(types[c])]
        or [c for c in holders if is_file(table.first(c))]
    )
    labels = (
        [c for c in sayable if class_names(features.get(c))] or [c for c in sayable if c.lower() in LABELS] or sayable
    )
    found = {}
    for role, fitting, possible in (("image", images, holders), ("label", labels, sayable)):
        fitting = [columns[role]] if role in columns else fitting
        if len(fitting) != 1 or fitting[0] not in possible:
            if role in columns:
                what = f"the column {columns[role]} ({types[columns[role]]}) holds no {role}s"
            else:
                what = (
                    f"{len(fitting)} columns may be the {role}: {', '.join(fitting)}"
                    if fitting
                    else f"no column is the {role}"
                )
            listing = ", ".join(f"{column} ({kind})" for column, kind in types.items())
            raise UsageError(
                f"{name}: {what}; there are {listing}", f"say which: {name}#{role}={(fitting or ['COLUMN'])[0]}"
            )
        found[role] = fitting[0]
    return found["image"], found["label"]


def inner(kind: Any) -> Any:
    """The type of the values in a list, or the type itself."""
    import pyarrow as pa

    return (
        kind.value_type
        if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_dictionary(kind)
        else kind
    )


def is_text(kind: Any) -> bool:
    """Whether a type is text."""
    import pyarrow as pa

    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def is_bytes(kind: Any) -> bool:
    """Whether a type is bytes of any number."""
    import pyarrow as pa

    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def is_file(content: Any) -> bool:
    """Whether bytes begin as an image file does."""
    return isinstance(content, bytes) and content.startswith(MAGIC)


def class_names(feature: Any) -> list[str] | None:
    """The names of a ClassLabel, or of a list of them; None for any other type of the Hub's."""
    if isinstance(feature, list):
        feature = feature[0] if feature else None
    if isinstance(feature, dict) and feature.get("_type") in ("List", "LargeList", "Sequence"):
        feature = feature.get("feature")
    return (
        list(feature["names"])
        if isinstance(feature, dict) and feature.get("_type") == "ClassLabel" and feature.get("names")
        else None
    )


def coded(values: Any, names: list[str] | None) -> tuple[list[str], np.ndarray, np.ndarray | None]:
    """A column of labels -> the words there are, the place of each label among them (-1: none), and how many each row
    has.

    The last is None where every row has one by its type. Numbers are words too; those of a ClassLabel are places
    already.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    counts = None
    if pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
        counts = np.asarray(pc.fill_null(pc.list_value_length(values), 0), dtype=np.int64)
        values = pc.list_flatten(values)
    if pa.types.is_integer(values.type):
        codes = np.asarray(pc.fill_null(values.cast(pa.int64()), -1), dtype=np.int64)
        if names:
            return names, np.where(codes < len(names), codes, -1), counts
        words, places = np.unique(codes, return_inverse=True)
        shift = int(len(words) > 0 and words[0] == -1)
        return [str(word) for word in words[shift:]], places - shift, counts
    if not pa.types.is_dictionary(values.type):
        values = pc.dictionary_encode(values.cast(pa.string()))
    values = values.unify_dictionaries().combine_chunks()
    if isinstance(values, pa.ChunkedArray):
        values = values.chunk(0) if values.num_chunks else pa.array([], values.type)
    words = [str(word) for word in values.dictionary.to_pylist()]
    codes = np.asarray(pc.fill_null(values.indices, -1), dtype=np.int64)
    used, places = np.unique(codes, return_inverse=True)
    shift = int(len(used) > 0 and used[0] == -1)
    return [words[place] for place in used[shift:]], places - shift, counts


def labelled(
    where: str, words: list[str], codes: np.ndarray, counts: np.ndarray | None, classes: list[str]
) -> np.ndarray:
    """Places among the words of a split -> (n,) int64 places among the classes, or (n, K) float32 where rows have
    several.

    Raises DataError for a class that training does not have.
    """
    place = {label: index for index, label in enumerate(classes)}
    unknown = [word for word in words if word not in place]
    if unknown:
        names = ", ".join(map(printable, unknown[:20]))
        raise DataError(
            f"{where} has classes that train lacks: {names}", nearest(unknown[0], classes) or "rename or remove them"
        )
    codes = np.array([place[word] for word in words], dtype=np.int64)[codes]
    if counts is None:
        return codes
    if 4 * len(counts) * len(classes) > MOST:
        raise DataError(
            f"{where}: {len(counts):,} images times {len(classes):,} classes are more than memory holds",
            "are these class names?",
        )
    labels = np.zeros((len(counts), len(classes)), dtype=np.float32)
    labels[np.repeat(np.arange(len(counts)), counts), codes] = 1
    return labels
