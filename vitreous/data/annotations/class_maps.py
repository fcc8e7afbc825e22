"""Class maps of a data set: the names of their classes, the numbers or colours that they hold, and notes on these."""

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
Palette = dict[tuple[int, ...], int]
MaskValueReader = tuple[int, Callable[[Path], np.ndarray]]  # the axes of a map of numbers, and what reads one


class MapClasses(NamedTuple):
    """The names of the classes, the class numbers in each mask of each split, notes, whether maps are in black and
    white and above which value they are white, and why the maps of the training split cannot be learned."""

    names: list[str]
    present: dict[str, list[set[int]]]
    notes: list[str]
    binary: bool = False
    threshold: int = 0
    error: DataError | None = None


def read_map_classes(
    root: Path,
    places: dict[str, list[Path]],
    names: list[str],
    palette: Palette | None,
    reader: MaskValueReader,
    ignore_index: int | None,
) -> MapClasses:
    """Read the class numbers of all maps: the names of their classes, notes on lossy files and on gaps. Raises
    DataError as `collect_map_values`."""
    read = {name: collect_map_values(files, palette, reader, root) for name, files in places.items()}
    values = {name: [numbers for numbers, _ in part] for name, part in read.items()}
    errors = (error for part in read.values() for _, error in part if error is not None)
    every = set().union(*(one for part in values.values() for one in part))
    lossy = [place for files in places.values() for place in files if is_lossy(place)]
    smeared = not palette and ignore_index is None and are_lossy_binary(lossy)
    known = every - {VOID_VALUE, ignore_index}
    binary = smeared or (
        not palette and ignore_index != VOID_VALUE and every <= {0, VOID_VALUE} and VOID_VALUE in every
    )
    threshold = LOSSY_WHITE_THRESHOLD if smeared else 0
    notes = [describe_lossy_masks(lossy, len(every), smeared)] if lossy else []
    if not names:
        names = [f"class {number}" for number in range(2 if binary else 1 + max(known, default=0))]
        notes.append(f"classes are numbered, as {escape_unprintable(root / CLASSES_FILE)} is not there to name them")
        if not binary and (gaps := describe_class_gaps(known)):
            notes.append(gaps)
    ignored = {VOID_VALUE, ignore_index}
    present = {
        name: [{int(value > threshold) for value in one} if binary else one - ignored for one in part]
        for name, part in values.items()
    }
    pairs = [pair for name, part in present.items() for pair in zip(places[name], part, strict=True)]
    beyond = (class_number_error(np.array(sorted(numbers), int), len(names), place, root) for place, numbers in pairs)
    error = next((one for one in (*errors, *beyond) if one is not None), None)
    return MapClasses(names, present, notes=notes, binary=binary, threshold=threshold, error=error)


def class_number_error(classes: np.ndarray, count: int, place: Path, root: Path) -> DataError | None:
    """Return the error for the numbers (..., N) of a mask beyond `count` classes, or negative; None without."""
    largest, smallest = (int(end(initial=0)) for end in (classes.max, classes.min))
    if smallest < IGNORE_INDEX:
        return DataError(
            f"{escape_unprintable(place)} has the negative class number {smallest}", "number classes from 0 on"
        )
    if largest < count:
        return None
    problem = f"{escape_unprintable(place)} has class {largest}, and there are {count}"
    hint = (
        f"name it in {escape_unprintable(root / CLASSES_FILE)}, one class a line from "
        f"0 on; if {largest} marks pixels without a class"
    )
    return DataError(problem, f"{hint}, use --ignore-index {largest}")


def read_classes_file(root: Path) -> tuple[list[str], Palette | None]:
    """The names in `classes.txt`, and their colours where it has any; nothing where there is no such file. Raises
    DataError for a line that cannot be meant."""
    place = root / CLASSES_FILE
    if not place.is_file():
        return [], None
    names, palette = [], {}
    for number, line in enumerate(read_lines(place), 1):
        if not line.strip():
            continue
        name, colour = parse_class_line(normalise_name(line))
        if name in names or (bool(colour) != bool(palette) and names):
            problem = "is there twice" if name in names else "has no colour, or others have none"
            raise DataError(
                f"{escape_unprintable(place)}, line {number}: {escape_unprintable(name)} {problem}", "one class a line"
            )
        if colour:
            palette[colour] = len(names)
        names.append(name)
    return names, palette or None


def parse_class_line(line: str) -> tuple[str, tuple[int, ...]]:
    """The name and the colour in a line of `classes.txt`; the colour is empty where the line has none."""
    match = CLASS_COLOUR_LINE.fullmatch(line.strip())
    colour = tuple(int(value) for value in match.groups()[1:]) if match else ()
    return (match[1], colour) if match and max(colour) < 256 else (line.strip(), ())


def collect_map_values(
    places: Sequence[Path], palette: Palette | None, reader: MaskValueReader, root: Path
) -> list[tuple[set[int], DataError | None]]:
    """The numbers in each class map; of one in colours the classes, and the error for a colour of no class. Raises
    DataError for one that cannot be read, and for colours where the classes have none."""

    axes, read = reader

    def numbers(place: Path) -> tuple[set[int], DataError | None]:
        mask = read(place) if palette else to_numbers_if_grey(read(place))
        if mask.ndim == axes:
            return set(np.unique(mask).tolist()), None
        if palette is None:
            hint = f"write {CLASSES_FILE}, a class a line with its colour: road 128 64 128"
            raise DataError(f"{escape_unprintable(place)} is in colours, and no file says whose they are", hint)
        colours = [decode_colour(code) for code in np.unique(encode_colours(mask)).tolist()]
        unknown = next((colour for colour in colours if colour not in palette), None)
        classes = {palette[colour] for colour in colours if colour in palette}
        return classes, None if unknown is None else unknown_colour_error(unknown, place, root)

    with ThreadPoolExecutor(max(1, default_worker_count())) as pool:
        return list(pool.map(numbers, places))


def decode_colour(code: int) -> tuple[int, int, int]:
    """Red, green and blue of a number of `encode_colours`."""
    return code >> 16, code >> 8 & 255, code & 255


def unknown_colour_error(colour: tuple[int, ...], place: Path, root: Path) -> DataError:
    """Return the error for a colour of a mask that no class has."""
    problem = f"{escape_unprintable(place)} has the colour {' '.join(map(str, colour))} of no class"
    if is_lossy(place):
        return DataError(f"{problem}; it is a lossy file", "save masks as PNG: compression changes their colours")
    return DataError(
        problem, f"write {escape_unprintable(root / CLASSES_FILE)}, a class a line with its colour: road 128 64 128"
    )


def encode_colours(colours: np.ndarray) -> np.ndarray:
    """(H, W, C) uint8 colours -> (H, W) int64, a number for each colour."""
    return (colours[..., :3].astype(np.int64) * (65536, 256, 1)).sum(-1)
