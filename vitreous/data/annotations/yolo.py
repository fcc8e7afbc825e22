"""YOLO annotations: a text file of boxes or polygons for each image, in relative coordinates.

    DIR/data.yaml            names: [a, b] or {0: a, 1: b}; train, val, test: folders of images, or lists of them
    DIR/images/train/a.jpg
    DIR/labels/train/a.txt   lines of class, centre x, centre y, width, height; or of class, x, y, x, y, ...

Label files may also be next to their images. With `kpt_shape` in data.yaml, the values after a box are keypoints, which
are ignored. Without `data.yaml`, the splits are the folders below `images`, and classes are named by `classes.txt` or
by their indices. An image with no label file, or an empty one, has no object.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np

from vitreous.config import read_yaml
from vitreous.data.annotations.keypoints import (
    UNSTATED_KEYPOINTS,
    KeypointShape,
    check_unstated_keypoints,
    count_keypoint_values,
    read_keypoint_shape,
)
from vitreous.data.annotations.objects import Scene, parse_coordinates, parse_in_threads, read_image_size
from vitreous.data.annotations.scenes import build_scene_data
from vitreous.data.annotations.shapes import Shape, box_to_corners, mask_to_polygon
from vitreous.data.layouts.file_names import normalise_name, resolve_unicode_path
from vitreous.data.layouts.folder import list_images
from vitreous.data.layouts.split_names import find_split_folders, is_system_name, match_split_names, parse_split_name
from vitreous.data.split import Data
from vitreous.data.text_files import read_lines, read_text
from vitreous.errors import DataError, UsageError, escape_unprintable

CONFIG_FILES = ("data.yaml", "data.yml", "dataset.yaml")
YOLO_CLASSES_FILE = "classes.txt"
LabelLine = tuple[int, tuple[float, ...]]  # a class index, and relative coordinates


def is_yolo(root: Path) -> bool:
    """Return whether a folder is a YOLO dataset: it has data.yaml, or text files below `labels` next to `images`, or
    classes.txt and text files next to the images."""
    if has_config(root) or not (root / "images").is_dir():
        return has_config(root)
    labelled = any((root / "labels").rglob("*.txt"))
    return labelled or ((root / YOLO_CLASSES_FILE).is_file() and any((root / "images").rglob("*.txt")))


def has_config(root: Path) -> bool:
    """Return whether a folder has data.yaml, which may refer to lists such as train.txt next to it."""
    return any((root / name).is_file() for name in CONFIG_FILES)


def open_yolo(root: Path, split_seed: int = 0) -> Data:
    """Open a YOLO folder. Without `val`, a tenth of `train` is held out.

    Raises DataError for an invalid data.yaml, missing folders, text files without an image, classes without a name, and
    lines that are neither boxes nor polygons.
    """
    place = next((root / name for name in CONFIG_FILES if (root / name).is_file()), None)
    names, listed, keypoints = (
        read_data_yaml(place) if place else (read_yolo_classes(root), list_images_by_split(root), UNSTATED_KEYPOINTS)
    )
    images = [image for rows in listed.values() for image in rows]
    check_listed_images(images)
    lines = dict(zip(images, parse_in_threads(images, partial(parse_label_file, keypoints=keypoints)), strict=True))
    if keypoints == UNSTATED_KEYPOINTS:
        check_unstated_keypoints(lines)
    numbers = {number for rows in lines.values() for number, _ in rows}
    notes = (
        ["keypoints are ignored: only the boxes of the label files are read"]
        if count_keypoint_values(keypoints)
        else []
    )
    if not names:
        names = {number: f"class {number}" for number in range(1 + max(numbers, default=0))}
        notes.append(f"classes are numbered, as neither data.yaml nor {YOLO_CLASSES_FILE} names them")
    if unknown := sorted(numbers - names.keys()):
        image = next(one for one, rows in lines.items() if any(number == unknown[0] for number, _ in rows))
        problem = f"{escape_unprintable(find_label_file(image))} has class {unknown[0]}, which has no name"
        raise DataError(problem, f"add it to {escape_unprintable(place or root / YOLO_CLASSES_FILE)}")
    classes = {number: position for position, number in enumerate(sorted(names))}
    scenes = {
        split: [parse_yolo_scene(image, lines[image], classes) for image in rows] for split, rows in listed.items()
    }
    titles = [names[number] for number in sorted(names)]
    return build_scene_data(escape_unprintable(root), titles, scenes, split_seed, notes)


def read_data_yaml(place: Path) -> tuple[dict[int, str], dict[str, list[Path]], KeypointShape]:
    """Read class names by index, the images of each split, and the keypoint shape. Raises DataError."""
    origin = escape_unprintable(place)
    try:
        config = read_yaml(read_text(place))
    except (UsageError, ValueError) as error:
        raise DataError(f"{origin} is not valid YAML ({str(error)[:80]})", "fix the file") from None
    names = config.get("names") if isinstance(config, dict) else None
    names = dict(enumerate(names)) if isinstance(names, list) else names
    table: dict[int, str] = {}
    for number, name in names.items() if isinstance(names, dict) else ():
        if not str(number).isdecimal() or not isinstance(name, str | int) or isinstance(name, bool):
            raise DataError(f"{origin}: names has {number}: {name}", "write an index and a name for each class")
        table[int(number)] = normalise_name(str(name).strip())
    if not table:
        raise DataError(f"{origin} has no class names", "add names: [cat, dog]")
    home = place.parent / str(config.get("path") or ".")
    home = home if home.is_dir() else place.parent
    listed = {}
    keys = [key for key, value in config.items() if isinstance(key, str) and value]
    for split, key in match_split_names(keys, origin).items():
        words = config[key] if isinstance(config[key], list) else [config[key]]
        listed[split] = [image for word in words for image in list_split_images(str(word), home, origin)]
    return table, listed, read_keypoint_shape(config, origin)


def list_split_images(word: str, home: Path, origin: str) -> list[Path]:
    """List the images of a split: those below a folder, or in a list file. Raises DataError if neither exists."""
    for place in (home / word, home / word.removeprefix("../")):
        if place.is_dir():
            return list_images(place)
        if place.is_file():
            paths = [home / line.strip() for line in read_lines(place) if line.strip()]
            return [Path(resolve_unicode_path(path) or path) for path in paths]
    raise DataError(
        f"{origin}: {escape_unprintable(word)} does not exist", "use a folder of images below the file's folder"
    )


def list_images_by_split(root: Path) -> dict[str, list[Path]]:
    """List the images of each split folder below `images`; all are `train` if there are none."""
    homes = find_split_folders(root / "images")
    return {name: list_images(home) for name, home in homes.items()} or {"train": list_images(root / "images")}


def read_yolo_classes(root: Path) -> dict[int, str]:
    """Read the names in classes.txt by index; empty if there is no such file."""
    places = [root / YOLO_CLASSES_FILE, root / "labels" / YOLO_CLASSES_FILE]
    place = next((one for one in places if one.is_file()), None)
    lines = read_lines(place) if place else []
    return dict(enumerate(normalise_name(line.strip()) for line in lines if line.strip()))


def find_label_file(image: Path) -> Path:
    """Return the label file of an image: with `labels` in place of the last `images` of its path, else next to the
    image."""
    beside = image.with_suffix(".txt")
    parts = list(image.parts)
    place = beside
    if "images" in parts[:-1]:
        parts[len(parts) - 2 - parts[-2::-1].index("images")] = "labels"
        place = Path(*parts).with_suffix(".txt")
        if not place.parent.is_dir() and (split := parse_split_name(place.parent.name)):
            place = find_split_folders(place.parent.parent).get(split, place.parent) / place.name
    return Path(resolve_unicode_path(place) or resolve_unicode_path(beside) or place)


def check_listed_images(images: list[Path]) -> None:
    """Raise DataError for a missing listed image, for a label file with two images, and for a label file without an
    image in folders that contain only listed images."""
    if missing := next((image for image in images if not image.is_file()), None):
        raise DataError(f"the image {escape_unprintable(missing)} does not exist", "restore or unlist it")
    for place, count in Counter(map(find_label_file, dict.fromkeys(images))).items():
        if count > 1 and place.is_file():
            raise DataError(
                f"{escape_unprintable(place)} belongs to {count} images of its name", "rename or delete one"
            )
    for labels, folder in sorted({(find_label_file(image).parent, image.parent) for image in images}):
        if labels != folder and labels.is_dir():
            stems = {normalise_name(place.stem) for place in folder.iterdir()}
            for place in sorted(labels.glob("*.txt")):
                known = normalise_name(place.stem) in stems or place.name == YOLO_CLASSES_FILE
                if not known and not is_system_name(place.name):
                    problem = f"{escape_unprintable(place)} has no image of its name in {escape_unprintable(folder)}"
                    raise DataError(problem, "restore the image, or delete the file")


def parse_label_file(image: Path, keypoints: KeypointShape = UNSTATED_KEYPOINTS) -> list[LabelLine]:
    """Read the lines of an image's label file, without keypoint values; empty if there is no file. Raises DataError."""
    place = find_label_file(image)
    if not place.is_file() or not place.stat().st_size:
        return []
    rows = []
    for number, text in enumerate(read_lines(place), 1):
        words = text.split()
        if not words:
            continue
        where = f"{escape_unprintable(place)}, line {number}"
        label, *shares = parse_coordinates(words, where)
        if extra := count_keypoint_values(keypoints):
            if len(shares) not in (4, 4 + extra):
                hint = f"write class, box and {extra} keypoint values, for kpt_shape {list(keypoints or ())}"
                raise DataError(f"{where} has {len(words)} numbers", hint)
            shares = shares[:4]
        if label < 0 or label != int(label):
            raise DataError(f"{where}: {words[0]} is not a class index", "use integers from 0")
        if len(shares) != 4 and (len(shares) < 6 or len(shares) % 2):
            hint = "write class, centre x, centre y, width, height; or class and at least three pairs of x and y"
            if len(shares) > 4 and (len(shares) - 4) % 3 == 0:
                hint += f"; for keypoints add kpt_shape: [{(len(shares) - 4) // 3}, 3] to data.yaml"
            raise DataError(f"{where} has {len(words)} numbers", hint)
        if min(shares) < -1 or max(shares) > 2:
            raise DataError(f"{where}: {max(shares, key=abs):g} is not between 0 and 1", "divide by width and height")
        rows.append((int(label), tuple(shares)))
    return rows


