"""Parquet files and datasets of the Hugging Face Hub.

    x.parquet   DIR/{train,validation,test}-*.parquet   DIR/{train,val,test}/*.parquet   hf:org/name
                hf:org/name@config

Image and label columns are detected by type, or set after a #: `hf:org/name#image=img,label=fine_label`. If there is no
label column, the images are unlabelled. With a column of captions, the data are image-text pairs (`arrow_pairs`).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from vitreous.data.layouts.arrow_pairs import LABEL_COLUMN_NAMES, find_caption_column, open_caption_tables
from vitreous.data.layouts.classes import (
    build_label_array,
    natural_sort_key,
    one_class_note,
    sort_class_names,
    too_few_classes_error,
)
from vitreous.data.layouts.split_names import SPLIT_NAMES, find_split_word, match_split_names, parse_split_name
from vitreous.data.split import Data, Split, StoreSplit, create_empty_labels, ensure_val_split
from vitreous.data.stores.rows import ArrowStreams, ImageColumn, ParquetFiles, map_arrow_stream
from vitreous.data.values import empty_if_all_missing
from vitreous.errors import DataError, UsageError, escape_unprintable, install_hint, suggest_nearest

PARQUET_LAYOUT_HINT = (
    "use x.parquet, or DIR with train-*.parquet and optionally validation-*.parquet and test-*.parquet"
)
# first bytes of a file in each supported image format
IMAGE_MAGIC = (b"\xff\xd8\xff", b"\x89PNG\r\n", b"GIF8", b"BM", b"RIFF", b"II*\0", b"MM\0*")
HUB_NAME_PATTERN = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def parse_column_source(source: str) -> tuple[str, dict[str, str]]:
    """Split a source at the # into the source without columns, and {role: column}. Raises UsageError for roles other
    than image, label and caption."""
    base, _, column_text = source.partition("#")
    columns: dict[str, str] = {}
    for assignment in filter(None, column_text.split(",")):
        role, _, columns[role] = assignment.partition("=")
        if role not in ("image", "label", "caption") or not columns[role]:
            hint = f"write {base}#image=COLUMN,label=COLUMN"
            raise UsageError(f"{source}: unknown role {escape_unprintable(role)}", hint)
    return base, columns


def is_parquet_source(name: str) -> bool:
    """Return whether a source is a Parquet file, or a folder with Parquet files at most one level deep."""
    path = Path(name if os.path.lexists(name) else parse_column_source(name)[0])
    if path.suffix.lower() == ".parquet" and not path.is_dir():
        return os.path.lexists(path)
    return next(list_parquet_files(path), None) is not None


def list_parquet_files(root: Path) -> Iterator[Path]:
    """Yield the Parquet files of a folder and of its subfolders."""
    for pattern in ("*.parquet", "*/*.parquet"):
        for path in root.glob(pattern):
            if not any(part.startswith(".") for part in path.relative_to(root).parts):
                yield path


def open_parquet_data(source: str, split_seed: int = 0, targets: tuple[str, ...] = ()) -> Data:
    """Open the dataset in a Parquet file, or in a folder of Parquet files.

    The split of a file is in its name or in that of its folder; if no file has one, all are training data. `targets`
    are the columns whose values are the labels. Raises DataError if only some files have a split, if columns differ,
    and for unreadable files; UsageError if columns must be selected.
    """
    base, columns = (source, {}) if os.path.lexists(source) else parse_column_source(source)
    root = Path(base)
    base_folder = root if root.is_dir() else root.parent
    files = (
        sorted(list_parquet_files(root), key=lambda path: natural_sort_key(os.fspath(path)))
        if root.is_dir()
        else [root]
    )
    files_by_split: dict[str, list[Path]] = {}
    for file in files:
        files_by_split.setdefault(infer_file_split(file, root) if root.is_dir() else "", []).append(file)
    if len(files_by_split) > 1 and "" in files_by_split:
        problem = f"the name of {escape_unprintable(files_by_split[''][0])} has no split, but those of other files have"
        raise DataError(problem, PARQUET_LAYOUT_HINT)
    folders = {
        file.parent
        for file in files
        if file.parent != base_folder and file.parent.name != "data" and not parse_split_name(file.parent.name)
    }
    if len(folders) > 1:
        folder_list = ", ".join(map(escape_unprintable, sorted(folders)))
        raise UsageError(f"{escape_unprintable(root)} has several datasets: {folder_list}", "open one of these folders")
    unsplit = list(files_by_split) == [""]
    tables: dict[str, ArrowStreams] = {
        split or "train": ParquetFiles(tuple(group)) for split, group in files_by_split.items()
    }
    metadata = tables.get("train", next(iter(tables.values()))).schema.metadata or {}
    features = json.loads(metadata.get(b"huggingface", b"{}")).get("info", {}).get("features", {})
    data = open_split_tables(
        escape_unprintable(base),
        tables,
        features=features,
        columns=columns,
        base_folder=os.fspath(base_folder),
        split_seed=split_seed,
        targets=targets,
    )
    return replace(data, unsplit=unsplit)


def infer_file_split(file: Path, root: Path) -> str:
    """Return the split in the name of a file, or else in the name of its folder; an empty string if neither has one."""
    return find_split_word(file.stem) or (parse_split_name(file.parent.name) if file.parent != root else None) or ""


def open_hub_data(source: str, split_seed: int = 0, targets: tuple[str, ...] = ()) -> Data:
    """Open a dataset of the Hugging Face Hub, downloaded to HF_HOME if missing. No code of the dataset is executed.

    `targets` are the columns whose values are the labels. Raises UsageError for an invalid name, or if the `datasets`
    library is not installed; DataError if the dataset cannot be loaded.
    """
    base, columns = parse_column_source(source)
    name, _, config = base.removeprefix("hf:").partition("@")
    if not HUB_NAME_PATTERN.fullmatch(name):
        raise UsageError(f"{base} is not a repository of the Hub", "write hf:org/name, hf:org/name@config")
    if os.path.exists(name):
        hint = f"write {name} for the local folder, or change to another directory"
        raise UsageError(f"{base} is ambiguous: the local {name} would be read instead of the Hub's", hint)
    try:
        import datasets
    except ImportError:
        problem = f"{base} needs the library datasets, which is not installed"
        raise UsageError(problem, install_hint("datasets")) from None
    try:
        dataset = datasets.load_dataset(name, config or None)
    except Exception as error:  # the library's exceptions are undocumented
        raise hub_download_error(base, error) from None
    tables: dict[str, ArrowStreams] = {}
    notes = []
    split_by_hub_name = {hub_name: split for split, hub_name in match_split_names(map(str, dataset), base).items()}
    for hub_name, hub_split in dataset.items():
        files = tuple(Path(file["filename"]) for file in hub_split.cache_files)
        if str(hub_name) in split_by_hub_name and files:
            tables[split_by_hub_name[str(hub_name)]] = ArrowStreams(files)
        else:
            notes.append(f"the split {hub_name} is ignored")
    features = dict(next(iter(dataset.values())).features.to_dict())
    data = open_split_tables(
        base, tables, features=features, columns=columns, base_folder="", split_seed=split_seed, targets=targets
    )
    return replace(data, notes=notes + data.notes)


def hub_download_error(base: str, error: Exception) -> DataError:
    """Return the error for a dataset that the `datasets` library could not load."""
    from datasets.exceptions import DatasetNotFoundError

    text = " ".join(str(error).split())[:300]
    problem = f"{base} is not in the cache and could not be downloaded ({type(error).__name__}: {text})"
    hint = "check the network (HF_ENDPOINT names another server), or name a folder of Parquet files"
    if "Config name is missing" in text or "BuilderConfig" in text:
        problem, hint = f"{base}: {text}", f"choose one: {base.partition('@')[0]}@CONFIG"
    elif "script" in text.lower() and "support" in text.lower():
        problem = f"{base} needs a loading script, which is not supported"
        hint = "use a copy in Parquet files"
    elif os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        problem = f"{base} is not in the cache, and HF_HUB_OFFLINE disables downloads"
        hint = "unset HF_HUB_OFFLINE for the download"
    elif isinstance(error, DatasetNotFoundError):
        problem = f"{base}: the Hub has no such dataset, or denies access"
        hint = "check the name; for a private or gated one, set HF_TOKEN to a token of an account that has access"
    return DataError(problem, hint)


def open_split_tables(
    name: str,
    tables: dict[str, ArrowStreams],
    features: dict[str, Any],
    columns: dict[str, str],
    base_folder: str,
    split_seed: int,
    targets: tuple[str, ...] = (),
) -> Data:
    """Open a dataset from one table per split.

    `features` are the column types in the metadata of Hub datasets, `columns` the {role: column} that the user
    selected. Paths in the image column are relative to the folder `base_folder`. `targets` are the columns whose values
    are the labels; a label column with fractions is a target too. If there is no label column, or `train` has a single
    class, the data have no labels. Raises DataError for missing labels, and for labels that `train` does not have;
    UsageError if columns must be selected.
    """
    if "train" not in tables:
        raise DataError(f"{name} has {', '.join(tables) or 'no known split'} but no split train", PARQUET_LAYOUT_HINT)
    tables = {split: tables[split] for split in SPLIT_NAMES if split in tables}
    caption = None if targets else find_caption_column(name, tables["train"], columns)
    if caption is not None:
        image, _ = choose_columns(name, tables["train"], features, {**columns, "label": caption})
        return open_caption_tables(name, tables, image, caption, base_folder=base_folder, split_seed=split_seed)
    column_by_role = columns | {"label": targets[0]} if targets else columns
    image, label = choose_columns(name, tables["train"], features, column_by_role)
    if label is not None and not targets and has_fractional_labels(tables["train"], label):
        targets = (label,)
    notes, labels, classes, unlabelled = list[str](), dict[str, np.ndarray](), (), None
    if targets:
        labels = {split: read_target_columns(f"{name}, {split}", table, targets) for split, table in tables.items()}
    elif label is None:
        unlabelled = DataError(f"{name} has no label column", "select one: #label=COLUMN")
        for split, table in tables.items():
            num_rows = sum(map_arrow_stream(stream).num_rows for stream in table.streams(image))
            labels[split] = create_empty_labels(num_rows)
    else:
        labels, classes = read_label_column(name, tables, label, features)
    if len(classes) == 1:
        unlabelled, notes = too_few_classes_error(name, classes), [*notes, *one_class_note(classes)]
        labels, classes = {split: create_empty_labels(len(split_labels)) for split, split_labels in labels.items()}, ()
    if not len(labels["train"]):
        raise DataError(f"{name} has no rows", PARQUET_LAYOUT_HINT)
    splits: dict[str, Split] = {
        split: StoreSplit(
            ImageColumn(tables[split].streams(image), image, f"{name}, {split}", base_folder),
            np.arange(len(split_labels)),
            split_labels,
        )
        for split, split_labels in labels.items()
    }
    splits, full_train = ensure_val_split(splits, split_seed, notes)
    return Data(
        name,
        classes,
        splits,
        notes,
        full_train_split=full_train,
        unlabelled=unlabelled,
        targets=targets,
        label_column=label or Data.label_column,
    )


def has_fractional_labels(table: ArrowStreams, column: str) -> bool:
    """Return whether a label column has floating-point numbers, one per row, of which at least one is a fraction."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pa.types.is_floating(table.schema.field(column).type):
        return False
    values = table.values(column)
    is_fraction = pc.and_(pc.is_finite(values), pc.not_equal(values, pc.floor(values)))
    return bool(pc.any(is_fraction).as_py())


