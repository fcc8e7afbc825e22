"""Pascal VOC annotations: an XML file of boxes for each image.

    DIR/Annotations/a.xml   DIR/JPEGImages/a.jpg   DIR/ImageSets/Main/{train,val,test}.txt: image names without suffix

Corners are inclusive pixels counted from 1: a box from 1 to 1 is the first pixel. Many tools count from 0. This is
detected if a left or upper edge in the dataset is 0; no offset is then subtracted. Objects marked `difficult` are read
as crowds, which training and evaluation ignore.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

from vitreous.data.annotations.fields import read_class_name, read_flag
from vitreous.data.annotations.objects import Scene, check_stated_image, parse_coordinates, parse_in_threads
from vitreous.data.annotations.scenes import build_scene_data
from vitreous.data.annotations.shapes import Shape
from vitreous.data.decoding.decode import read_input_file
from vitreous.data.layouts.file_names import FileIndex, normalise_name
from vitreous.data.layouts.folder import list_images
from vitreous.data.layouts.split_names import is_system_name, match_split_names
from vitreous.data.split import Data
from vitreous.data.text_files import decode_text, read_lines
from vitreous.errors import DataError, escape_unprintable

IMAGE_FOLDER_NAMES, IMAGE_SETS_FOLDER = ("JPEGImages", "images"), Path("ImageSets") / "Main"
CORNER_TAGS = ("xmin", "ymin", "xmax", "ymax")
PRESENCE_SUFFIX = re.compile(r"\s+-?[01]$")  # whether an image contains the class, in the image list of a single class
NamedShape = tuple[str, Shape]  # class name and object


def is_voc(root: Path) -> bool:
    """Return whether a folder is a Pascal VOC dataset."""
    return any((root / "Annotations").glob("*.xml")) and find_voc_image_folder(root) is not None


def find_voc_image_folder(root: Path) -> Path | None:
    """Return the folder of the images in a Pascal VOC folder; None if there is none."""
    return next((root / name for name in IMAGE_FOLDER_NAMES if (root / name).is_dir()), None)


def open_voc(root: Path, split_seed: int = 0) -> Data:
    """Open a Pascal VOC folder. If there is no `val`, a tenth of `train` is held out.

    Raises DataError for invalid XML, and for listed names without an image or annotations.
    """
    folder = find_voc_image_folder(root)
    assert folder is not None, "is_voc was checked"
    index = FileIndex(list_images(folder), folder, ignore_suffixes=True)
    xml_paths = [path for path in sorted((root / "Annotations").glob("*.xml")) if not is_system_name(path.name)]
    files = {normalise_name(path.stem): path for path in xml_paths}
    names = read_image_sets(root, files)
    needed_stems = dict.fromkeys(stem for stems in names.values() for stem in stems)
    images = {stem: image for stem in needed_stems if (image := index.match(stem, escape_unprintable(root)))}
    for split, stems in names.items():
        unlabelled = split != "train" and not any(stem in files for stem in stems)
        for stem in stems:
            for table, file_kind, searched_folder in (
                (files, "annotations", root / "Annotations"),
                (images, "image", folder),
            ):
                if stem not in table and not (unlabelled and table is files):
                    problem = (
                        f"{escape_unprintable(stem)} of {split} has no {file_kind} in "
                        f"{escape_unprintable(searched_folder)}"
                    )
                    raise DataError(problem, "restore the file, or delete the name from the list")
    needed_stems = sorted({stem for stems in names.values() for stem in stems if stem in files})
    parsed = dict(
        zip(needed_stems, parse_in_threads([files[stem] for stem in needed_stems], parse_voc_file), strict=True)
    )
    classes = sorted({name for objects, _ in parsed.values() for name, _ in objects})
    has_zero_corner = any(min(shape.box[:2]) < 1 for objects, _ in parsed.values() for _, shape in objects if shape.box)
    scenes = {
        split: [
            Scene(
                images[stem],
                to_labelled_shapes(parsed[stem][0], classes, 0 if has_zero_corner else 1),
                files[stem],
                parsed[stem][1],
            )
            if stem in parsed
            else Scene(images[stem], (), images[stem])
            for stem in stems
        ]
        for split, stems in names.items()
    }
    return build_scene_data(escape_unprintable(root), classes, scenes, split_seed, [])


def read_image_sets(root: Path, files: dict[str, Path]) -> dict[str, list[str]]:
    """Read the image names (stems) of each split from the image lists. If there are no lists, all annotated images, the
    keys of `files`, are `train`."""
    names = {}
    list_files = {path.stem: path for path in (root / IMAGE_SETS_FOLDER).glob("*.txt")}
    for split, stem in match_split_names(list_files, escape_unprintable(root / IMAGE_SETS_FOLDER)).items():
        lines = (normalise_name(line.strip()) for line in read_lines(list_files[stem]))
        names[split] = [parse_listed_stem(line, files) for line in lines if line]
    return names or {"train": list(files)}


def parse_listed_stem(line: str, files: dict[str, Path]) -> str:
    """Parse the image name in a line of an image list. Names may contain spaces; in the list of a single class, 1, 0 or
    -1 follows the name. `files` has the known names."""
    return line if line in files else PRESENCE_SUFFIX.sub("", line)


def parse_voc_file(path: Path) -> tuple[list[NamedShape], tuple[int, int] | None]:
    """Read an XML file: the objects with class names, whose corners are as in the file, and the (height, width) of the
    image, if stated.

    Raises DataError for invalid XML, for a file that states another image, and for a document that declares
    entities.
    """
    origin, content = escape_unprintable(path), read_input_file(path)
    if b"<!ENTITY" in content or b"<!DOCTYPE" in content:
        raise DataError(f"{origin} declares entities", "delete the declaration, which annotations do not need")
    declared = b"encoding" in content[:200].partition(b"?>")[0]
    try:
        tree = ElementTree.fromstring(content if declared else decode_text(content, origin))
    except (ElementTree.ParseError, ValueError, LookupError) as error:
        if declared:  # the declared encoding does not match the content
            decode_text(content, origin)
        raise DataError(f"{origin} is not valid XML ({error})", "fix or delete the file") from None
    folder = find_voc_image_folder(path.parent.parent)
    if folder is not None:
        check_stated_image(tree.findtext("filename"), folder, path.stem, origin)
    objects = []
    for object_number, element in enumerate(tree.iter("object"), 1):
        location = f"{origin}, object {object_number}"
        name = normalise_name(read_class_name(element.findtext("name"), location))
        corners = [element.findtext(f"bndbox/{key}") for key in CORNER_TAGS]
        left, top, right, bottom = parse_coordinates(corners, location)
        if right < left or bottom < top:
            raise DataError(f"{location}: the box has xmax < xmin or ymax < ymin", "swap its corners")
        crowd = read_flag(element.findtext("difficult"), "difficult", location)
        objects.append((name, Shape(0, (left, top, right, bottom), crowd=crowd)))
    size = [tree.findtext(f"size/{key}") for key in ("height", "width")]
    if all(text and text.strip().isdecimal() and int(text) for text in size):
        return objects, (int(size[0] or 0), int(size[1] or 0))
    return objects, None


def to_labelled_shapes(objects: list[NamedShape], classes: list[str], first_pixel: int) -> tuple[Shape, ...]:
    """Convert objects with class names and inclusive corners to shapes with class indices and boxes. `first_pixel`: the
    number of the first pixel in the file, 0 or 1."""
    shapes = []
    for name, shape in objects:
        assert shape.box is not None, "every object of this format has a box"
        left, top, right, bottom = shape.box
        box = (
            (left - first_pixel, top - first_pixel, right, bottom)
            if right > left and bottom > top
            else (left, top, left, top)
        )
        shapes.append(replace(shape, label=classes.index(name), box=box))
    return tuple(shapes)
