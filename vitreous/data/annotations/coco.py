"""COCO annotations: one JSON file of boxes, polygons and run lengths for the images of a split.

    DIR/annotations/instances_train2017.json   DIR/train2017/*.jpg, or DIR/images/train2017/*.jpg, or DIR/images/*.jpg
    DIR/train/_annotations.coco.json           DIR/train/*.jpg, or another JSON file, the only one in the folder
    DIR/train.json                             DIR/train/*.jpg, or any images below DIR that are not in class folders
    FILE.json                                  images next to it, or in `images` next to it

Entries are matched by id; ids of images and categories may have gaps and any order. Classes are ordered by category id.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from vitreous.data.annotations.fields import is_integer, read_class_name, read_flag, read_id, shorten_value
from vitreous.data.annotations.objects import Scene, check_unique_images, parse_coordinates
from vitreous.data.annotations.scenes import build_scene_data
from vitreous.data.annotations.shapes import Shape, decode_compressed_rle
from vitreous.data.annotations.target import VerifiedClasses
from vitreous.data.layouts.file_names import FileIndex, normalise_name
from vitreous.data.layouts.folder import is_folder, iterate_images, list_entries, list_images
from vitreous.data.layouts.split_names import find_split_folders, find_split_word, has_role_name, is_system_name
from vitreous.data.split import Data
from vitreous.data.text_files import contains_word, read_text
from vitreous.errors import DataError, escape_unprintable

#: LVIS's frequency of a class -> name: in up to 10, in up to 100, and in more training images
LVIS_FREQUENCY_NAMES = {"r": "rare", "c": "common", "f": "frequent"}
ANNOTATION_PATTERNS = ("instances_*.json", "*.json")  # names of JSON files; the first pattern with a match is used
ROBOFLOW_FILE = "_annotations.coco.json"  # name of Roboflow's JSON file in a split folder
MAX_COCO_FILES = 16  # maximum number of COCO files in a folder; more JSON files are those of single images
MAX_DEGENERATE_CORNERS = 2  # polygons with at most this number of corners have no area and are dropped


def is_coco(root: Path) -> bool:
    """Return whether a folder is a COCO dataset, or a file is one of its JSON files."""
    if root.is_file():
        return root.suffix.lower() == ".json"
    return bool(find_coco_splits(root))


def find_coco_splits(root: Path) -> dict[str, list[Path]]:
    """Find the JSON files of each split: in the split folders, in `annotations`, or in `root` itself. Empty if `root`
    is no COCO dataset. Raises DataError for files without a split in the name among files with one."""
    json_by_split = {split: find_split_json(folder) for split, folder in find_split_folders(root).items()}
    if json_by_split := {split: [path] for split, path in json_by_split.items() if path is not None}:
        return json_by_split
    if files := group_files_by_split(root / "annotations", ANNOTATION_PATTERNS):
        return files
    if (root / ROBOFLOW_FILE).is_file():
        return {"train": [root / ROBOFLOW_FILE]}
    return (
        {} if not find_coco_files(root) or has_class_folders(root) else group_files_by_split(root, ANNOTATION_PATTERNS)
    )


def find_split_json(folder: Path) -> Path | None:
    """Return the JSON file in a split folder: Roboflow's, or the only COCO file if there are no class folders. None if
    there is no such file."""
    if (folder / ROBOFLOW_FILE).is_file():
        return folder / ROBOFLOW_FILE
    json_paths = find_coco_files(folder)
    return json_paths[0] if len(json_paths) == 1 and not has_class_folders(folder) else None


def find_coco_files(folder: Path) -> list[Path]:
    """Return the JSON files directly in a folder if all of them are COCO annotations and there are at most
    `MAX_COCO_FILES`; else an empty list."""
    json_paths = sorted(path for path in folder.glob("*.json") if not is_system_name(path.name) and path.is_file())
    required_keys = ('"annotations"', '"categories"')
    if len(json_paths) > MAX_COCO_FILES or not all(
        contains_word(path, key) for path in json_paths for key in required_keys
    ):
        return []
    return json_paths


def has_class_folders(parent: Path) -> bool:
    """Return whether a folder has class folders: at least two folders of images whose names are not those of splits,
    images or annotations."""
    folders = [Path(entry.path) for entry in list_entries(os.fspath(parent)) if is_folder(entry)]
    class_folders = (
        folder for folder in folders if not has_role_name(folder.name) and next(iterate_images(folder), None)
    )
    return len(list(islice(class_folders, 2))) == 2


def group_files_by_split(folder: Path, patterns: Sequence[str]) -> dict[str, list[Path]]:
    """Group the annotation files of a folder by the split in their names: {split: files}. The files are those of the
    first pattern with a match; they are `train` if no name contains a split. Raises DataError if only some names
    contain a split, and for a name with two splits."""
    for pattern in patterns:
        paths = sorted(path for path in folder.glob(pattern) if not is_system_name(path.name))
        paths_by_split: dict[str | None, list[Path]] = defaultdict(list)
        for path in paths:
            paths_by_split[find_split_word(path.stem)].append(path)
        unnamed = paths_by_split.pop(None, [])
        if paths_by_split and unnamed:
            problem = (
                f"{escape_unprintable(unnamed[0])} has no split in its name, but "
                f"{escape_unprintable(next(iter(paths_by_split.values()))[0])} has one"
            )
            raise DataError(problem, "add train, val or test to the name, or move the file out of the folder")
        if paths_by_split:
            return {split: files for split, files in paths_by_split.items() if split}
        if len(unnamed) == 1 or (unnamed and all(contains_word(path, '"categories"') for path in unnamed)):
            return {"train": unnamed}
    return {}


def open_coco(root: Path, split_seed: int = 0) -> Data:
    """Open a COCO folder or a single JSON file. If there is no `val`, a tenth of `train` is held out.

    Raises DataError for JSON that is not COCO's, for missing or repeated ids, and for missing images.
    """
    files = {"train": [root]} if root.is_file() else find_coco_splits(root)
    documents = {path: read_coco_json(path) for paths in files.values() for path in paths}
    names: dict[int, str] = {}
    for path, document in documents.items():
        for category_id, name in read_categories(document, escape_unprintable(path)).items():
            if names.setdefault(category_id, name) != name:
                problem = f"category {category_id} is named {escape_unprintable(name)}"
                other_name = escape_unprintable(names[category_id])
                raise DataError(
                    f"{escape_unprintable(path)}: {problem}, but {other_name} in another file", "use one name"
                )
    names, notes = drop_unused_names(names, documents.values())
    if any("keypoints" in annotation for document in documents.values() for annotation in document["annotations"]):
        notes.append("keypoints are ignored: only boxes and masks are read")
    classes = {category_id: index for index, category_id in enumerate(sorted(names))}
    scenes = {
        split: [scene for path in paths for scene in read_coco_scenes(documents[path], path, classes)]
        for split, paths in files.items()
    }
    for split, paths in files.items():
        check_unique_images([scene.image for scene in scenes[split]], ", ".join(map(escape_unprintable, paths)))
    data = build_scene_data(
        escape_unprintable(root), [names[category_id] for category_id in sorted(names)], scenes, split_seed, notes
    )
    return replace(data, frequency=read_class_frequencies(documents.values()))


def read_coco_json(path: Path) -> dict[str, Any]:
    """Read a JSON file, and check that it has COCO's lists of images, annotations and categories. Raises DataError for
    other files."""
    origin = escape_unprintable(path)
    try:
        document = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{origin} is not valid JSON ({str(error)[:80]})", "fix or replace the file") from None
    lists = ("images", "annotations", "categories")
    if not isinstance(document, dict):
        raise DataError(f"{origin} is not a COCO file", f"a COCO file has the lists {', '.join(lists)}")
    if missing := [name for name in lists if not isinstance(document.get(name), list)]:
        hint = f"add {', '.join(missing)}; a COCO file has the lists {', '.join(lists)}"
        if missing == ["categories"]:
            hint = f'add "categories": [{example_categories(document)}] with the names of your classes'
        raise DataError(f"{origin} has no list {' and '.join(missing)}", hint)
    for name in lists:
        if invalid_entry := next((entry for entry in document[name] if not isinstance(entry, dict)), None):
            raise DataError(f"{origin}: {str(invalid_entry)[:60]} in {name} is not a JSON object", "fix this entry")
    return document


def example_categories(document: dict[str, Any]) -> str:
    """Format entries of a missing `categories` list, as JSON, for a hint: for the first three category ids of the
    annotations."""
    annotations = (annotation for annotation in document["annotations"] if isinstance(annotation, dict))
    category_ids = sorted(
        {annotation["category_id"] for annotation in annotations if is_integer(annotation.get("category_id"))}
    )
    entries = [json.dumps({"id": category_id, "name": f"class {category_id}"}) for category_id in category_ids[:3]]
    return ", ".join(entries + ["…"] * (len(category_ids) > 3))


def read_categories(document: dict[str, Any], origin: str) -> dict[int, str]:
    """Read {category id: class name} of a COCO file. Raises DataError for ids that are not integers, names that are not
    text, and duplicate ids."""
    names: dict[int, str] = {}
    for category in document["categories"]:
        location = f"{origin}, category {shorten_value(category)}"
        category_id, name = read_id(category, "id", location), read_class_name(category.get("name"), location)
        if category_id in names:
            raise DataError(f"{origin}: two categories have the id {category_id}", "use unique ids")
        names[category_id] = normalise_name(name)
    return names


def drop_unused_names(names: dict[int, str], documents: Collection[dict[str, Any]]) -> tuple[dict[int, str], list[str]]:
    """Drop categories that no annotation uses and that duplicate others: Roboflow's entry for the supercategory, and a
    second category with the same name. Returns {category id: name} of the kept categories, and a note for each dropped
    category."""
    used = {parse_integer_id(entry.get("category_id")) for document in documents for entry in document["annotations"]}
    entries_by_id = {parse_integer_id(entry["id"]): entry for document in documents for entry in document["categories"]}
    supercategories = {
        category_id: normalise_name(str(entry.get("supercategory") or "none")).strip()
        for category_id, entry in entries_by_id.items()
    }
    categories, notes = dict(names), []
    for category_id in sorted(names.keys() - used):
        name = names[category_id]
        other_ids = [other_id for other_id in categories if other_id != category_id]
        if supercategories[category_id] == "none" and any(supercategories[other_id] == name for other_id in other_ids):
            reason = "it is the supercategory of others"
        elif any(categories[other_id] == name for other_id in other_ids):
            reason = "another category has its name"
        else:
            continue
        del categories[category_id]
        notes.append(
            f"category {category_id} ({escape_unprintable(name)}) is ignored: no annotation uses it, and {reason}"
        )
    return categories, notes


def parse_integer_id(value: Any) -> int | None:
    """Convert an id to an integer; None for values that `read_id` rejects."""
    return int(value) if is_integer(value) or (isinstance(value, float) and value.is_integer()) else None


def read_class_frequencies(documents: Iterable[dict[str, Any]]) -> dict[str, str]:
    """Read {class: rare, common or frequent} for the classes that have a frequency, as those of LVIS."""
    entries = [
        entry
        for document in documents
        for entry in document["categories"]
        if entry.get("frequency") in LVIS_FREQUENCY_NAMES
    ]
    return {normalise_name(entry["name"].strip()): LVIS_FREQUENCY_NAMES[entry["frequency"]] for entry in entries}


def read_verified_classes(
    image_entry: dict[str, Any], classes: dict[int, int], location: str
) -> VerifiedClasses | None:
    """Read the verified classes of an image (see `VerifiedClasses`); None for datasets that are not federated.
    `classes` maps category ids to class indices. Raises DataError, with `location`, for unknown categories."""
    index_arrays = []
    for name in ("neg_category_ids", "not_exhaustive_category_ids"):
        category_ids = image_entry.get(name, [])
        if not isinstance(category_ids, list) or any(
            not is_integer(category_id) or category_id not in classes for category_id in category_ids
        ):
            raise DataError(f"{location}: {name} {str(category_ids)[:60]} are not categories", "write a list of ids")
        index_arrays.append(np.array([classes[category_id] for category_id in category_ids], np.int64))
    return VerifiedClasses(*index_arrays) if "neg_category_ids" in image_entry else None


def get_image_file_name(image_entry: dict[str, Any]) -> Any:
    """Return the file name in the entry of an image. LVIS has no file names, so that the last part of the URL is
    used."""
    url = image_entry.get("coco_url")
    return image_entry.get("file_name", url.rsplit("/", 1)[-1] if isinstance(url, str) else None)


def read_coco_scenes(document: dict[str, Any], path: Path, classes: dict[int, int]) -> list[Scene]:
    """Read the images of a COCO file with their objects. `classes` maps category ids to class indices. Raises DataError
    for invalid entries and missing images."""
    origin, images = escape_unprintable(path), index_nearby_images(path)
    shapes_by_image: dict[int, list[Shape]] = defaultdict(list)
    images_by_id: dict[int, dict[str, Any]] = {}
    for entry in document["images"]:
        location = f"{origin}, image {shorten_value(entry)}"
        image_id = read_id(entry, "id", location)
        if not isinstance(get_image_file_name(entry), str):
            raise DataError(f"{location} has no file_name", "add the name of its image file")
        if image_id in images_by_id:
            raise DataError(f"{origin}: two images have the id {image_id}", "use unique ids")
        images_by_id[image_id] = entry
    for entry in document["annotations"]:
        location = f"{origin}, annotation {shorten_value(entry.get('id'))}"
        image_id, category = read_id(entry, "image_id", location), read_id(entry, "category_id", location)
        if image_id not in images_by_id:
            raise DataError(f"{location}: there is no image {image_id}", "add the image, or delete the annotation")
        if category not in classes:
            raise DataError(f"{location}: there is no category {category}", "add it to categories")
        shapes_by_image[image_id].append(parse_coco_shape(entry, classes[category], location))
    return [
        Scene(
            images.find(get_image_file_name(entry), origin),
            tuple(shapes_by_image[image_id]),
            path,
            get_stated_size(entry),
            verified=read_verified_classes(entry, classes, f"{origin}, image {image_id}"),
        )
        for image_id, entry in images_by_id.items()
    ]


def index_nearby_images(json_path: Path) -> FileIndex:
    """Index the image files of a JSON file: those in the first existing folder of the layouts above (see the
    module)."""
    parent = json_path.parent.parent if json_path.parent.name == "annotations" else json_path.parent
    folders = [parent / subfolder / json_path.stem.split("_", 1)[-1] for subfolder in ("", "images")]
    split = find_split_word(json_path.stem)
    split_folders = [find_split_folders(parent / subfolder) for subfolder in ("", "images")]
    folders += [folder_by_split[split] for folder_by_split in split_folders if split in folder_by_split] + [
        parent / "images",
        parent,
    ]
    folder = next((folder for folder in folders if folder.is_dir()), parent)
    return FileIndex(list_images(folder), folder)


def get_stated_size(image_entry: dict[str, Any]) -> tuple[int, int] | None:
    """Return the (height, width) in the entry of an image; None if the entry does not state it."""
    height, width = image_entry.get("height"), image_entry.get("width")
    if isinstance(height, int) and isinstance(width, int) and min(height, width) > 0:
        return height, width
    return None


def parse_coco_shape(annotation: dict[str, Any], label: int, location: str) -> Shape:
    """Parse an annotation as an object of class index `label`. Raises DataError, with `location`, for invalid
    coordinates and run lengths."""
    box, mask, crowd = (
        annotation.get("bbox"),
        annotation.get("segmentation"),
        read_flag(annotation.get("iscrowd"), "iscrowd", location),
    )
    corners = None
    if box is not None:
        coordinates = parse_coordinates(box if isinstance(box, list) else [box], location)
        if len(coordinates) != 4 or min(coordinates[2:]) < 0:
            raise DataError(
                f"{location}: bbox {coordinates[:8]} is not left, top, width, height", "fix this annotation"
            )
        corners = (coordinates[0], coordinates[1], coordinates[0] + coordinates[2], coordinates[1] + coordinates[3])
    if isinstance(mask, dict):
        return Shape(label, corners, (), parse_run_lengths(mask, location), crowd=crowd)
    if mask is not None and not isinstance(mask, list):
        raise DataError(
            f"{location}: segmentation is neither polygons nor run lengths", "fix or delete the segmentation"
        )
    polygons = []
    for polygon in mask or []:
        coordinates = parse_coordinates(polygon if isinstance(polygon, list) else [polygon], location)
        if len(coordinates) % 2:
            problem = f"a polygon has an odd number of coordinates, {len(coordinates)}"
            raise DataError(f"{location}: {problem}", "write pairs of x and y")
        if len(coordinates) > 2 * MAX_DEGENERATE_CORNERS:
            polygons.append(np.array(coordinates, np.float32).reshape(-1, 2))
    if corners is None and not polygons:
        raise DataError(f"{location} has neither bbox nor segmentation", "add one of them")
    return Shape(label, corners, tuple(polygons), None, crowd=crowd)


def parse_run_lengths(mask: dict[str, Any], location: str) -> list[int]:
    """Parse the run lengths of a segmentation, compressed or not. Raises DataError, with `location`, if they are
    invalid or do not cover the image."""
    counts, size = mask.get("counts"), mask.get("size")
    try:
        runs = decode_compressed_rle(counts) if isinstance(counts, str) else counts
        if not isinstance(runs, list) or not all(is_integer(run) and run >= 0 for run in runs):
            raise ValueError("counts are not run lengths")
        if not isinstance(size, list) or len(size) != 2 or sum(runs) != size[0] * size[1]:
            raise ValueError(f"the run lengths cover {sum(runs)} pixels, but size is {size}")
    except (ValueError, TypeError) as error:
        raise DataError(f"{location}: {error}", "fix or delete the segmentation") from None
    return runs
