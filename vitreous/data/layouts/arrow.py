"""Parquet files, and the data sets of the Hugging Face Hub.

    x.parquet   DIR/{train,validation,test}-*.parquet   DIR/{train,val,test}/*.parquet   hf:org/name
                hf:org/name@config

The columns of image and label are recognised by type, or named after a #: `hf:org/name#image=img,label=fine_label`.
Without a column of labels the images have none.
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
from vitreous.data.split import Data, Split, no_labels, with_val
from vitreous.data.stores.rows import Parquet, Rows, Streams, Table, map_stream
from vitreous.errors import DataError, UsageError, nearest, printable

LAYOUT = "expected x.parquet, or DIR with train-*.parquet and, if you like, validation-*.parquet and test-*.parquet"
WORDS = {word: split for split, words in SPLITS.items() for word in words}
LABELS = ("label", "labels", "class", "target", "category")
# how files of the known formats begin
MAGIC = (b"\xff\xd8\xff", b"\x89PNG\r\n", b"GIF8", b"BM", b"RIFF", b"II*\0", b"MM\0*")
REPOSITORY = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def parse_source(source: str) -> tuple[str, dict[str, str]]:
    """A source -> the part before the #, and the columns after it by role. Raises UsageError for other roles than image
    and label."""
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
    path = Path(parse_source(name)[0] if "#" in name and not os.path.lexists(name) else name)
    return (
        os.path.lexists(path)
        if path.suffix.lower() == ".parquet" and not path.is_dir()
        else next(list_parquet(path), None) is not None
    )


def list_parquet(root: Path) -> Iterator[Path]:
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
    columns that have to be named.
    """
    base, columns = parse_source(source) if "#" in source and not os.path.lexists(source) else (source, {})
    root = Path(base)
    files = sorted(list_parquet(root), key=lambda path: natural(os.fspath(path))) if root.is_dir() else [root]
    parts: dict[str, list[Path]] = {}
    for file in files:
        parts.setdefault(split_of(file, root) if root.is_dir() else "", []).append(file)
    if len(parts) > 1 and "" in parts:
        raise DataError(f"{printable(parts[''][0])} belongs to no split, others do", LAYOUT)
    folders = sorted(
        {file.parent for file in files if file.parent != root and file.parent.name not in (*WORDS, "data")}
    )
    if root.is_dir() and len(folders) > 1:
        raise UsageError(
            f"{printable(root)} holds several data sets: {', '.join(map(printable, folders))}", "name one of them"
        )
    unsplit = list(parts) == [""]
    tables: dict[str, Table] = {split or "train": Parquet(tuple(group)) for split, group in parts.items()}
    home = root if root.is_dir() else root.parent
    metadata = tables.get("train", next(iter(tables.values()))).schema.metadata or {}
    features = json.loads(metadata.get(b"huggingface", b"{}")).get("info", {}).get("features", {})
    return replace(
        open_tables(printable(base), tables, features, columns, os.fspath(home), split_seed), unsplit=unsplit
    )


def split_of(file: Path, root: Path) -> str:
    """The split in the name of a file, or else in that of its folder; or an empty string."""
    words = re.findall(r"[a-z]+", file.stem.lower())
    return next(
        (WORDS[word] for word in words if word in WORDS),
        WORDS.get(file.parent.name.lower(), "") if file.parent != root else "",
    )


def hub(source: str, split_seed: int = 0) -> Data:
    """A data set of the Hugging Face Hub, fetched into HF_HOME where it is not there yet. Nothing of it is executed.

    Raises UsageError for a name that is none, or without the `datasets` library; DataError where the set cannot be had.
    """
    base, columns = parse_source(source)
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
        dataset = datasets.load_dataset(name, config or None)
    except Exception as error:  # what it raises is not listed anywhere
        raise describe_failure(base, error) from None
    tables: dict[str, Table] = {}
    notes = []
    for split, part in dataset.items():
        files = tuple(str(file["filename"]) for file in part.cache_files)
        if str(split) not in WORDS or not files:
            notes.append(f"the split {split} is left out")
            continue
        tables[WORDS[str(split)]] = Streams(files)
    features: dict[str, Any] = dict(next(iter(dataset.values())).features.to_dict())
    data = open_tables(base, tables, features, columns, "", split_seed)
    return replace(data, notes=notes + data.notes)


def describe_failure(base: str, error: Exception) -> DataError:
    """The error for a data set that the `datasets` library could not load."""
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
        hint = "check the name; for a private or gated one, set HF_TOKEN to a token of an account that has access"
        return DataError(f"{base}: there is no such data set on the Hub, or no access to it", hint)
    hint = "check the network (HF_ENDPOINT names another server), or name a folder of Parquet files"
    return DataError(f"{base} is not in the cache and could not be downloaded ({type(error).__name__}: {text})", hint)


