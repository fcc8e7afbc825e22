"""Image sources for inference: files, folders, patterns, lists, CSV, archives and Parquet, read one image at a time.

    photo.jpg   folder/   'new/**/*.jpg'   @list.txt   -   table.csv   shard.tar   'shard-{000..127}.tar'   rows.parquet

An argument that is an existing path is used as a path, any other as a pattern. The suffix determines the type: .csv and
.tsv are tables, .tar archives, .parquet rows, everything else an image or a clip. A folder contributes the images below
it; without images its clips, else its Parquet files and archives; for video models its clips, including folders of
frames. Lists have one path per line, or separated by NUL bytes (`find -print0`), relative to the current folder; tables
have a header, and paths relative to their folder.

Images are read lazily. The names of a folder or a pattern are kept in memory (100 to 200 bytes each); lists, tables,
archives and Parquet files are read one block at a time.
"""

from __future__ import annotations

import csv
import glob
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import Image

from vitreous.data.clip_views import ClipViews
from vitreous.data.decoding.decode import IMAGE_FILE_SUFFIXES, MAX_FILE_BYTES, describe_exception, open_input_file
from vitreous.data.layouts.folder import list_files_by_suffix, natural_sort_key
from vitreous.data.layouts.tars import COMPRESSED_SUFFIXES, expand_braces
from vitreous.data.modalities.base import Preprocess
from vitreous.data.modalities.clips import ClipPreprocess, open_as_clip
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.data.modalities.table import MODALITIES
from vitreous.data.stores.rows import open_parquet_file
from vitreous.data.stores.tar import TarArchive, read_archive_bytes, read_file_stamp
from vitreous.errors import DataError, UsageError, escape_unprintable
from vitreous.inference.reading import read_model_input

TABLE_SUFFIXES, TAR_SUFFIXES, PARQUET_SUFFIXES = (".csv", ".tsv"), (".tar", *COMPRESSED_SUFFIXES), (".parquet",)
# names of the columns of tables that may have the paths, preferred ones first
PATH_COLUMNS = ("path", "image", "file", "filename", "file_name", "image_path", "filepath")
IMAGE_COLUMNS = (*PATH_COLUMNS, "img", "jpg", "png", "bytes")  # column names of Parquet that may hold image bytes
LIST_BLOCK_BYTES = 2**16  # bytes of a list per read
PARQUET_BATCH_ROWS = 16  # rows of Parquet per read
SOURCE_HINT = "use image files, folders, 'patterns/**/*.jpg', @list.txt, .csv, .tar or .parquet"


@dataclass(frozen=True, slots=True)
class Item:
    """An image of a source that is not read yet: its name, and `raw`, its path, the bytes of its file, or a function
    that returns these bytes. `pixels`: a function that returns its pixels (H, W[, C]) instead."""

    name: str
    raw: str | bytes | Callable[[], bytes]
    pixels: Callable[[], np.ndarray | Image.Image] | None = None

    def content(self) -> str | bytes:
        """Return the path or the bytes of the image file. Raises DataError if they cannot be read."""
        return self.raw() if callable(self.raw) else self.raw


def read_item(item: Item, preprocess: Preprocess, exact: bool = False) -> np.ndarray:
    """Read an item as (C, *image) pixels for the model. Raises DataError, which names the item."""
    content = item.content() if item.pixels is None else item.pixels()
    return read_model_input(
        content, preprocess, None if isinstance(content, str) else escape_unprintable(item.name), exact
    )


def read_views(item: Item, preprocess: Preprocess, views: ClipViews) -> np.ndarray:
    """Read a clip as its views (V, C, *image). Raises DataError, which names the item."""
    assert isinstance(preprocess, ClipPreprocess)  # checked by `parse_clip_views`
    content = item.content() if item.pixels is None else item.pixels()
    clip = open_as_clip(content, None if isinstance(content, str) else escape_unprintable(item.name))
    return views.read_views(clip, preprocess)