def read_target_columns(name: str, table: ArrowStreams, targets: tuple[str, ...]) -> np.ndarray:
    """Read the values of regression targets, (n, T) float64, NaN if missing; (n, 0) if all are missing. Raises
    DataError for a column that does not exist or is not numeric, and for an infinite value."""
    import pyarrow as pa

    types, values = {field.name: field.type for field in table.schema}, list[np.ndarray]()
    for column in targets:
        if column not in types:
            hint = suggest_nearest(column, types) or f"columns: {', '.join(types)}"
            raise DataError(f"{name} has no column {escape_unprintable(column)}", hint)
        if not (pa.types.is_integer(types[column]) or pa.types.is_floating(types[column])):
            problem = f"{name}: the column {escape_unprintable(column)} has type {types[column]}, not numbers"
            raise DataError(problem, "choose numeric columns: --targets COLUMN")
        column_values = np.asarray(table.values(column).cast(pa.float64()).to_numpy(), np.float64)
        if np.isinf(column_values).any():
            row = int(np.argmax(np.isinf(column_values)))
            raise DataError(f"{name}: {escape_unprintable(column)} is infinite in row {row}", "use finite values")
        values.append(column_values)
    return empty_if_all_missing(np.stack(values, 1))


def read_label_column(
    name: str, tables: dict[str, ArrowStreams], column: str, features: dict[str, Any]
) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """Read the labels of each split, (n,) int64 or (n, K) float32, and the class names.

    `tables` has `train` first, whose labels define the classes. A held-out split without any label gets (n, 0) labels.
    Raises DataError for missing labels, and for labels that `train` does not have.
    """
    names, labels = get_class_label_names(features.get(column)), dict[str, np.ndarray]()
    classes = names
    for split, table in tables.items():
        distinct_labels, codes, counts = encode_labels(
            labels_to_integers(table.values(column), f"{name}, {split}", column), names
        )
        missing = codes < 0
        if split != "train" and missing.all():
            labels[split] = create_empty_labels(len(codes) if counts is None else len(counts))
            continue
        if missing.any():
            problem = f"{missing.sum()} of {len(missing)} labels of {split} are missing"
            problem = f"{name}: {problem}; the first is in row {np.argmax(missing)}"
            raise DataError(problem, "fill in these labels, or delete the rows")
        classes = classes or sort_class_names(distinct_labels)
        labels[split] = create_empty_labels(len(codes) if counts is None else len(counts))
        if len(classes) != 1:
            label_indices, distinct = codes, dict.fromkeys((class_name,) for class_name in distinct_labels)
            if counts is not None:
                flat = iter(codes.tolist())
                row_labels = [tuple(distinct_labels[code] for code in islice(flat, count)) for count in counts.tolist()]
                distinct = {label: code for code, label in enumerate(dict.fromkeys(row_labels))}
                label_indices = np.array([distinct[label] for label in row_labels], dtype=np.int64)
            labels[split] = build_label_array(
                f"{name}: {split}", list(distinct), label_indices, classes, counts is not None
            )
    return labels, tuple(classes)


