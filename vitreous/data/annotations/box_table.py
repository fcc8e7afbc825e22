"""Box tables: CSV annotations with a header and one row per box.

    image,class,left,top,right,bottom[,width,height][,split]

Cells are separated by commas, semicolons or tabs. Common alternative column names are accepted, such as `filename`,
`label`, `xmin` and `x1`. Corners are in pixels, from 0 to the image's width and height. Columns `width` and `height`
state the size of the image, which is compared with the image file. A row without class and corners is an image without
objects. Paths are relative to the folder of the CSV file. Classes are in alphabetical order.
"""

from __future__ import annotations

import csv
import io
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from vitreous.data.annotations.objects import Scene, parse_coordinates
from vitreous.data.annotations.scenes import build_scene_data
from vitreous.data.annotations.shapes import Shape
from vitreous.data.decoding.decode import open_input_file
from vitreous.data.layouts.file_names import normalise_name, resolve_unicode_path
from vitreous.data.layouts.split_names import SPLIT_OF_NAME, parse_split_name
from vitreous.data.split import Data
from vitreous.data.text_files import read_text
from vitreous.errors import DataError, escape_unprintable

COLUMN_NAMES = {
    "image": ("image", "filename", "file_name", "path", "image_path", "image_id", "file"),
    "class": ("class", "label", "class_name", "category", "name"),
    "left": ("left", "xmin", "x_min", "x1"),
    "top": ("top", "ymin", "y_min", "y1"),
    "right": ("right", "xmax", "x_max", "x2"),
    "bottom": ("bottom", "ymax", "y_max", "y2"),
    "width": ("width", "image_width", "img_width"),
    "height": ("height", "image_height", "img_height"),
    "split": ("split", "subset", "set"),
}
BOX_SIZE_TOLERANCE = 1.5  # pixels by which a size may differ from that of its box to be taken for the size of the box
MAX_CSV_HEADER_BYTES = 65536  # maximum bytes of the header line
BOX_EDGE_COLUMNS = ("left", "top", "right", "bottom")


def is_box_table(path: Path) -> bool:
    """Return whether a CSV file has columns for the four edges of boxes."""
    if not path.is_file():  # reading a pipe would block
        return False
    try:
        text = read_text(path)
    except DataError:  # detect files in other encodings too; opening them raises the error
        text = read_header_line(path)
    try:
        columns = find_box_columns(next(read_csv_rows(text), []))
    except csv.Error:
        return False
    return all(edge in columns for edge in BOX_EDGE_COLUMNS)


def read_csv_rows(text: str, strict: bool = False) -> Iterator[list[str]]:
    """Yield the rows of a CSV text whose cells are separated by commas, or by semicolons or tabs if the header has no
    comma. With `strict`, invalid CSV raises `csv.Error`."""
    header = text.partition("\n")[0]
    delimiter = next((delimiter for delimiter in ",;\t" if delimiter in header), ",")
    return csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=strict)


def read_header_line(path: Path) -> str:
    """Return the first line of a file in any encoding; empty if it cannot be read."""
    try:
        with open_input_file(path) as file:
            return file.readline(MAX_CSV_HEADER_BYTES).decode("latin-1").replace("\0", "")
    except (OSError, DataError):
        return ""


def find_box_columns(header: list[str]) -> dict[str, int]:
    """Return {key of COLUMN_NAMES: column index} for the recognised columns of a header."""
    header_names = [cell.strip().lower() for cell in header]
    column_indices = {
        key: next((header_names.index(name) for name in names if name in header_names), None)
        for key, names in COLUMN_NAMES.items()
    }
    return {key: index for key, index in column_indices.items() if index is not None}


