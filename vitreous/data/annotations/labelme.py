"""LabelMe annotations: a JSON file next to each image, with polygons, rectangles and circles.

    DIR/a.jpg   DIR/a.json, with `shapes` of `label`, `shape_type` and `points`

Folders `train`, `val` and `test` are splits. Shapes with the same `group_id` and label form one object. Classes are the
labels in alphabetical order.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from vitreous.data.annotations.fields import read_class_name, shorten_value
from vitreous.data.annotations.objects import Scene, check_stated_image, parse_coordinates, parse_in_threads
from vitreous.data.annotations.scenes import build_scene_data
from vitreous.data.annotations.shapes import Shape
from vitreous.data.layouts.file_names import normalise_name, resolve_unicode_path
from vitreous.data.layouts.folder import list_images
from vitreous.data.layouts.split_names import find_split_folders, is_system_name
from vitreous.data.split import Data
from vitreous.data.text_files import contains_word, read_text
from vitreous.errors import DataError, escape_unprintable

CIRCLE_CORNERS = 64  # number of corners of a circle's polygon
ParsedObjects = tuple[list[tuple[str, Shape]], tuple[int, int] | None]  # class names and objects; (height, width)


def is_labelme(root: Path) -> bool:
    """Return whether a folder is a LabelMe dataset: the first JSON file in it, or in a split folder, has `shapes`."""
    for folder in (root, *find_split_folders(root).values()):
        first_json = next((path for path in sorted(folder.glob("*.json")) if path.is_file()), None)
        if first_json is not None:
            return contains_word(first_json, '"shapes"')
    return False


def open_labelme(root: Path, split_seed: int = 0) -> Data:
    """Open a LabelMe folder. If there is no `val`, a tenth of `train` is held out. An image without a JSON file has no
    objects.

    Raises DataError for JSON that is not LabelMe's, and for a JSON file without an image or with several images of its
    name.
    """
    split_folders = find_split_folders(root) or {"train": root}
    images = {split: list_images(folder) for split, folder in split_folders.items()}
    for split, folder in split_folders.items():
        stem_counts = Counter(normalise_name(os.fspath(path.with_suffix(""))) for path in images[split])
        for path in sorted(path for path in folder.rglob("*.json") if not is_system_name(path.name)):
            count = stem_counts[normalise_name(os.fspath(path.with_suffix("")))]
            if count > 1:
                raise DataError(
                    f"{escape_unprintable(path)} has {count} images of this name next to it", "rename or delete one"
                )
            if not count:
                raise DataError(
                    f"{escape_unprintable(path)} has no image of this name next to it", "restore or delete it"
                )
    image_paths = [path for entries in images.values() for path in entries]
    parsed = dict(zip(image_paths, parse_in_threads(image_paths, parse_labelme_file), strict=True))
    classes = sorted({name for entries, _ in parsed.values() for name, _ in entries})

    def build_scene(image_path: Path) -> Scene:
        objects, size = parsed[image_path]
        shapes = tuple(replace(shape, label=classes.index(name)) for name, shape in objects)
        return Scene(image_path, shapes, find_labelme_json(image_path), size)

    scenes = {split: [build_scene(path) for path in entries] for split, entries in images.items()}
    return build_scene_data(escape_unprintable(root), classes, scenes, split_seed, notes=[])


def find_labelme_json(image: Path) -> Path:
    """Return the path of the JSON file of an image, as the file system spells it if the file exists."""
    json_path = image.with_suffix(".json")
    return Path(resolve_unicode_path(json_path) or json_path)


def parse_labelme_file(image: Path) -> ParsedObjects:
    """Read the JSON file of an image: the objects with class names, and the stated (height, width), if any. Raises
    DataError for invalid content."""
    json_path = find_labelme_json(image)
    if not json_path.is_file():
        return [], None
    origin = escape_unprintable(json_path)
    try:
        document = json.loads(read_text(json_path))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{origin} is not valid JSON ({str(error)[:80]})", "fix or delete the file") from None
    if not isinstance(document, dict) or not isinstance(document.get("shapes"), list):
        raise DataError(f"{origin} is not a LabelMe file", "add the list `shapes`")
    check_stated_image(document.get("imagePath"), image.parent, image.stem, origin)
    objects: list[tuple[str, Shape]] = []
    groups: dict[tuple[str, Any], int] = {}
    for shape_number, entry in enumerate(document["shapes"], 1):
        location = f"{origin}, shape {shape_number}"
        if not isinstance(entry, dict):
            raise DataError(f"{location} is not a JSON object: {shorten_value(entry)}", "give it a label and points")
        name = normalise_name(read_class_name(entry.get("label"), location, "label"))
        group = entry.get("group_id")
        polygon = parse_polygon(entry, location)
        if group is not None and (name, str(group)) in groups:
            position = groups[name, str(group)]
            shape = objects[position][1]
            objects[position] = (name, replace(shape, polygons=(*shape.polygons, polygon)))
            continue
        groups[name, str(group)] = len(objects)
        objects.append((name, Shape(0, None, (polygon,))))
    height, width = document.get("imageHeight"), document.get("imageWidth")
    if isinstance(height, int) and isinstance(width, int) and min(height, width) > 0:
        return objects, (height, width)
    return objects, None


def parse_polygon(entry: dict[str, Any], location: str) -> np.ndarray:
    """Convert a shape to a polygon, the corners (n, 2) float32 of x and y. Raises DataError, with `location`, for
    invalid points and unsupported types of shapes."""
    shape_type, points = entry.get("shape_type") or "polygon", entry.get("points")
    if not isinstance(points, list) or not all(isinstance(point, list) and len(point) == 2 for point in points):
        raise DataError(f"{location} has no points", "add pairs of x and y")
    corners = np.array([parse_coordinates(point, location) for point in points], np.float32).reshape(-1, 2)
    min_points = {"polygon": 3, "rectangle": 2, "circle": 2}.get(shape_type)
    if min_points is None:
        raise DataError(
            f"{location} has the unsupported type {escape_unprintable(str(shape_type))}",
            "use polygons, rectangles and circles",
        )
    if len(corners) < min_points or (min_points == 2 and len(corners) > 4):
        raise DataError(f"{location}: a {shape_type} cannot have {len(corners)} points", "fix or delete the shape")
    if shape_type == "rectangle":
        (left, top), (right, bottom) = corners.min(0), corners.max(0)
        return np.array([(left, top), (right, top), (right, bottom), (left, bottom)], np.float32)
    if shape_type == "circle":
        radius = math.dist(*corners[:2].tolist())
        angles = np.linspace(0, 2 * math.pi, CIRCLE_CORNERS, endpoint=False)
        return (corners[0] + radius * np.stack([np.cos(angles), np.sin(angles)], 1)).astype(np.float32)
    return corners
