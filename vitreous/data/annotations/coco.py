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

LVIS_FREQUENCY_NAMES = {
    "r": "rare",
    "c": "common",
    "f": "frequent",
}  # LVIS: in up to 10, up to 100, and more training images
ANNOTATION_PATTERNS = ("instances_*.json", "*.json")  # in `annotations`, the first pattern with a match
ROBOFLOW_FILE = "_annotations.coco.json"  # in a split folder
MAX_COCO_FILES = 16  # maximum JSON files in a folder; more are files of single images
MAX_DEGENERATE_CORNERS = 2  # polygons with at most this many corners have no area and are dropped


def is_coco(root: Path) -> bool:
    """Return whether a folder is a COCO dataset, or a file is one of its JSON files."""
    if root.is_file():
        return root.suffix.lower() == ".json"
    return bool(find_coco_splits(root))


def find_coco_splits(root: Path) -> dict[str, list[Path]]:
    """Return the JSON files of each split, from split folders, `annotations`, or next to the images. Raises DataError
    as `group_files_by_split`."""
    inside = {split: find_split_json(home) for split, home in find_split_folders(root).items()}
    if inside := {split: [place] for split, place in inside.items() if place is not None}:
        return inside
    if files := group_files_by_split(root / "annotations", ANNOTATION_PATTERNS):
        return files
    if (root / ROBOFLOW_FILE).is_file():
        return {"train": [root / ROBOFLOW_FILE]}
    return (
        {} if not find_coco_files(root) or has_class_folders(root) else group_files_by_split(root, ANNOTATION_PATTERNS)
    )


def find_split_json(home: Path) -> Path | None:
    """Return the JSON file in a split folder: Roboflow's, or the only one, if there are no class folders."""
    if (home / ROBOFLOW_FILE).is_file():
        return home / ROBOFLOW_FILE
    places = find_coco_files(home)
    return places[0] if len(places) == 1 and not has_class_folders(home) else None


def find_coco_files(home: Path) -> list[Path]:
    """Return the JSON files directly in a folder, if all are COCO's and at most `MAX_COCO_FILES`; else none."""
    places = sorted(place for place in home.glob("*.json") if not is_system_name(place.name) and place.is_file())
    words = ('"annotations"', '"categories"')
    if len(places) > MAX_COCO_FILES or not all(contains_word(place, word) for place in places for word in words):
        return []
    return places


def has_class_folders(home: Path) -> bool:
    """Return whether a folder has at least two folders of images that are not named like splits, images or
    annotations."""
    folders = [Path(entry.path) for entry in list_entries(os.fspath(home)) if is_folder(entry)]
    classes = (place for place in folders if not has_role_name(place.name) and next(iterate_images(place), None))
    return len(list(islice(classes, 2))) == 2


def group_files_by_split(folder: Path, patterns: Sequence[str]) -> dict[str, list[Path]]:
    """Return the files of each split, from the first pattern with a match. Files are `train` if no name contains a
    split. Raises DataError for a file without a split name among others with one, and for a name with two."""
    for pattern in patterns:
        places = sorted(place for place in folder.glob(pattern) if not is_system_name(place.name))
        named: dict[str | None, list[Path]] = defaultdict(list)
        for place in places:
            named[find_split_word(place.stem)].append(place)
        unnamed = named.pop(None, [])
        if named and unnamed:
            problem = (
                f"{escape_unprintable(unnamed[0])} names no split, but "
                f"{escape_unprintable(next(iter(named.values()))[0])} does"
            )
            raise DataError(problem, "add train, val or test to its name, or move it out of the folder")
        if named:
            return {split: files for split, files in named.items() if split}
        if len(unnamed) == 1 or (unnamed and all(contains_word(place, '"categories"') for place in unnamed)):
            return {"train": unnamed}
    return {}


def open_coco(root: Path, split_seed: int = 0) -> Data:
    """Open a COCO folder or one JSON file. Without `val`, a tenth of `train` is held out.

    Raises DataError for other JSON, for missing or repeated ids, and for missing images.
    """
    files = {"train": [root]} if root.is_file() else find_coco_splits(root)
    documents = {place: read_coco_json(place) for places in files.values() for place in places}
    names: dict[int, str] = {}
    for place, document in documents.items():
        for number, name in read_categories(document, escape_unprintable(place)).items():
            if names.setdefault(number, name) != name:
                problem = f"category {number} is {escape_unprintable(names[number])} and {escape_unprintable(name)}"
                raise DataError(f"{escape_unprintable(place)}: {problem} in another file", "use one name")
    names, notes = drop_unused_names(names, documents.values())
    if any("keypoints" in row for document in documents.values() for row in document["annotations"]):
        notes.append("keypoints are ignored: only boxes and masks are read")
    classes = {number: place for place, number in enumerate(sorted(names))}
    scenes = {
        split: [scene for place in places for scene in read_coco_scenes(documents[place], place, classes)]
        for split, places in files.items()
    }
    for split, places in files.items():
        check_unique_images([scene.image for scene in scenes[split]], ", ".join(map(escape_unprintable, places)))
    data = build_scene_data(
        escape_unprintable(root), [names[number] for number in sorted(names)], scenes, split_seed, notes
    )
    return replace(data, frequency=read_class_frequencies(documents.values()))


