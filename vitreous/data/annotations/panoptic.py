"""COCO's panoptic format: one JSON file for the images of a split, and a PNG file for each image.

    DIR/annotations/panoptic_train2017.json   DIR/annotations/panoptic_train2017/*.png   images as in `coco`
    FILE.json                                 FILE/*.png, or PNG files next to it

A pixel belongs to the segment with the id red + 256 green + 65536 blue; pixels of id 0 are unlabelled. Every segment
has a class. Segments of things (`isthing`), countable objects, also have masks and bounding boxes; other classes are
called stuff. Kirillov et al., Panoptic Segmentation, arXiv:1801.00868.
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

PANOPTIC_PATTERN, INSTANCES_PATTERN = "panoptic_*.json", "instances_*.json"  # names of JSON files in `annotations`


@dataclass(frozen=True)
class PanopticSegment:
    """A segment of an image. `segment_id`: its id in the PNG file; `label`: its class index; `is_thing`: it is an
    object, or, if `crowd`, a group that is not divided into objects."""

    segment_id: int
    label: int
    is_thing: bool
    crowd: bool


@dataclass(frozen=True, eq=False)
class PanopticImage:
    """An image, the PNG file of its segments, and the JSON file `origin` that lists them. `size`: the (height, width)
    that the JSON file states, if any."""

    image: Path
    segments_path: Path
    segments: tuple[PanopticSegment, ...]
    origin: Path
    _: KW_ONLY
    size: tuple[int, int] | None


@dataclass(frozen=True, eq=False)
class PanopticAnnotations:
    """Annotations of the images in a split in panoptic format; the index is that of the image."""

    panoptic_images: Sequence[PanopticImage]

    def read(self, index: int) -> Target:
        """Read the annotations of an image. Raises DataError for a PNG file that cannot be read, differs in size from
        its image, or has other segments than the JSON file lists."""
        panoptic_image = self.panoptic_images[index]
        size = read_image_size(panoptic_image.image)
        if panoptic_image.size is not None:
            check_mask_size(panoptic_image.size, size, panoptic_image.origin, panoptic_image.image)
        colours = read_mask(panoptic_image.segments_path)
        if colours.ndim != 3:
            raise DataError(
                f"{escape_unprintable(panoptic_image.segments_path)} is not an RGB image",
                "encode ids as red + 256 green + 65536 blue",
            )
        check_mask_size(colours.shape[:2], size, panoptic_image.segments_path, panoptic_image.image)
        segment_ids, inverse = np.unique(encode_colours(colours[..., ::-1]), return_inverse=True)
        inverse = inverse.reshape(size)
        segment_by_id = {segment.segment_id: segment for segment in panoptic_image.segments}
        for checked_ids, expected_ids, problem in (
            (set(segment_ids.tolist()) - {0}, segment_by_id, "that is not listed in"),
            (segment_by_id, set(segment_ids.tolist()), "without a pixel, listed in"),
        ):
            if mismatched_ids := sorted(segment_id for segment_id in checked_ids if segment_id not in expected_ids):
                text = (
                    f"{escape_unprintable(panoptic_image.segments_path)} has a segment {mismatched_ids[0]} "
                    f"{problem} {escape_unprintable(panoptic_image.origin)}"
                )
                raise DataError(text, "correct one of them, or delete both")
        segments = [segment_by_id.get(segment_id) for segment_id in segment_ids.tolist()]
        things = [segment for segment in segments if segment is not None and segment.is_thing]
        labels = [IGNORE_INDEX if segment is None else segment.label for segment in segments]
        classes = ignore_void_pixels(
            np.array(labels, np.int32)[inverse], panoptic_image.segments_path, panoptic_image.image, size
        )
        layer_values = {segment.segment_id: layer_value for layer_value, segment in enumerate(things, 1)}
        layer = np.array([layer_values.get(segment_id, 0) for segment_id in segment_ids.tolist()], np.int32)[inverse]
        return Target(
            size,
            np.array([segment.label for segment in things], np.int64),
            boxes=masks_to_boxes(layer == layer_value for layer_value in layer_values.values()),
            crowd=np.array([segment.crowd for segment in things], bool),
            layers=layer[None] if things else None,
            classes=classes,
        )

    def update(self, digest: Any, indices: np.ndarray) -> None:
        """Update a hashlib digest with the segments of the images at `indices` (n,) int64."""
        for index in indices:
            panoptic_image = self.panoptic_images[int(index)]
            digest.update(
                repr((panoptic_image.segments_path.name, panoptic_image.segments)).encode("utf-8", "surrogateescape")
            )


def find_thing_classes(split: Split, num_classes: int) -> np.ndarray | None:
    """Return which classes of a split are things, (num_classes,) bool; None if its annotations do not define this.

    In panoptic data, the classes of thing segments are things. If class maps are drawn from object masks, all classes
    but the background are things.
    """
    if isinstance(split, ClassMapSplit):
        return np.arange(num_classes) > 0
    if not isinstance(split, AnnotatedFiles) or not isinstance(split.annotations, PanopticAnnotations):
        return None
    labels = {
        segment.label
        for panoptic_image in split.annotations.panoptic_images
        for segment in panoptic_image.segments
        if segment.is_thing
    }
    return np.isin(np.arange(num_classes), list(labels))


def is_panoptic(root: Path) -> bool:
    """Return whether a folder has panoptic JSON files but no instance files, or whether a JSON file is panoptic."""
    if root.is_file():
        return root.suffix.lower() == ".json" and contains_word(root, '"segments_info"')
    folder = root / "annotations"
    return bool(group_files_by_split(folder, (PANOPTIC_PATTERN,))) and not any(folder.glob(INSTANCES_PATTERN))


def open_panoptic(root: Path, split_seed: int = 0) -> Data:
    """Open a panoptic folder or a single JSON file. If there is no `val`, a tenth of `train` is held out. Classes are
    ordered by category id, things and stuff together.

    Raises DataError for JSON that is not COCO's, for missing or repeated ids, and for missing files.
    """
    files = {"train": [root]} if root.is_file() else group_files_by_split(root / "annotations", (PANOPTIC_PATTERN,))
    documents = {path: read_coco_json(path) for paths in files.values() for path in paths}
    categories: dict[int, tuple[str, bool]] = {}
    for path, document in documents.items():
        for category_id, category in read_panoptic_categories(document, escape_unprintable(path)).items():
            if categories.setdefault(category_id, category) != category:
                problem = f"{escape_unprintable(path)}: category {category_id} differs in another file"
                raise DataError(problem, "use the same categories in all files")
    order = sorted(categories)
    names = [categories[category_id][0] for category_id in order]
    check_unique_classes(escape_unprintable(root), names)
    splits: dict[str, Split] = {}
    for split, paths in files.items():
        entries = [entry for path in paths for entry in documents[path]["annotations"]]
        if split != "train" and not any(entry.get("segments_info") for entry in entries):
            images = [str(entry.get("file_name")) for path in paths for entry in documents[path]["images"]]
            splits[split] = FileSplit(images, create_empty_labels(len(images)))
            continue
        panoptic_images = [entry for path in paths for entry in read_panoptic_images(documents[path], path, categories)]
        check_unique_images([entry.image for entry in panoptic_images], ", ".join(map(escape_unprintable, paths)))
        labels = np.zeros((len(panoptic_images), len(names)), np.float32)
        for index, panoptic_image in enumerate(panoptic_images):
            labels[index, [segment.label for segment in panoptic_image.segments]] = 1
        splits[split] = AnnotatedFiles(
            [panoptic_image.image for panoptic_image in panoptic_images],
            labels,
            np.arange(len(panoptic_images)),
            PanopticAnnotations(panoptic_images),
        )
    check_train_split(escape_unprintable(root), splits)
    notes: list[str] = []
    splits, full_train = ensure_val_split(splits, split_seed, notes)
    unsplit = full_train is not None and "test" not in splits
    return Data(
        escape_unprintable(root), tuple(names), splits=splits, notes=notes, unsplit=unsplit, full_train_split=full_train
    )


def read_panoptic_categories(document: dict[str, Any], origin: str) -> dict[int, tuple[str, bool]]:
    """Read {category id: (class name, whether it is a thing)}. Raises DataError if `isthing` is missing or invalid."""
    categories = {}
    for category_id, name in read_categories(document, origin).items():
        location = f"{origin}: category {escape_unprintable(name)}"
        is_thing = next(entry.get("isthing") for entry in document["categories"] if entry["id"] == category_id)
        if is_thing is None:
            raise DataError(f"{location} has no isthing", "set isthing to 1 for countable objects, else to 0")
        categories[category_id] = name, read_flag(is_thing, "isthing", location)
    return categories


def read_panoptic_images(
    document: dict[str, Any], path: Path, categories: dict[int, tuple[str, bool]]
) -> list[PanopticImage]:
    """Read the images of a panoptic JSON file with their segments, in file order. Raises DataError for invalid entries
    and missing files."""
    origin, images = escape_unprintable(path), index_nearby_images(path)
    folder = path.with_suffix("") if path.with_suffix("").is_dir() else path.parent
    png_files = FileIndex(list_images(folder), folder)
    annotations: dict[int, dict[str, Any]] = {}
    for entry in document["annotations"]:
        location = f"{origin}, annotation {shorten_value(entry)}"
        image_id = read_id(entry, "image_id", location)
        if not isinstance(entry.get("file_name"), str):
            raise DataError(f"{location} has no file_name", "add the name of its PNG file")
        if image_id in annotations:
            raise DataError(f"{origin}: image {image_id} has two annotations", "delete one")
        annotations[image_id] = entry
    labels = {category_id: label for label, category_id in enumerate(sorted(categories))}
    panoptic_images, image_ids = [], set()
    for entry in document["images"]:
        location, name = f"{origin}, image {shorten_value(entry)}", entry.get("file_name")
        image_id = read_id(entry, "id", location)
        if not isinstance(name, str):
            raise DataError(f"{location} has no file_name", "add the name of its image file")
        if image_id in image_ids or image_id not in annotations:
            problem = "is repeated" if image_id in image_ids else "has no annotation"
            raise DataError(f"{origin}: image {image_id} {problem}", "use a unique id and one annotation per image")
        image_ids.add(image_id)
        segments = parse_segments(annotations[image_id], categories, labels, f"{origin}, image {image_id}")
        png_path = png_files.find(annotations[image_id]["file_name"], origin)
        panoptic_images.append(
            PanopticImage(images.find(name, origin), png_path, segments, path, size=get_stated_size(entry))
        )
    if missing_ids := sorted(annotations.keys() - image_ids):
        raise DataError(f"{origin}: there is no image {missing_ids[0]}", "add the image, or delete its annotation")
    return panoptic_images


def parse_segments(
    annotation: dict[str, Any], categories: dict[int, tuple[str, bool]], labels: dict[int, int], location: str
) -> tuple[PanopticSegment, ...]:
    """Parse the segments of an image's annotation. `labels` maps category ids to class indices. Raises DataError, with
    `location`, for missing, repeated or unknown ids."""
    segments: dict[int, PanopticSegment] = {}
    entries = annotation.get("segments_info")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise DataError(f"{location} has no segments_info", "add a list of id and category_id")
    for entry in entries:
        segment_id, category = read_id(entry, "id", location), read_id(entry, "category_id", location)
        if not 0 < segment_id < 1 << 24 or segment_id in segments:
            raise DataError(f"{location}: invalid segment id {segment_id}", "use unique ids from 1 to 16777215")
        if category not in categories:
            raise DataError(f"{location}: there is no category {category}", "add it to categories")
        crowd = read_flag(entry.get("iscrowd"), "iscrowd", f"{location}, segment {segment_id}")
        segments[segment_id] = PanopticSegment(segment_id, labels[category], categories[category][1], crowd)
    return tuple(segments.values())