@dataclass(frozen=True)
class ImageSource:
    """Images that can be iterated repeatedly, except for stdin. Each function in `item_readers` lists some of them;
    `count` is None if unknown."""

    item_readers: tuple[Callable[[], Iterator[Item]], ...]
    count: int | None

    def __iter__(self) -> Iterator[Item]:
        for list_items in self.item_readers:
            yield from list_items()


def resolve_image_source(
    sources: Sequence[str],
    column: str | None = None,
    lists: Sequence[str] = (),
    preprocess: Preprocess | type[Preprocess] = ImagePreprocess,
) -> ImageSource:
    """Build the source of the images in the arguments `sources`, and then in the list files `lists`.

    `column`: the image column of tables and Parquet files. `preprocess` is the model's: folders contribute the file
    types that it reads, and a file that it reads itself is not a table, such as .csv for signal models. Raises
    DataError for missing paths and for arguments without images.
    """
    item_functions: list[Callable[[], Iterator[Item]]] = []
    count: int | None = 0
    for source in [*sources, *(f"@{name}" for name in lists)]:
        for list_items, num_items in resolve_word(source, column, preprocess):
            item_functions.append(list_items)
            count = None if count is None or num_items is None else count + num_items
    return ImageSource(tuple(item_functions), count)


def check_words_exist(sources: Sequence[str]) -> None:
    """Raise DataError for a source argument that is neither an existing file nor a pattern or list, before any folder
    is listed."""
    for source in sources:
        if (
            source != "-"
            and source[:1] != "@"
            and not (os.path.lexists(source) or glob.has_magic(source) or "{" in source)
        ):
            raise DataError(f"no such file: {escape_unprintable(source)}", SOURCE_HINT)


Modality = Preprocess | type[Preprocess]
SourcePart = tuple[Callable[[], Iterator[Item]], int | None]  # a function that lists items, and their number if known


def resolve_word(source: str, column: str | None, preprocess: Modality) -> Iterator[SourcePart]:
    """Yield the image sources of one argument: functions that list items, with their number. Raises DataError if it has
    no images."""
    if source == "-" or (source.startswith("@") and not os.path.lexists(source)):
        if source not in ("-", "@-") and not os.path.lexists(source[1:]):
            raise DataError(f"no such file: {escape_unprintable(source[1:])}")
        yield partial(read_path_list, source.removeprefix("@")), None
    elif os.path.isdir(source):
        files = preprocess.find_files(source) or list_files_by_suffix(
            source, frozenset((*TAR_SUFFIXES[:1], *PARQUET_SUFFIXES))
        )
        if not files:
            raise DataError(f"no {preprocess.noun} in {escape_unprintable(source)}", preprocess.folder_hint)
        yield from resolve_files(files, column, preprocess)
    elif os.path.lexists(source):
        yield from resolve_files([source], column, preprocess)
    elif source.endswith(".tar") and "{" in source:
        files = [os.fspath(path) for path in expand_braces(source)]
        if missing := [path for path in files if not os.path.lexists(path)]:
            first_missing = escape_unprintable(missing[0])
            raise DataError(f"{len(missing)} of {len(files)} archives are missing; the first is {first_missing}")
        yield from resolve_files(files, column, preprocess)
    elif glob.has_magic(source):
        known_suffixes = (
            *chain.from_iterable(modality.suffixes for modality in MODALITIES.values()),
            *TABLE_SUFFIXES,
            *TAR_SUFFIXES,
            *PARQUET_SUFFIXES,
        )
        names = glob.iglob(source, recursive=True)
        files = [name for name in names if name.lower().endswith(known_suffixes) and not os.path.isdir(name)]
        if not files:
            raise DataError(f"nothing matches {escape_unprintable(source)}", SOURCE_HINT)
        yield from resolve_files(sorted(files, key=natural_sort_key), column, preprocess)
    else:
        raise DataError(f"no such file: {escape_unprintable(source)}", SOURCE_HINT)


