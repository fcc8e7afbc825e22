"""Read the classes of a segmentation dataset from its class maps and `classes.txt`.

A class map is a mask file whose pixels are class indices or class colours.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vitreous.data.annotations.mask_files import (
    LOSSY_WHITE_THRESHOLD,
    VOID_VALUE,
    are_lossy_binary,
    describe_class_gaps,
    describe_lossy_masks,
    is_lossy,
    to_numbers_if_grey,
)
from vitreous.data.annotations.target import IGNORE_INDEX
from vitreous.data.layouts.file_names import normalise_name
from vitreous.data.text_files import read_lines
from vitreous.errors import DataError, escape_unprintable
from vitreous.system.cores import default_worker_count

CLASSES_FILE = "classes.txt"
CLASS_COLOUR_LINE = re.compile(r"(.*\S)\s+([0-9]+)\s+([0-9]+)\s+([0-9]+)")
Palette = dict[tuple[int, ...], int]  # colour (red, green, blue) -> class index
MaskValueReader = tuple[int, Callable[[Path], np.ndarray]]  # number of axes of an index map; function that reads a mask


class MapClasses(NamedTuple):
    """The classes of a segmentation dataset.

    `names`: the class names. `classes_per_mask`: for each split, the class indices in each mask. `binary`: the maps are
    black and white, and values above `threshold` are class 1. `error`: the reason why the maps are unusable, if so.
    """

    names: list[str]
    classes_per_mask: dict[str, list[set[int]]]
    notes: list[str]
    binary: bool = False
    threshold: int = 0
    error: DataError | None = None


def read_map_classes(
    root: Path,
    mask_paths: dict[str, list[Path]],
    names: list[str],
    palette: Palette | None,
    reader: MaskValueReader,
    ignore_index: int | None,
) -> MapClasses:
    """Read all class maps of a dataset to find its classes, with notes about lossy files and gaps between indices.

    `names` and `palette` are those of `classes.txt`; classes without names are numbered. Raises DataError for an
    unreadable map, and for coloured maps without class colours.
    """
    results = {name: collect_map_values(files, palette, reader, root) for name, files in mask_paths.items()}
    values = {name: [class_indices for class_indices, _ in split_values] for name, split_values in results.items()}
    errors = (error for split_values in results.values() for _, error in split_values if error is not None)
    all_values = set().union(*(value_set for split_values in values.values() for value_set in split_values))
    lossy = [path for files in mask_paths.values() for path in files if is_lossy(path)]
    is_lossy_binary = not palette and ignore_index is None and are_lossy_binary(lossy)
    used_indices = all_values - {VOID_VALUE, ignore_index}
    binary = is_lossy_binary or (
        not palette and ignore_index != VOID_VALUE and all_values <= {0, VOID_VALUE} and VOID_VALUE in all_values
    )
    threshold = LOSSY_WHITE_THRESHOLD if is_lossy_binary else 0
    notes = [describe_lossy_masks(lossy, len(all_values), is_lossy_binary)] if lossy else []
    if not names:
        names = [f"class {index}" for index in range(2 if binary else 1 + max(used_indices, default=0))]
        notes.append(f"classes are numbered, as {escape_unprintable(root / CLASSES_FILE)} does not exist")
        if not binary and (gaps := describe_class_gaps(used_indices)):
            notes.append(gaps)
    ignored = {VOID_VALUE, ignore_index}
    present = {
        name: [
            {int(value > threshold) for value in value_set} if binary else value_set - ignored
            for value_set in split_values
        ]
        for name, split_values in values.items()
    }
    pairs = [
        pair for name, split_values in present.items() for pair in zip(mask_paths[name], split_values, strict=True)
    ]
    range_errors = (
        class_number_error(np.array(sorted(class_indices), int), len(names), path, root)
        for path, class_indices in pairs
    )
    error = next((map_error for map_error in (*errors, *range_errors) if map_error is not None), None)
    return MapClasses(names, present, notes=notes, binary=binary, threshold=threshold, error=error)


def class_number_error(classes: np.ndarray, num_classes: int, mask_path: Path, root: Path) -> DataError | None:
    """Return the error if class indices of a mask, of any shape (..., N), are below IGNORE_INDEX or not below
    `num_classes`; None otherwise."""
    largest, smallest = (int(end(initial=0)) for end in (classes.max, classes.min))
    if smallest < IGNORE_INDEX:
        return DataError(
            f"{escape_unprintable(mask_path)} has the negative class index {smallest}", "use class indices from 0"
        )
    if largest < num_classes:
        return None
    problem = f"{escape_unprintable(mask_path)} has class {largest}, but there are {num_classes} classes"
    hint = (
        f"add it to {escape_unprintable(root / CLASSES_FILE)}, one class per line from "
        f"0; if {largest} marks ignored pixels"
    )
    return DataError(problem, f"{hint}, use --ignore-index {largest}")


def read_classes_file(root: Path) -> tuple[list[str], Palette | None]:
    """Read the class names in `classes.txt`, and {colour: class index} if it has colours; [] and None if there is no
    such file. Raises DataError for an invalid line."""
    path = root / CLASSES_FILE
    if not path.is_file():
        return [], None
    names, palette = [], {}
    for line_number, line in enumerate(read_lines(path), 1):
        if not line.strip():
            continue
        name, colour = parse_class_line(normalise_name(line))
        if name in names or (bool(colour) != bool(palette) and names):
            colour_problem = "has a colour, but others have none" if colour else "has no colour, but others have one"
            problem = "is repeated" if name in names else colour_problem
            raise DataError(
                f"{escape_unprintable(path)}, line {line_number}: {escape_unprintable(name)} {problem}",
                "write one class per line",
            )
        if colour:
            palette[colour] = len(names)
        names.append(name)
    return names, palette or None


def parse_class_line(line: str) -> tuple[str, tuple[int, ...]]:
    """Parse a line of `classes.txt` into the class name and its colour (red, green, blue), which is empty if the line
    has none."""
    match = CLASS_COLOUR_LINE.fullmatch(line.strip())
    colour = tuple(int(value) for value in match.groups()[1:]) if match else ()
    return (match[1], colour) if match and max(colour) < 256 else (line.strip(), ())


def collect_map_values(
    mask_paths: Sequence[Path], palette: Palette | None, reader: MaskValueReader, root: Path
) -> list[tuple[set[int], DataError | None]]:
    """Collect the class indices in each class map, with the error if the map has a colour without a class. Raises
    DataError for an unreadable map, and for coloured maps if there is no `palette`."""
    axes, read = reader

    def collect_class_indices(mask_path: Path) -> tuple[set[int], DataError | None]:
        mask = read(mask_path) if palette else to_numbers_if_grey(read(mask_path))
        if mask.ndim == axes:
            return set(np.unique(mask).tolist()), None
        if palette is None:
            hint = f"write {CLASSES_FILE}, one class with its colour per line: road 128 64 128"
            raise DataError(f"{escape_unprintable(mask_path)} is a colour map, but class colours are not defined", hint)
        colours = [decode_colour(code) for code in np.unique(encode_colours(mask)).tolist()]
        unknown_colour = next((colour for colour in colours if colour not in palette), None)
        classes = {palette[colour] for colour in colours if colour in palette}
        return classes, None if unknown_colour is None else unknown_colour_error(unknown_colour, mask_path, root)

    with ThreadPoolExecutor(max(1, default_worker_count())) as pool:
        return list(pool.map(collect_class_indices, mask_paths))


def decode_colour(code: int) -> tuple[int, int, int]:
    """Decode an integer code of `encode_colours` to (red, green, blue)."""
    return code >> 16, code >> 8 & 255, code & 255


def unknown_colour_error(colour: tuple[int, ...], mask_path: Path, root: Path) -> DataError:
    """Return the error for a colour of a mask that has no class in `classes.txt`."""
    problem = f"{escape_unprintable(mask_path)} has the colour {' '.join(map(str, colour))} without a class"
    if is_lossy(mask_path):
        return DataError(f"{problem}; it is a lossy file", "save masks as PNG: compression changes their colours")
    return DataError(
        problem, f"write {escape_unprintable(root / CLASSES_FILE)}, one class with its colour per line: road 128 64 128"
    )


def encode_colours(colours: np.ndarray) -> np.ndarray:
    """Encode colours (H, W, C) uint8 as integers 65536 red + 256 green + blue, (H, W) int64."""
    return (colours[..., :3].astype(np.int64) * (65536, 256, 1)).sum(-1)