def open_box_table(path: Path, split_seed: int = 0) -> Data:
    """Open the dataset of a box table. If there is no `val`, a tenth of `train` is held out.

    Raises DataError for a header without image or class, for missing images, and, with the line, for invalid boxes.
    """
    origin = escape_unprintable(path)
    try:
        header, *rows = read_csv_rows(read_text(path), strict=True)
    except csv.Error as error:
        raise DataError(f"{origin} is not valid CSV ({error})", "fix the file") from None
    columns = find_box_columns(header)
    if missing := [key for key in ("image", "class") if key not in columns]:
        raise DataError(f"{origin} has no column {missing[0]}", f"name it one of {', '.join(COLUMN_NAMES[missing[0]])}")
    boxes: dict[tuple[str, str], list[tuple[str, Shape]]] = defaultdict(list)
    sizes: dict[tuple[str, str], set[tuple[str, str]]] = defaultdict(set)
    for line_number, row in enumerate(rows, 2):
        if not any(row):
            continue
        location = f"{origin}, line {line_number}"
        if len(row) < len(header):
            raise DataError(f"{location} has {len(row)} cells, but the header has {len(header)}", "fix the row")
        cells = {key: row[position].strip() for key, position in columns.items()}
        split = parse_split_name(cells.get("split", "train"))
        if split is None:
            raise DataError(
                f"{location}: {escape_unprintable(cells['split'])} is not the name of a split",
                f"use one of {', '.join(SPLIT_OF_NAME)}",
            )
        if not cells["image"]:
            raise DataError(f"{location} has no image path", "add the path")
        image_path = os.path.normpath(
            resolve_unicode_path(path.parent / cells["image"]) or os.path.join(path.parent, cells["image"])
        )
        objects = boxes[split, image_path]
        sizes[split, image_path].add((cells.get("height", ""), cells.get("width", "")))
        if not any(cells[key] for key in ("class", *BOX_EDGE_COLUMNS)):
            continue
        left, top, right, bottom = parse_coordinates([cells[edge] for edge in BOX_EDGE_COLUMNS], location)
        if not cells["class"] or right < left or bottom < top:
            problem = "the box has right < left or bottom < top" if cells["class"] else "the box has no class"
            raise DataError(f"{location}: {problem}", "fix or delete the row")
        objects.append((normalise_name(cells["class"]), Shape(0, (left, top, right, bottom))))
    classes = sorted({name for objects in boxes.values() for name, _ in objects})
    scenes: dict[str, list[Scene]] = defaultdict(list)
    stated_sizes = collect_stated_sizes(sizes, boxes)
    for (split, name), objects in boxes.items():
        image_path = Path(name)
        if not image_path.is_file():
            raise DataError(
                f"{origin}: the image {escape_unprintable(name)} does not exist",
                "use paths relative to the file's folder",
            )
        shapes = tuple(Shape(classes.index(label), shape.box) for label, shape in objects)
        scenes[split].append(Scene(image_path, shapes, path, stated_sizes[split, name]))
    return build_scene_data(origin, classes, scenes, split_seed, [])


def collect_stated_sizes(
    sizes: Mapping[tuple[str, str], set[tuple[str, str]]], boxes: Mapping[tuple[str, str], list[tuple[str, Shape]]]
) -> dict[tuple[str, str], tuple[int, int] | None]:
    """Return the stated (height, width) of each image, from the cells of its rows. It is None for all images if the
    columns have another meaning: if they are the sizes of the boxes, or differ for one image."""
    stated_sizes: dict[tuple[str, str], tuple[int, int] | None] = {}
    for key, size_cells in sizes.items():
        height, width = min(size_cells)
        if len(size_cells) > 1 or not (height.isdecimal() and width.isdecimal() and int(height) and int(width)):
            return dict.fromkeys(sizes)
        stated_sizes[key] = int(height), int(width)
    size_box_pairs = [(stated_sizes[key], shape.box) for key, objects in boxes.items() for _, shape in objects]
    are_box_sizes = all(
        size is not None
        and box is not None
        and abs(box[2] - box[0] - size[1]) <= BOX_SIZE_TOLERANCE
        and abs(box[3] - box[1] - size[0]) <= BOX_SIZE_TOLERANCE
        for size, box in size_box_pairs
    )
    return dict.fromkeys(sizes) if are_box_sizes else stated_sizes