def resolve_files(files: list[str], column: str | None, preprocess: Modality) -> Iterator[SourcePart]:
    """Yield the image sources of files: one for consecutive images, and one for each table, archive or Parquet file.
    Archives contribute the members that the model reads."""
    for suffix, group in groupby(files, partial(find_container_suffix, preprocess=preprocess)):
        paths = list(group)
        if not suffix:
            yield partial(build_file_items, paths), len(paths)
            continue
        reader = (
            partial(read_tar_images, suffixes=preprocess.archive_suffixes())
            if suffix in TAR_SUFFIXES
            else partial(read_path_table if suffix in TABLE_SUFFIXES else read_parquet_images, column=column)
        )
        for path in paths:
            yield partial(reader, path), None


def find_container_suffix(file: str, preprocess: Modality) -> str:
    """Return the suffix of a file that contains images or paths: a table, archive or Parquet file; "" for a file that
    the model reads itself."""
    if file.lower().endswith(tuple(preprocess.suffixes)):
        return ""
    matching = (
        suffix for suffix in (*TABLE_SUFFIXES, *TAR_SUFFIXES, *PARQUET_SUFFIXES) if file.lower().endswith(suffix)
    )
    return "" if os.path.isdir(file) else next(matching, "")


def build_file_items(paths: Sequence[str]) -> Iterator[Item]:
    """Yield an item for each path, named by the path."""
    return (Item(path, path) for path in paths)


def open_image_file(path: str) -> BinaryIO:
    """Open a regular file for reading. Raises DataError if that fails."""
    try:
        return open_input_file(path)
    except OSError as error:
        raise DataError(f"{escape_unprintable(path)}: cannot be read ({describe_exception(error)})") from None


def read_path_list(path: str) -> Iterator[Item]:
    """Yield an item for each path in a list file, `-` for stdin; empty lines are skipped. Raises DataError for an
    unreadable file."""
    with ExitStack() as stack:
        file = sys.stdin.buffer if path == "-" else stack.enter_context(open_image_file(path))
        remainder, separator = b"", b""
        while block := file.read(LIST_BLOCK_BYTES):
            separator = separator or (b"\0" if b"\0" in block else b"\n" if b"\n" in block else b"")
            *lines, remainder = (remainder + block).split(separator) if separator else [remainder + block]
            yield from parse_path_lines(lines, separator)
        yield from parse_path_lines([remainder], separator)


def parse_path_lines(lines: Sequence[bytes], separator: bytes) -> Iterator[Item]:
    """Yield an item for each path in lines that were split at `separator`; empty lines are skipped."""
    for line in lines:
        if path := os.fsdecode(line if separator == b"\0" else line.removesuffix(b"\r")):
            yield Item(path, path)


def read_path_table(path: str, column: str | None) -> Iterator[Item]:
    """Yield an item for each path in a column of a CSV or TSV file with a header. Raises DataError for an invalid
    table, UsageError for an unknown column."""
    folder, name = os.path.dirname(path), escape_unprintable(path)
    open_image_file(path).close()
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        reader = csv.reader(file, delimiter="\t" if path.lower().endswith(".tsv") else ",", strict=True)
        try:
            head = next(reader, list[str]())
            column_index = head.index(choose_column(name, head, column, PATH_COLUMNS))
            if segment_columns := {"start", "end"} & {title.strip().lower() for title in head}:
                message = f"{name} has the column {min(segment_columns)}, but segments of clips are not read here"
                raise UsageError(message, "cut the segments into files, or remove the columns to read whole clips")
            for row in reader:
                if not row:
                    continue
                if column_index >= len(row) or not row[column_index]:
                    message = f"{name}, line {reader.line_num}: no path in the column {head[column_index]}"
                    raise DataError(message, "give every row a path")
                yield Item(row[column_index], os.path.join(folder, row[column_index]))
        except csv.Error as error:
            message = f"{name}, line {reader.line_num}: not valid CSV ({error})"
            raise DataError(message, "put cells with commas or quotes in quotes") from None


