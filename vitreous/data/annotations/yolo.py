"""YOLO annotations: a text file of boxes or polygons for each image, in relative coordinates.

    DIR/data.yaml            names: [a, b] or {0: a, 1: b}; train, val, test: folders of images, or lists of them
    DIR/images/train/a.jpg
    DIR/labels/train/a.txt   lines of class, centre x, centre y, width, height; or of class, x, y, x, y, ...

Label files may also be next to their images. If data.yaml has `kpt_shape`, the values after a box are keypoints, which
are ignored. If there is no `data.yaml`, the splits are the folders below `images`, and classes are named by
`classes.txt` or by their indices. An image without a label file, or with an empty label file, has no objects.
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
    """Return whether a folder has a data.yaml (or another file of CONFIG_FILES). Such a folder may also contain image
    lists such as train.txt."""
    return any((root / name).is_file() for name in CONFIG_FILES)


def open_yolo(root: Path, split_seed: int = 0) -> Data:
    """Open a YOLO folder. If there is no `val`, a tenth of `train` is held out.

    Raises DataError for an invalid data.yaml, missing folders, text files without an image, classes without a name, and
    lines that are neither boxes nor polygons.
    """
    config_path = next((root / name for name in CONFIG_FILES if (root / name).is_file()), None)
    names, images_by_split, keypoints = (
        read_data_yaml(config_path)
        if config_path
        else (read_yolo_classes(root), list_images_by_split(root), UNSTATED_KEYPOINTS)
    )
    images = [image for entries in images_by_split.values() for image in entries]
    check_listed_images(images)
    lines = dict(zip(images, parse_in_threads(images, partial(parse_label_file, keypoints=keypoints)), strict=True))
    if keypoints == UNSTATED_KEYPOINTS:
        check_unstated_keypoints(lines)
    class_indices = {class_index for entries in lines.values() for class_index, _ in entries}
    notes = (
        ["keypoints are ignored: only the boxes of the label files are read"]
        if count_keypoint_values(keypoints)
        else []
    )
    if not names:
        names = {class_index: f"class {class_index}" for class_index in range(1 + max(class_indices, default=0))}
        notes.append(f"classes are numbered, as neither data.yaml nor {YOLO_CLASSES_FILE} names them")
    if unnamed_classes := sorted(class_indices - names.keys()):
        image = next(
            labelled_image
            for labelled_image, entries in lines.items()
            if any(class_index == unnamed_classes[0] for class_index, _ in entries)
        )
        problem = f"{escape_unprintable(find_label_file(image))} has class {unnamed_classes[0]}, which has no name"
        raise DataError(problem, f"add it to {escape_unprintable(config_path or root / YOLO_CLASSES_FILE)}")
    classes = {class_index: position for position, class_index in enumerate(sorted(names))}
    scenes = {
        split: [parse_yolo_scene(image, lines[image], classes) for image in entries]
        for split, entries in images_by_split.items()
    }
    class_names = [names[class_index] for class_index in sorted(names)]
    return build_scene_data(escape_unprintable(root), class_names, scenes, split_seed, notes)


def read_data_yaml(config_path: Path) -> tuple[dict[int, str], dict[str, list[Path]], KeypointShape]:
    """Read a data.yaml. Returns {class index: name}, {split: images}, and the keypoint shape. Raises DataError for an
    invalid file and for missing folders."""
    origin = escape_unprintable(config_path)
    try:
        config = read_yaml(read_text(config_path))
    except (UsageError, ValueError) as error:
        raise DataError(f"{origin} is not valid YAML ({str(error)[:80]})", "fix the file") from None
    names = config.get("names") if isinstance(config, dict) else None
    names = dict(enumerate(names)) if isinstance(names, list) else names
    class_names: dict[int, str] = {}
    for class_index, name in names.items() if isinstance(names, dict) else ():
        if not str(class_index).isdecimal() or not isinstance(name, str | int) or isinstance(name, bool):
            raise DataError(f"{origin}: names has {class_index}: {name}", "write an index and a name for each class")
        class_names[int(class_index)] = normalise_name(str(name).strip())
    if not class_names:
        raise DataError(f"{origin} has no class names", "add names: [cat, dog]")
    folder = config_path.parent / str(config.get("path") or ".")
    folder = folder if folder.is_dir() else config_path.parent
    images_by_split = {}
    keys = [key for key, value in config.items() if isinstance(key, str) and value]
    for split, key in match_split_names(keys, origin).items():
        sources = config[key] if isinstance(config[key], list) else [config[key]]
        images_by_split[split] = [
            image for source in sources for image in list_split_images(str(source), folder, origin)
        ]
    return class_names, images_by_split, read_keypoint_shape(config, origin)


def list_split_images(source: str, folder: Path, origin: str) -> list[Path]:
    """List the images of a split of data.yaml. `source` is a folder of images, or a file that lists images, relative to
    `folder`. Raises DataError, with `origin`, if neither exists."""
    for source_path in (folder / source, folder / source.removeprefix("../")):
        if source_path.is_dir():
            return list_images(source_path)
        if source_path.is_file():
            paths = [folder / line.strip() for line in read_lines(source_path) if line.strip()]
            return [Path(resolve_unicode_path(path) or path) for path in paths]
    raise DataError(
        f"{origin}: {escape_unprintable(source)} does not exist", "use a folder of images below the file's folder"
    )


def list_images_by_split(root: Path) -> dict[str, list[Path]]:
    """List the images of each split folder below `images`; all are `train` if there are none."""
    split_folders = find_split_folders(root / "images")
    return {name: list_images(folder) for name, folder in split_folders.items()} or {
        "train": list_images(root / "images")
    }


def read_yolo_classes(root: Path) -> dict[int, str]:
    """Read {class index: name} from classes.txt, in `root` or in `labels`; empty if there is no such file."""
    candidates = [root / YOLO_CLASSES_FILE, root / "labels" / YOLO_CLASSES_FILE]
    path = next((candidate for candidate in candidates if candidate.is_file()), None)
    lines = read_lines(path) if path else []
    return dict(enumerate(normalise_name(line.strip()) for line in lines if line.strip()))


def find_label_file(image: Path) -> Path:
    """Return the path of the label file of an image, which may not exist. Its folder is that of the image with the last
    `images` of the path replaced by `labels`; otherwise the label file is next to the image."""
    sibling_path = image.with_suffix(".txt")
    path_parts = list(image.parts)
    label_path = sibling_path
    if "images" in path_parts[:-1]:
        path_parts[len(path_parts) - 2 - path_parts[-2::-1].index("images")] = "labels"
        label_path = Path(*path_parts).with_suffix(".txt")
        if not label_path.parent.is_dir() and (split := parse_split_name(label_path.parent.name)):
            label_path = find_split_folders(label_path.parent.parent).get(split, label_path.parent) / label_path.name
    return Path(resolve_unicode_path(label_path) or resolve_unicode_path(sibling_path) or label_path)


def check_listed_images(images: list[Path]) -> None:
    """Raise DataError for an image that does not exist, for two images with the same label file, and for a label file
    without an image in the folders of the images."""
    if missing := next((image for image in images if not image.is_file()), None):
        raise DataError(
            f"the image {escape_unprintable(missing)} does not exist", "restore it, or remove it from the list"
        )
    for path, count in Counter(map(find_label_file, dict.fromkeys(images))).items():
        if count > 1 and path.is_file():
            raise DataError(f"{escape_unprintable(path)} belongs to {count} images of its name", "rename or delete one")
    for labels, folder in sorted({(find_label_file(image).parent, image.parent) for image in images}):
        if labels != folder and labels.is_dir():
            stems = {normalise_name(path.stem) for path in folder.iterdir()}
            for path in sorted(labels.glob("*.txt")):
                has_image = normalise_name(path.stem) in stems or path.name == YOLO_CLASSES_FILE
                if not has_image and not is_system_name(path.name):
                    problem = f"{escape_unprintable(path)} has no image of its name in {escape_unprintable(folder)}"
                    raise DataError(problem, "restore the image, or delete the file")


def parse_label_file(image: Path, keypoints: KeypointShape = UNSTATED_KEYPOINTS) -> list[LabelLine]:
    """Read the boxes and polygons in the label file of an image, without keypoint values; empty if there is no file.
    Raises DataError, with the line, for invalid lines."""
    label_path = find_label_file(image)
    if not label_path.is_file() or not label_path.stat().st_size:
        return []
    label_lines = []
    for line_number, text in enumerate(read_lines(label_path), 1):
        fields = text.split()
        if not fields:
            continue
        location = f"{escape_unprintable(label_path)}, line {line_number}"
        label, *coordinates = parse_coordinates(fields, location)
        if num_keypoint_values := count_keypoint_values(keypoints):
            if len(coordinates) not in (4, 4 + num_keypoint_values):
                hint = (
                    f"write class, box and {num_keypoint_values} keypoint values, for kpt_shape {list(keypoints or ())}"
                )
                raise DataError(f"{location} has {len(fields)} numbers", hint)
            coordinates = coordinates[:4]
        if label < 0 or label != int(label):
            raise DataError(f"{location}: {fields[0]} is not a class index", "use integers from 0")
        if len(coordinates) != 4 and (len(coordinates) < 6 or len(coordinates) % 2):
            hint = "write class, centre x, centre y, width, height; or class and at least three pairs of x and y"
            if len(coordinates) > 4 and (len(coordinates) - 4) % 3 == 0:
                hint += f"; for keypoints add kpt_shape: [{(len(coordinates) - 4) // 3}, 3] to data.yaml"
            raise DataError(f"{location} has {len(fields)} numbers", hint)
        if min(coordinates) < -1 or max(coordinates) > 2:
            raise DataError(
                f"{location}: {max(coordinates, key=abs):g} is not between 0 and 1", "divide by width and height"
            )
        label_lines.append((int(label), tuple(coordinates)))
    return label_lines


def parse_yolo_scene(image: Path, lines: list[LabelLine], classes: dict[int, int]) -> Scene:
    """Convert the label lines of an image to a scene, with coordinates in pixels. `classes` maps the class indices of
    the files to those of the dataset. Raises DataError for an unreadable image."""
    if not lines:
        return Scene(image, (), find_label_file(image))
    height, width = read_image_size(image)
    shapes = []
    for class_index, coordinates in lines:
        if len(coordinates) == 4:
            x, y, w, h = (
                coordinates[0] * width,
                coordinates[1] * height,
                coordinates[2] * width,
                coordinates[3] * height,
            )
            shapes.append(Shape(classes[class_index], (x - w / 2, y - h / 2, x + w / 2, y + h / 2)))
        else:
            corners = np.array(coordinates, np.float32).reshape(-1, 2) * np.array([width, height], np.float32)
            shapes.append(Shape(classes[class_index], None, (corners,)))
    return Scene(image, tuple(shapes), find_label_file(image))


def format_yolo_line(label: int, box: np.ndarray, size: tuple[int, int], mask: np.ndarray | None = None) -> str:
    """Format an object on an image of `size` (H, W) as a line of a YOLO label file, in relative coordinates.

    The line has the class, and the corners of the object's mask (H, W) bool as a polygon, which reproduces the mask
    exactly. If there is no mask, it has the centre, width and height of the box (4,) instead. An empty mask is written
    as the corners of the box, since files of polygons cannot contain boxes.
    """
    height, width = size
    left, top, right, bottom = (float(edge) for edge in box)
    if mask is None:
        coordinates = [(left + right) / 2 / width, (top + bottom) / 2 / height]
        coordinates += [(right - left) / width, (bottom - top) / height]
    else:
        corners = mask_to_polygon(mask) if mask.any() else box_to_corners(box)
        coordinates = [float(coordinate) for coordinate in (corners / np.array([width, height])).ravel()]
    return f"{label} " + " ".join(f"{value:.9g}" for value in coordinates)
