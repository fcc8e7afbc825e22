"""COCO's panoptic format: one JSON file for the images of a split, and a PNG file for each image.

    DIR/annotations/panoptic_train2017.json   DIR/annotations/panoptic_train2017/*.png   images as in `coco`
    FILE.json                                 FILE/*.png, or PNG files next to it

A pixel belongs to the segment with id red + 256 green + 65536 blue; 0 is an unlabelled pixel. Every segment assigns a
class to its pixels; segments of things (`isthing`) are also objects with masks and bounding boxes. Kirillov et al.,
Panoptic Segmentation, arXiv:1801.00868.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitreous.data.annotations.class_maps import encode_colours
from vitreous.data.annotations.coco import (
    get_stated_size,
    group_files_by_split,
    index_nearby_images,
    read_categories,
    read_coco_json,
)
from vitreous.data.annotations.fields import read_flag, read_id, shorten_value
from vitreous.data.annotations.mask_files import read_mask
from vitreous.data.annotations.masks import check_mask_size, ignore_void_pixels
from vitreous.data.annotations.objects import (
    check_train_split,
    check_unique_classes,
    check_unique_images,
    read_image_size,
)
from vitreous.data.annotations.painted import ClassMapSplit
from vitreous.data.annotations.target import IGNORE_INDEX, AnnotatedFiles, Target, masks_to_boxes
from vitreous.data.layouts.file_names import FileIndex
from vitreous.data.layouts.folder import list_images
from vitreous.data.split import Data, FileSplit, Split, create_empty_labels, ensure_val_split
from vitreous.data.text_files import contains_word
from vitreous.errors import DataError, escape_unprintable

PANOPTIC_PATTERN, INSTANCES_PATTERN = "panoptic_*.json", "instances_*.json"  # in `annotations`


@dataclass(frozen=True)
class PanopticSegment:
    """A segment of an image. `number`: its id in the PNG file; `label`: its class; `thing`: it is one object, or with
    `crowd` a group that is not divided into objects."""

    number: int
    label: int
    thing: bool
    crowd: bool


@dataclass(frozen=True, eq=False)
class PanopticImage:
    """An image, the PNG file of its segments, and the JSON file `origin` that lists them. `size`: (height, width)
    stated in that file, if any."""

    image: Path
    picture: Path
    segments: tuple[PanopticSegment, ...]
    origin: Path
    _: KW_ONLY
    size: tuple[int, int] | None


@dataclass(frozen=True, eq=False)
class PanopticAnnotations:
    """The panoptic images of a split; a row is one image."""

    rows: Sequence[PanopticImage]

    def read(self, row: int) -> Target:
        """Read the annotations of an image. Raises DataError for a PNG file that cannot be read, differs in size from
        its image, or has segments that do not match the list."""
        one = self.rows[row]
        size = read_image_size(one.image)
        if one.size is not None:
            check_mask_size(one.size, size, one.origin, one.image)
        colours = read_mask(one.picture)
        if colours.ndim != 3:
            raise DataError(
                f"{escape_unprintable(one.picture)} is not an RGB image", "encode ids as red + 256 green + 65536 blue"
            )
        check_mask_size(colours.shape[:2], size, one.picture, one.image)
        numbers, where = np.unique(encode_colours(colours[..., ::-1]), return_inverse=True)
        where = where.reshape(size)
        listed = {segment.number: segment for segment in one.segments}
        for these, others, problem in (
            (set(numbers.tolist()) - {0}, listed, "that is not listed in"),
            (listed, set(numbers.tolist()), "without a pixel, listed in"),
        ):
            if wrong := sorted(number for number in these if number not in others):
                text = (
                    f"{escape_unprintable(one.picture)} has a segment {wrong[0]} "
                    f"{problem} {escape_unprintable(one.origin)}"
                )
                raise DataError(text, "correct one of them, or delete both")
        segments = [listed.get(number) for number in numbers.tolist()]
        things = [segment for segment in segments if segment is not None and segment.thing]
        labels = [IGNORE_INDEX if segment is None else segment.label for segment in segments]
        classes = ignore_void_pixels(np.array(labels, np.int32)[where], one.picture, one.image, size)
        places = {segment.number: place for place, segment in enumerate(things, 1)}
        layer = np.array([places.get(number, 0) for number in numbers.tolist()], np.int32)[where]
        return Target(
            size,
            np.array([segment.label for segment in things], np.int64),
            boxes=masks_to_boxes(layer == place for place in places.values()),
            crowd=np.array([segment.crowd for segment in things], bool),
            layers=layer[None] if things else None,
            classes=classes,
        )

    def update(self, digest: Any, rows: np.ndarray) -> None:
        """Update a hashlib digest with the segments of the images at `rows` (n,) int64."""
        for row in rows:
            one = self.rows[int(row)]
            digest.update(repr((one.picture.name, one.segments)).encode("utf-8", "surrogateescape"))


def find_thing_classes(split: Split, count: int) -> np.ndarray | None:
    """Return (count,) bool: the thing classes of a split, from panoptic files or from the objects that class maps are
    drawn from; None if it has no segments."""
    if isinstance(split, ClassMapSplit):
        return np.arange(count) > 0
    if not isinstance(split, AnnotatedFiles) or not isinstance(split.annotations, PanopticAnnotations):
        return None
    labels = {segment.label for row in split.annotations.rows for segment in row.segments if segment.thing}
    return np.isin(np.arange(count), list(labels))


def is_panoptic(root: Path) -> bool:
    """Return whether a folder has panoptic files but no instance files, or a JSON file is a panoptic file."""
    if root.is_file():
        return root.suffix.lower() == ".json" and contains_word(root, '"segments_info"')
    home = root / "annotations"
    return bool(group_files_by_split(home, (PANOPTIC_PATTERN,))) and not any(home.glob(INSTANCES_PATTERN))


def open_panoptic(root: Path, split_seed: int = 0) -> Data:
    """Open a panoptic folder or one JSON file. Without `val`, a tenth of `train` is held out. Classes are ordered by
    category id, things and stuff together.

    Raises DataError for other JSON, for missing or repeated ids, and for missing files.
    """
    files = {"train": [root]} if root.is_file() else group_files_by_split(root / "annotations", (PANOPTIC_PATTERN,))
    documents = {place: read_coco_json(place) for places in files.values() for place in places}
    kinds: dict[int, tuple[str, bool]] = {}
    for place, document in documents.items():
        for number, kind in read_panoptic_categories(document, escape_unprintable(place)).items():
            if kinds.setdefault(number, kind) != kind:
                problem = f"{escape_unprintable(place)}: category {number} differs in another file"
                raise DataError(problem, "use the same categories in all files")
    order = sorted(kinds)
    names = [kinds[number][0] for number in order]
    check_unique_classes(escape_unprintable(root), names)
    splits: dict[str, Split] = {}
    for split, places in files.items():
        entries = [row for place in places for row in documents[place]["annotations"]]
        if split != "train" and not any(row.get("segments_info") for row in entries):
            images = [str(row.get("file_name")) for place in places for row in documents[place]["images"]]
            splits[split] = FileSplit(images, create_empty_labels(len(images)))
            continue
        rows = [row for place in places for row in read_panoptic_images(documents[place], place, kinds)]
        check_unique_images([row.image for row in rows], ", ".join(map(escape_unprintable, places)))
        labels = np.zeros((len(rows), len(names)), np.float32)
        for row, one in enumerate(rows):
            labels[row, [segment.label for segment in one.segments]] = 1
        splits[split] = AnnotatedFiles(
            [one.image for one in rows], labels, np.arange(len(rows)), PanopticAnnotations(rows)
        )
    check_train_split(escape_unprintable(root), splits)
    notes: list[str] = []
    splits, whole = ensure_val_split(splits, split_seed, notes)
    unsplit = whole is not None and "test" not in splits
    return Data(escape_unprintable(root), tuple(names), splits=splits, notes=notes, unsplit=unsplit, whole=whole)


def read_panoptic_categories(document: dict[str, Any], origin: str) -> dict[int, tuple[str, bool]]:
    """Read {category id: (name, whether it is a thing)}. Raises DataError if `isthing` is missing."""
    kinds = {}
    for number, name in read_categories(document, origin).items():
        where = f"{origin}: category {escape_unprintable(name)}"
        thing = next(row.get("isthing") for row in document["categories"] if row["id"] == number)
        if thing is None:
            raise DataError(f"{where} has no isthing", "set isthing to 1 for countable objects, else to 0")
        kinds[number] = name, read_flag(thing, "isthing", where)
    return kinds


def read_panoptic_images(
    document: dict[str, Any], place: Path, kinds: dict[int, tuple[str, bool]]
) -> list[PanopticImage]:
    """Read the images of a split with their segments, in file order. Raises DataError."""
    origin, images = escape_unprintable(place), index_nearby_images(place)
    folder = place.with_suffix("") if place.with_suffix("").is_dir() else place.parent
    pictures = FileIndex(list_images(folder), folder)
    known: dict[int, dict[str, Any]] = {}
    for row in document["annotations"]:
        where = f"{origin}, annotation {shorten_value(row)}"
        number = read_id(row, "image_id", where)
        if not isinstance(row.get("file_name"), str):
            raise DataError(f"{where} has no file_name", "add the name of its PNG file")
        if number in known:
            raise DataError(f"{origin}: image {number} has two annotations", "delete one")
        known[number] = row
    labels = {number: label for label, number in enumerate(sorted(kinds))}
    rows, numbers = [], set()
    for row in document["images"]:
        where, name = f"{origin}, image {shorten_value(row)}", row.get("file_name")
        number = read_id(row, "id", where)
        if not isinstance(name, str):
            raise DataError(f"{where} has no file_name", "add the name of its image file")
        if number in numbers or number not in known:
            problem = "is repeated" if number in numbers else "has no annotation"
            raise DataError(f"{origin}: image {number} {problem}", "use a unique id and one annotation per image")
        numbers.add(number)
        segments = parse_segments(known[number], kinds, labels, f"{origin}, image {number}")
        picture = pictures.find(known[number]["file_name"], origin)
        rows.append(PanopticImage(images.find(name, origin), picture, segments, place, size=get_stated_size(row)))
    if lost := sorted(known.keys() - numbers):
        raise DataError(f"{origin}: there is no image {lost[0]}", "add the image, or delete its annotation")
    return rows


def parse_segments(
    row: dict[str, Any], kinds: dict[int, tuple[str, bool]], labels: dict[int, int], where: str
) -> tuple[PanopticSegment, ...]:
    """Parse the segments of one annotation. Raises DataError, with `where`, for missing, repeated or unknown ids."""
    segments: dict[int, PanopticSegment] = {}
    listed = row.get("segments_info")
    if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
        raise DataError(f"{where} has no segments_info", "add a list of id and category_id")
    for entry in listed:
        number, category = read_id(entry, "id", where), read_id(entry, "category_id", where)
        if not 0 < number < 1 << 24 or number in segments:
            raise DataError(f"{where}: invalid segment id {number}", "use unique ids from 1 to 16777215")
        if category not in kinds:
            raise DataError(f"{where}: there is no category {category}", "add it to categories")
        crowd = read_flag(entry.get("iscrowd"), "iscrowd", f"{where}, segment {number}")
        segments[number] = PanopticSegment(number, labels[category], kinds[category][1], crowd)
    return tuple(segments.values())