def choose_column(name: str, columns: Sequence[str], column: str | None, known_names: Sequence[str]) -> str:
    """Return `column`, or the first column with one of the `known_names`. Raises UsageError, with the existing columns,
    if it is missing."""
    listing = ", ".join(map(escape_unprintable, columns)) or "none"
    if column is not None:
        if column not in columns:
            message = f"{name} has no column {escape_unprintable(column)}; its columns are {listing}"
            raise UsageError(message, "choose one of them with --column")
        return column
    by_name = {existing.strip().lower(): existing for existing in reversed(columns)}
    if (best := next((by_name[known_name] for known_name in known_names if known_name in by_name), None)) is None:
        message = f"{name}: the image column is unknown; its columns are {listing}"
        raise UsageError(message, "choose one with --column; the table needs a header line")
    return best


def read_tar_images(path: str, suffixes: frozenset[str] = IMAGE_FILE_SUFFIXES) -> Iterator[Item]:
    """Yield an item ARCHIVE/NAME for each member of a tar archive whose name ends in one of `suffixes`. Raises
    DataError for an invalid or truncated archive."""
    file_stamp = read_file_stamp(Path(path))
    if not file_stamp.size:
        raise DataError(f"{escape_unprintable(path)}: empty file", "copy it again, or leave it out")
    with TarArchive(Path(path), file_stamp, Counter()) as archive:
        for member in archive.members():
            name = os.fsdecode(member.name)
            file_name = os.path.basename(name)
            if file_name.lower().endswith(tuple(suffixes)) and not file_name.startswith("."):
                item_name = f"{path}/{name}"
                yield Item(
                    item_name, partial(read_member_bytes, path, file_stamp, member.start, member.size, item_name)
                )


def read_member_bytes(path: str, file_stamp: Any, start: int, size: int, item_name: str) -> bytes:
    """Read the bytes of an archive member, `size` bytes from `start`. Raises DataError for an empty or too large
    member, or a changed archive."""
    if not 0 < size <= MAX_FILE_BYTES:
        raise DataError(
            f"{escape_unprintable(item_name)}: " + (f"larger than {MAX_FILE_BYTES >> 20} MiB" if size else "empty file")
        )
    return read_archive_bytes(path, file_stamp, start, size)


def read_parquet_images(path: str, column: str | None) -> Iterator[Item]:
    """Yield an item for each image in a Parquet column: bytes, structs of bytes and path, or paths. Raises DataError
    for an invalid file, UsageError for an unknown column."""
    import pyarrow as pa

    folder, row_index, name = os.path.dirname(path), 0, escape_unprintable(path)
    with open_parquet_file(Path(path)) as parquet:
        schema, types = parquet.schema_arrow, pa.types
        texts = [field.name for field in schema if types.is_string(field.type)]
        type_checks = (types.is_binary, types.is_large_binary, types.is_large_string, types.is_struct)
        image_columns = [field.name for field in schema if any(has_type(field.type) for has_type in type_checks)]
        if column is None and len(image_columns) == 1:
            column = image_columns[0]
        column = choose_column(name, [*image_columns, *texts], column, IMAGE_COLUMNS)
        with closing(parquet.iter_batches(PARQUET_BATCH_ROWS, columns=[column], use_threads=False)) as batches:
            for batch in batches:
                for value in batch.column(0).to_pylist():
                    yield parse_parquet_value(value, f"{path}, row {row_index}", folder)
                    row_index += 1


def parse_parquet_value(value: dict[str, Any] | bytes | str | None, item_name: str, folder: str) -> Item:
    """Return the item of a value in a Parquet column; `item_name` is its name unless the value is a path."""
    content, path = (value.get("bytes"), value.get("path")) if isinstance(value, dict) else (value, None)
    if isinstance(content, str):
        content, path = None, content
    if content is None and path:
        return Item(path, os.path.join(folder, path))
    return Item(item_name, content if content else partial(raise_missing_image, item_name))


def raise_missing_image(item_name: str) -> bytes:
    """Raise DataError for a row without an image."""
    raise DataError(f"{escape_unprintable(item_name)}: no image")