def choose_columns(
    name: str, table: ArrowStreams, features: dict[str, Any], columns: dict[str, str]
) -> tuple[str, str | None]:
    """Choose the image column and the label column, which is None if no column can be a label. A column is selected by
    {role: column} `columns`, or else must be the only candidate. Raises UsageError, with the available columns, for
    none or several candidates."""
    types = {field.name: field.type for field in table.schema}
    for column in columns.values():
        if column not in types:
            hint = suggest_nearest(column, types) or f"columns: {', '.join(types)}"
            raise UsageError(f"{name} has no column {column}", hint)
    can_label = [column for column, column_type in types.items() if is_label_type(column_type)]
    label_candidates = {columns.get("label"), *(column for column in types if column.lower() in LABEL_COLUMN_NAMES)}
    can_label += [
        column for column, column_type in types.items() if column in label_candidates and is_float_type(column_type)
    ]
    can_image = [column for column, column_type in types.items() if is_image_type(column_type)]
    images = [c for c in can_image if isinstance(features.get(c), dict) and features[c].get("_type") == "Image"]
    images = images or [c for c in can_image if types[c].num_fields]
    images = images or [
        c
        for c in can_image
        if isinstance(first_value := table.find_first_value(c), bytes) and first_value.startswith(IMAGE_MAGIC)
    ]
    labels = [c for c in can_label if get_class_label_names(features.get(c))]
    labels = labels or [c for c in can_label if c.lower() in LABEL_COLUMN_NAMES] or can_label
    chosen_columns: list[str] = []
    for role, candidates, possible_columns in (("image", images, can_image), ("label", labels, can_label)):
        candidates = [columns[role]] if role in columns else candidates
        if role == "label" and not candidates:
            return chosen_columns[0], None
        if len(candidates) != 1 or candidates[0] not in possible_columns:
            problem = f"{len(candidates)} columns can be the {role}: {', '.join(candidates)}"
            problem = problem if candidates else f"no column can be the {role}"
            if role in columns:
                problem = f"the column {columns[role]} ({types[columns[role]]}) contains no {role}s"
            listing = ", ".join(f"{column} ({column_type})" for column, column_type in types.items())
            hint = f"select one: {name}#{role}={(candidates or ['COLUMN'])[0]}"
            raise UsageError(f"{name}: {problem}; the columns are {listing}", hint)
        chosen_columns += candidates
    return chosen_columns[0], chosen_columns[1]