def read_coco_json(place: Path) -> dict[str, Any]:
    """Read a JSON file with COCO's lists. Raises DataError."""
    origin = escape_unprintable(place)
    try:
        document = json.loads(read_text(place))
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
        if wrong := next((one for one in document[name] if not isinstance(one, dict)), None):
            raise DataError(f"{origin}: {str(wrong)[:60]} in {name} is not a JSON object", "fix this entry")
    return document


def example_categories(document: dict[str, Any]) -> str:
    """Format example entries for the first category ids of the annotations, as JSON."""
    rows = (row for row in document["annotations"] if isinstance(row, dict))
    numbers = sorted({row["category_id"] for row in rows if is_integer(row.get("category_id"))})
    entries = [json.dumps({"id": number, "name": f"class {number}"}) for number in numbers[:3]]
    return ", ".join(entries + ["…"] * (len(numbers) > 3))


def read_categories(document: dict[str, Any], origin: str) -> dict[int, str]:
    """Read {id: name} of the categories. Raises DataError for ids that are not integers, names that are not text, and
    duplicate ids."""
    names: dict[int, str] = {}
    for row in document["categories"]:
        where = f"{origin}, category {shorten_value(row)}"
        number, name = read_id(row, "id", where), read_class_name(row.get("name"), where)
        if number in names:
            raise DataError(f"{origin}: two categories have the id {number}", "use unique ids")
        names[number] = normalise_name(name)
    return names


def drop_unused_names(names: dict[int, str], documents: Collection[dict[str, Any]]) -> tuple[dict[int, str], list[str]]:
    """Drop unused categories that duplicate others: Roboflow's supercategory entry, and a second category with the same
    name. Return {id: name} of the rest, and a note about each dropped one."""
    used = {parse_integer_id(row.get("category_id")) for document in documents for row in document["annotations"]}
    rows = {parse_integer_id(row["id"]): row for document in documents for row in document["categories"]}
    parents = {number: normalise_name(str(row.get("supercategory") or "none")).strip() for number, row in rows.items()}
    categories, notes = dict(names), []
    for number in sorted(names.keys() - used):
        name = names[number]
        others = [other for other in categories if other != number]
        if parents[number] == "none" and any(parents[other] == name for other in others):
            reason = "it is the supercategory of others"
        elif any(categories[other] == name for other in others):
            reason = "another category has its name"
        else:
            continue
        del categories[number]
        notes.append(f"category {number} ({escape_unprintable(name)}) is ignored: no annotation uses it, and {reason}")
    return categories, notes


def parse_integer_id(value: Any) -> int | None:
    """Return an id as an integer, None if `read_id` would reject it."""
    return int(value) if is_integer(value) or (isinstance(value, float) and value.is_integer()) else None


def read_class_frequencies(documents: Iterable[dict[str, Any]]) -> dict[str, str]:
    """Return {class: rare, common or frequent} for the classes of a federated dataset that have a frequency."""
    rows = [
        row for document in documents for row in document["categories"] if row.get("frequency") in LVIS_FREQUENCY_NAMES
    ]
    return {normalise_name(row["name"].strip()): LVIS_FREQUENCY_NAMES[row["frequency"]] for row in rows}


def read_verified_classes(row: dict[str, Any], classes: dict[int, int], where: str) -> VerifiedClasses | None:
    """Read the verified classes of an image of a federated dataset; None for other datasets. Raises DataError, with
    `where`, for unknown categories."""
    parts = []
    for name in ("neg_category_ids", "not_exhaustive_category_ids"):
        listed = row.get(name, [])
        if not isinstance(listed, list) or any(not is_integer(number) or number not in classes for number in listed):
            raise DataError(f"{where}: {name} {str(listed)[:60]} are not categories", "write a list of ids")
        parts.append(np.array([classes[number] for number in listed], np.int64))
    return VerifiedClasses(*parts) if "neg_category_ids" in row else None


def get_image_file_name(row: dict[str, Any]) -> Any:
    """Return the file name of an image; LVIS has none, so the last part of its URL is used."""
    address = row.get("coco_url")
    return row.get("file_name", address.rsplit("/", 1)[-1] if isinstance(address, str) else None)