def open_tables(
    name: str, tables: dict[str, Table], features: dict[str, Any], columns: dict[str, str], home: str, split_seed: int
) -> Data:
    """The data set of a table for each split. `features` are the columns' types as the Hub's data sets note them.

    Without a column that can be a label, and where all labels of `train` are one, the data have no labels. Raises
    DataError for labels that are missing or that training does not have; UsageError for columns that have to be named.
    """
    if "train" not in tables:
        raise DataError(f"{name} has {', '.join(tables) or 'no split that is known'} but no split train", LAYOUT)
    image, label = choose_columns(name, tables["train"], features, columns)
    order = sorted(tables, key=list(SPLITS).index)
    notes: list[str] = []
    unlabelled, classes = DataError(f"{name} has no column of labels", "name one: #label=COLUMN"), ()
    labels = {split: no_labels(row_count(tables[split], image)) for split in order} if label is None else {}
    if label is not None:
        labels, classes = read_labels(name, {split: tables[split] for split in order}, label, features, notes)
        unlabelled = None
    if len(classes) == 1:
        unlabelled = DataError(f"{name} has one class only ({printable(classes[0])}); a classifier needs two")
        notes.append(f"all images are of one class, {printable(classes[0])}: there are no labels")
        labels, classes = {split: no_labels(len(part)) for split, part in labels.items()}, ()
    if not len(labels["train"]):
        raise DataError(f"{name} has no rows")
    splits: dict[str, Split] = {
        split: Rows(tables[split].streams(image), image, part, np.arange(len(part)), f"{name}, {split}", home)
        for split, part in labels.items()
    }
    splits, whole = with_val(splits, split_seed, notes)
    return Data(name, tuple(classes), splits, notes, whole=whole, unlabelled=unlabelled)


def row_count(table: Table, column: str) -> int:
    """How many rows a table has."""
    return sum(map_stream(stream).num_rows for stream in table.streams(column))


def read_labels(
    name: str, tables: dict[str, Table], column: str, features: dict[str, Any], notes: list[str]
) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """The labels of each split, `train` first, and the classes. Splits of which no row has a label are left out.

    Raises DataError for labels that are missing or that training does not have.
    """
    names, labels = class_names(features.get(column)), dict[str, np.ndarray]()
    classes: list[str] = names or []
    for split, table in tables.items():
        words, codes, counts = encode_labels(table.values(column), names)
        missing = codes < 0
        if split != "train" and len(codes) and missing.all():
            notes.append(f"{split} has no labels and is left out")
            continue
        if missing.any():
            raise DataError(
                f"{name}: {missing.sum()} of {len(missing)} labels of {split} are missing; the first is in row "
                f"{np.argmax(missing)}"
            )
        if split == "train" and not names:
            classes = class_order(words)
        if len(classes) != 1:
            labels[split] = label_array(f"{name}: {split}", words, codes, counts, classes)
        else:
            labels[split] = no_labels(len(codes) if counts is None else len(counts))
    return labels, tuple(classes)


def choose_columns(
    name: str, table: Table, features: dict[str, Any], columns: dict[str, str]
) -> tuple[str, str | None]:
    """The columns of image and label: as named in `columns`, or the only ones that can be; None where no column can be
    a label. Raises UsageError, with the columns that there are, for any other."""
    import pyarrow as pa

    types = {field.name: field.type for field in table.schema}
    for column in columns.values():
        if column not in types:
            raise UsageError(f"{name} has no column {column}", nearest(column, types) or f"it has {', '.join(types)}")
    label_columns = [
        column
        for column, kind in types.items()
        if (plain := item_type(kind)) and (pa.types.is_integer(plain) or pa.types.is_boolean(plain) or is_text(plain))
    ]
    image_columns = [
        column
        for column, kind in types.items()
        if is_bytes(kind) or (pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0)
    ]
    images = [c for c in image_columns if isinstance(features.get(c), dict) and features[c].get("_type") == "Image"]
    images = images or [c for c in image_columns if pa.types.is_struct(types[c])]
    images = images or [c for c in image_columns if is_image_file(table.first(c))]
    labels = [c for c in label_columns if class_names(features.get(c))]
    labels = labels or [c for c in label_columns if c.lower() in LABELS] or label_columns
    chosen: dict[str, str | None] = {}
    for role, fitting, possible in (("image", images, image_columns), ("label", labels, label_columns)):
        fitting = [columns[role]] if role in columns else fitting
        if role == "label" and not fitting:
            chosen[role] = None
            continue
        if len(fitting) != 1 or fitting[0] not in possible:
            problem = f"{len(fitting)} columns may be the {role}: {', '.join(fitting)}"
            problem = problem if fitting else f"no column is the {role}"
            if role in columns:
                problem = f"the column {columns[role]} ({types[columns[role]]}) holds no {role}s"
            listing = ", ".join(f"{column} ({kind})" for column, kind in types.items())
            raise UsageError(
                f"{name}: {problem}; there are {listing}", f"say which: {name}#{role}={(fitting or ['COLUMN'])[0]}"
            )
        chosen[role] = fitting[0]
    assert chosen["image"] is not None
    return chosen["image"], chosen["label"]


def item_type(kind: Any) -> Any:
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


def is_image_file(content: Any) -> bool:
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


def encode_labels(values: Any, names: list[str] | None) -> tuple[list[str], np.ndarray, np.ndarray | None]:
    """A column of labels -> its distinct words, the position of each label among them (n,) int64 (-1: missing), and the
    number of labels of each row, None where the column's type has one a row.

    Numbers become words too; those of a ClassLabel, which has `names`, are positions already.
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


def label_array(
    where: str, words: list[str], codes: np.ndarray, counts: np.ndarray | None, classes: list[str]
) -> np.ndarray:
    """Positions among the words of a split -> (n,) int64 positions among the classes, or (n, K) float32 with `counts`.

    Raises DataError for a class that training does not have, and for labels that would not fit into memory.
    """
    position = {label: index for index, label in enumerate(classes)}
    unknown = [word for word in words if word not in position]
    if unknown:
        names = ", ".join(map(printable, unknown[:20]))
        raise DataError(
            f"{where} has classes that train lacks: {names}", nearest(unknown[0], classes) or "rename or remove them"
        )
    codes = np.array([position[word] for word in words], dtype=np.int64)[codes]
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