def is_label_type(arrow_type: Any) -> bool:
    """Return whether an Arrow type can be that of labels: text, integers or booleans, or lists of those."""
    import pyarrow.types as pt

    has_values = pt.is_list(arrow_type) or pt.is_large_list(arrow_type) or pt.is_dictionary(arrow_type)
    value_type = arrow_type.value_type if has_values else arrow_type
    return any(test(value_type) for test in (pt.is_integer, pt.is_boolean, pt.is_string, pt.is_large_string))


def is_float_type(arrow_type: Any) -> bool:
    """Return whether an Arrow type is floating-point, or a list of that. pandas stores integers with missing values as
    floating-point numbers."""
    import pyarrow.types as pt

    is_list = pt.is_list(arrow_type) or pt.is_large_list(arrow_type)
    return pt.is_floating(arrow_type.value_type if is_list else arrow_type)


def labels_to_integers(values: Any, name: str, column: str) -> Any:
    """Convert a floating-point label column, or one of lists, to integers, with NaN as a missing value; other columns
    are unchanged. Raises DataError, with `name` and row, for a fraction."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not is_float_type(values.type):
        return values
    if not pa.types.is_floating(values.type):
        converted = (labels_to_integers(pa.chunked_array([chunk.flatten()]), name, column) for chunk in values.chunks)
        chunks = zip(values.chunks, converted, strict=True)
        lists = [
            pa.ListArray.from_arrays(chunk.offsets.cast(pa.int32()), integers.chunk(0)) for chunk, integers in chunks
        ]
        return pa.chunked_array(lists, pa.list_(pa.int64()))
    values = pc.if_else(pc.is_nan(values), pa.scalar(None, values.type), values)
    is_integer = pc.equal(values, pc.floor(values))
    if pc.all(is_integer).as_py() is False:
        row = pc.index(is_integer, False).as_py()
        problem = f"{name}: {column} is {values[row].as_py():g} in row {row}, which is not a class index"
        raise DataError(problem, "select another column: #label=COLUMN")
    return values.cast(pa.int64())


def is_image_type(arrow_type: Any) -> bool:
    """Return whether an Arrow type can be that of image files: binary, or a struct with a field `bytes`."""
    import pyarrow.types as pt

    has_bytes = pt.is_struct(arrow_type) and arrow_type.get_field_index("bytes") >= 0
    return pt.is_binary(arrow_type) or pt.is_large_binary(arrow_type) or has_bytes


def get_class_label_names(feature: Any) -> list[str]:
    """Return the class names of a ClassLabel feature of the `datasets` library, or of a list feature of ClassLabel;
    empty for other features."""
    if isinstance(feature, list):
        feature = feature[0] if feature else None
    if isinstance(feature, dict) and feature.get("_type") in ("List", "LargeList", "Sequence"):
        feature = feature.get("feature")
    is_class_label = isinstance(feature, dict) and feature.get("_type") == "ClassLabel"
    return list(feature.get("names") or ()) if is_class_label else []


def encode_labels(values: Any, names: list[str]) -> tuple[list[str], np.ndarray, np.ndarray | None]:
    """Encode a label column as indices.

    Returns the distinct labels as text, the index of each label among them (n,) int64 (-1: missing), and the number of
    labels per row, or None if the column has no lists. Numbers are converted to text. The values of a ClassLabel, whose
    class names are `names`, are indices already.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    counts = None
    if pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
        counts = np.asarray(pc.fill_null(pc.list_value_length(values), 0), dtype=np.int64)
        values = pc.list_flatten(values)
    dictionary: Any = None
    if pa.types.is_integer(values.type):
        codes = np.asarray(pc.fill_null(values.cast(pa.int64()), -1), dtype=np.int64)
        if names:
            return names, np.where(codes < len(names), codes, -1), counts
    else:
        if not pa.types.is_dictionary(values.type):
            values = pc.dictionary_encode(values.cast(pa.string()))
        values = pa.concat_arrays(values.unify_dictionaries().chunks or [pa.array([], values.type)])
        dictionary = values.dictionary.to_pylist()
        codes = np.asarray(pc.fill_null(values.indices, -1), dtype=np.int64)
    present, inverse = np.unique(codes, return_inverse=True)
    shift = int(len(present) > 0 and present[0] == -1)
    return [str(dictionary[code] if dictionary else code) for code in present[shift:]], inverse - shift, counts