def read_coco_scenes(document: dict[str, Any], place: Path, classes: dict[int, int]) -> list[Scene]:
    """Read the images of a split with their objects. Raises DataError."""
    origin, images = escape_unprintable(place), index_nearby_images(place)
    rows: dict[int, list[Shape]] = defaultdict(list)
    known: dict[int, dict[str, Any]] = {}
    for row in document["images"]:
        where = f"{origin}, image {shorten_value(row)}"
        number = read_id(row, "id", where)
        if not isinstance(get_image_file_name(row), str):
            raise DataError(f"{where} has no file_name", "add the name of its image file")
        if number in known:
            raise DataError(f"{origin}: two images have the id {number}", "use unique ids")
        known[number] = row
    for row in document["annotations"]:
        where = f"{origin}, annotation {shorten_value(row.get('id'))}"
        number, category = read_id(row, "image_id", where), read_id(row, "category_id", where)
        if number not in known:
            raise DataError(f"{where}: there is no image {number}", "add the image, or delete the annotation")
        if category not in classes:
            raise DataError(f"{where}: there is no category {category}", "add it to categories")
        rows[number].append(parse_coco_shape(row, classes[category], where))
    return [
        Scene(
            images.find(get_image_file_name(row), origin),
            tuple(rows[number]),
            place,
            get_stated_size(row),
            verified=read_verified_classes(row, classes, f"{origin}, image {number}"),
        )
        for number, row in known.items()
    ]


def index_nearby_images(place: Path) -> FileIndex:
    """Index the image files for a JSON file: those in the nearest folder with a matching name."""
    home = place.parent.parent if place.parent.name == "annotations" else place.parent
    folders = [home / inner / place.stem.split("_", 1)[-1] for inner in ("", "images")]
    split = find_split_word(place.stem)
    inside = [find_split_folders(home / inner) for inner in ("", "images")]
    folders += [homes[split] for homes in inside if split in homes] + [home / "images", home]
    folder = next((folder for folder in folders if folder.is_dir()), home)
    return FileIndex(list_images(folder), folder)


def get_stated_size(row: dict[str, Any]) -> tuple[int, int] | None:
    """Return the (height, width) of an image in the JSON file; None if it is not stated."""
    height, width = row.get("height"), row.get("width")
    if isinstance(height, int) and isinstance(width, int) and min(height, width) > 0:
        return height, width
    return None


def parse_coco_shape(row: dict[str, Any], label: int, where: str) -> Shape:
    """Parse one annotation. Raises DataError, with `where`, for invalid coordinates and run lengths."""
    box, mask, crowd = row.get("bbox"), row.get("segmentation"), read_flag(row.get("iscrowd"), "iscrowd", where)
    corners = None
    if box is not None:
        numbers = parse_coordinates(box if isinstance(box, list) else [box], where)
        if len(numbers) != 4 or min(numbers[2:]) < 0:
            raise DataError(f"{where}: bbox {numbers[:8]} is not left, top, width, height", "fix this annotation")
        corners = (numbers[0], numbers[1], numbers[0] + numbers[2], numbers[1] + numbers[3])
    if isinstance(mask, dict):
        return Shape(label, corners, (), parse_run_lengths(mask, where), crowd=crowd)
    if mask is not None and not isinstance(mask, list):
        raise DataError(f"{where}: segmentation is neither polygons nor run lengths", "fix or delete it")
    polygons = []
    for part in mask or []:
        numbers = parse_coordinates(part if isinstance(part, list) else [part], where)
        if len(numbers) % 2:
            raise DataError(f"{where}: a polygon of {len(numbers)} numbers", "write pairs of x and y")
        if len(numbers) > 2 * MAX_DEGENERATE_CORNERS:
            polygons.append(np.array(numbers, np.float32).reshape(-1, 2))
    if corners is None and not polygons:
        raise DataError(f"{where} has neither bbox nor segmentation", "add one of them")
    return Shape(label, corners, tuple(polygons), None, crowd=crowd)


def parse_run_lengths(mask: dict[str, Any], where: str) -> list[int]:
    """Parse the run lengths of a segmentation, compressed or not. Raises DataError."""
    counts, size = mask.get("counts"), mask.get("size")
    try:
        runs = decode_compressed_rle(counts) if isinstance(counts, str) else counts
        if not isinstance(runs, list) or not all(is_integer(run) and run >= 0 for run in runs):
            raise ValueError("counts are not run lengths")
        if not isinstance(size, list) or len(size) != 2 or sum(runs) != size[0] * size[1]:
            raise ValueError(f"the run lengths cover {sum(runs)} pixels, but size is {size}")
    except (ValueError, TypeError) as error:
        raise DataError(f"{where}: {error}", "fix or delete it") from None
    return runs