def parse_yolo_scene(image: Path, lines: list[LabelLine], classes: dict[int, int]) -> Scene:
    """Convert label lines to a scene with objects in pixels. Raises DataError for an unreadable image."""
    if not lines:
        return Scene(image, (), find_label_file(image))
    height, width = read_image_size(image)
    shapes = []
    for number, shares in lines:
        if len(shares) == 4:
            x, y, w, h = shares[0] * width, shares[1] * height, shares[2] * width, shares[3] * height
            shapes.append(Shape(classes[number], (x - w / 2, y - h / 2, x + w / 2, y + h / 2)))
        else:
            corners = np.array(shares, np.float32).reshape(-1, 2) * np.array([width, height], np.float32)
            shapes.append(Shape(classes[number], None, (corners,)))
    return Scene(image, tuple(shapes), find_label_file(image))


def format_yolo_line(label: int, box: np.ndarray, size: tuple[int, int], mask: np.ndarray | None = None) -> str:
    """Format an object on an image of `size` (H, W) as a line that `parse_label_file` reads.

    The line has the class and, in relative coordinates, the corners of its mask (H, W) bool, or without a mask the
    centre, width and height of its box. A polygon reproduces the mask exactly, and its box is the bounding box of the
    mask. An empty mask is written as the corners of the box, since files of polygons cannot contain boxes.
    """
    height, width = size
    left, top, right, bottom = (float(edge) for edge in box)
    if mask is None:
        shares = [(left + right) / 2 / width, (top + bottom) / 2 / height]
        shares += [(right - left) / width, (bottom - top) / height]
    else:
        corners = mask_to_polygon(mask) if mask.any() else box_to_corners(box)
        shares = [float(number) for number in (corners / np.array([width, height])).ravel()]
    return f"{label} " + " ".join(f"{share:.9g}" for share in shares)
