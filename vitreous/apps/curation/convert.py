"""The verb `data convert`: write annotations as COCO, YOLO, Pascal VOC, or class maps."""

from __future__ import annotations

import json
import os
import re
import shutil
import unicodedata
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from vitreous.data.annotations.class_maps import CLASSES_FILE, parse_class_line
from vitreous.data.annotations.drawing import class_map_to_image, create_class_colours
from vitreous.data.annotations.painted import paint_class_maps
from vitreous.data.annotations.shapes import mask_to_rle
from vitreous.data.annotations.target import AnnotatedFiles, AnnotatedSplit, Target, check_image_samples
from vitreous.data.annotations.yolo import format_yolo_line
from vitreous.data.split import Data, Split
from vitreous.errors import DataError, UsageError, escape_unprintable
from vitreous.progress import NullListener, ProgressListener
from vitreous.system.disk import atomic_path, make_write_error

UNSTORABLE = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")  # not storable in XML
AnnotatedImages = list[tuple[str, Target]]  # image name in the new folder, and its annotations


@dataclass(frozen=True)
class AnnotationFormat:
    """An annotation format: the image folder with the placeholder {split}, a function that writes a split's
    annotations, and a function that writes the files for all splits."""

    images: str
    write_split: Callable[[Path, str, AnnotatedImages, tuple[str, ...]], None]
    finish: Callable[[Path, dict[str, AnnotatedImages], tuple[str, ...]], None] = lambda folder, splits, classes: None
    loses_masks: bool = True


def convert_annotations(data: Data, out: Path, to: str, listener: ProgressListener | None = None) -> dict[str, Any]:
    """Write a dataset with its images into the new folder `out`, with annotations in the format `to`: `coco`, `yolo`,
    `voc` or `masks`.

    Validation images that were drawn from `train` on opening remain in `train`. Returns the numbers of images and
    objects per split. Raises UsageError for an unknown format or an existing folder, DataError for data without the
    annotations that the format needs.
    """
    listener = listener or NullListener()
    if to not in ANNOTATION_FORMATS:
        raise UsageError(f"unknown format --to '{to}'", f"use one of {', '.join(ANNOTATION_FORMATS)}")
    if out.exists() or out.is_symlink():
        raise UsageError(f"{escape_unprintable(out)} already exists and is not overwritten", "use another folder")
    check_image_samples(data.splits.values(), "only annotations of images can be converted")
    if to == "masks":
        data = paint_class_maps(data)
    check_class_names(data.classes, to)
    annotation_format, splits = ANNOTATION_FORMATS[to], get_annotated_splits(data)
    counts: dict[str, dict[str, int]] = {}
    num_lost_masks = num_class_maps = 0
    try:
        with atomic_path(out) as out_folder:
            written: dict[str, AnnotatedImages] = {}
            for name, split in splits.items():
                written[name] = copy_images(
                    split, out_folder / annotation_format.images.format(split=name), written, listener
                )
                targets = [target for _, target in written[name]]
                num_lost_masks += sum(target.layers is not None for target in targets) * annotation_format.loses_masks
                annotation_format.write_split(out_folder, name, written[name], data.classes)
                counts[name] = {"images": len(targets), "objects": sum(map(len, targets))}
            all_targets = [target for annotated_images in written.values() for _, target in annotated_images]
            num_class_maps = sum(target.classes is not None for target in all_targets) * (to != "masks")
            if num_class_maps and not any(map(len, all_targets)):
                raise DataError(f"{data.name} has class maps, which contain no objects", "use --to masks")
            annotation_format.finish(out_folder, written, data.classes)
    except OSError as error:
        raise make_write_error(out, error) from None
    if num_class_maps:
        listener.note(
            f"only objects were written, class maps of {num_class_maps} images were not: use --to masks to keep them"
        )
    if num_lost_masks:
        listener.note(f"masks of {num_lost_masks} images were reduced to boxes: use --to coco or yolo to keep them")
    return {"out": os.fspath(out), "format": to, "classes": list(data.classes), "splits": counts}


def get_annotated_splits(data: Data) -> dict[str, AnnotatedSplit]:
    """Return the splits as stored: a `val` drawn on opening is part of `train` again. Raises DataError for data without
    annotations."""
    splits: dict[str, Split] = dict(data.splits)
    if data.full_train_split is not None:
        splits = {name: split for name, split in splits.items() if name != "val"} | {"train": data.full_train_split}
    annotated = {name: split for name, split in splits.items() if isinstance(split, AnnotatedSplit)}
    if len(annotated) < len(splits):
        hint = "use COCO, VOC, YOLO or LabelMe data, images with masks, or a CSV file of boxes"
        raise DataError(f"no boxes or masks found in {data.name}", hint)
    return annotated


def copy_images(
    split: AnnotatedSplit, folder: Path, written_splits: dict[str, AnnotatedImages], listener: ProgressListener
) -> AnnotatedImages:
    """Copy the images of a split into a folder, and read their annotations. Return (new file name, annotations) pairs.
    A name that is already used gets the sample number as prefix; characters that a format cannot store become `_`.
    Raises DataError for images that are not separate files."""
    folder.mkdir(parents=True, exist_ok=True)
    used_stems = {
        fold_file_name(Path(name).stem) for annotated_images in written_splits.values() for name, _ in annotated_images
    }
    annotated_images: AnnotatedImages = []
    for sample in range(len(split)):
        image_path = get_image_path(split, sample)
        stem = make_unique_stem(sanitise_stem(image_path.stem), sample, used_stems)
        used_stems.add(fold_file_name(stem))
        target = split.target(sample)
        shutil.copyfile(image_path, folder / (stem + image_path.suffix))
        annotated_images.append((stem + image_path.suffix, target))
        listener.progress("convert", sample + 1, len(split), image_path.name)
    return annotated_images


def sanitise_stem(stem: str) -> str:
    """Replace characters of a file name stem that lists and label files cannot store by `_`, and remove surrounding
    spaces and leading dots, which would hide the file."""
    return UNSTORABLE.sub("_", stem).strip().lstrip(".") or "_"


def fold_file_name(stem: str) -> str:
    """Fold a file name: names that some file systems treat as equal, such as `A` and `a`, become equal."""
    return unicodedata.normalize("NFC", stem).casefold()


def make_unique_stem(stem: str, sample: int, used_stems: set[str]) -> str:
    """Make a file stem unique with the sample number as prefix. `used_stems` are the stems in use, as `fold_file_name`
    returns them (without case)."""
    while fold_file_name(stem) in used_stems:
        stem = f"{sample}-{stem}"
    return stem


def check_class_names(classes: Sequence[str], format_name: str) -> None:
    """Raise DataError for a class name that files of the format `format_name` cannot store."""
    for name in classes:
        if UNSTORABLE.search(name) or name != name.strip() or not name:
            problem = f"the class name {name!a} has control characters, line ends or surrounding spaces"
            raise DataError(f"{problem}, which {format_name} files cannot store", "rename the class")


def get_image_path(split: AnnotatedSplit, sample: int) -> Path:
    """Return the path of an image file. Raises DataError for an image in an archive."""
    inner = getattr(split, "split", split)  # a split that paints class maps wraps another split
    if not isinstance(inner, AnnotatedFiles):
        raise DataError(f"{escape_unprintable(split.name(sample))} is not a separate file", "unpack the dataset first")
    return Path(inner.path(sample))


def write_coco(out_folder: Path, split: str, annotated_images: AnnotatedImages, classes: tuple[str, ...]) -> None:
    """Write the annotations of a split as COCO's `annotations/instances_SPLIT.json`; masks are run-length encoded."""
    images, annotations = [], []
    for identifier, (name, target) in enumerate(annotated_images, 1):
        images.append({"id": identifier, "file_name": name, "height": target.size[0], "width": target.size[1]})
        for object_index in range(len(target)):
            left, top, right, bottom = (float(edge) for edge in target.boxes[object_index])
            label, area = int(target.labels[object_index]) + 1, (right - left) * (bottom - top)
            entry: dict[str, Any] = {
                "id": len(annotations) + 1,
                "image_id": identifier,
                "category_id": label,
                "area": area,
            }
            entry |= {"bbox": [left, top, right - left, bottom - top], "iscrowd": int(target.crowd[object_index])}
            if target.layers is not None:
                mask = target.mask(object_index)
                entry["area"] = int(mask.sum())
                entry["segmentation"] = {"size": list(target.size), "counts": mask_to_rle(mask)}
            annotations.append(entry)
    categories = [{"id": identifier, "name": name} for identifier, name in enumerate(classes, 1)]
    document = {"images": images, "annotations": annotations, "categories": categories}
    path = out_folder / "annotations" / f"instances_{split}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(document, ensure_ascii=False), "utf-8")


def write_yolo(out_folder: Path, split: str, annotated_images: AnnotatedImages, classes: tuple[str, ...]) -> None:
    """Write the annotations of a split as YOLO's `labels/SPLIT/NAME.txt`. Each line has a class, and the polygons of a
    mask or the centre, width and height of a box, as fractions of the image. Crowd regions are omitted."""
    folder = out_folder / "labels" / split
    folder.mkdir(parents=True)
    for name, target in annotated_images:
        size = (target.size[0], target.size[1])
        lines = []
        for object_index in np.flatnonzero(~target.crowd).tolist():
            mask = None if target.layers is None else target.mask(object_index)
            lines.append(format_yolo_line(int(target.labels[object_index]), target.boxes[object_index], size, mask))
        (folder / name).with_suffix(".txt").write_text("\n".join(lines) + "\n" * bool(lines), "utf-8")


def write_yolo_config(out_folder: Path, splits: dict[str, AnnotatedImages], classes: tuple[str, ...]) -> None:
    """Write YOLO's `data.yaml`: the image folders of the splits, and the class names."""
    config = {split: f"images/{split}" for split in splits} | {"names": dict(enumerate(classes))}
    (out_folder / "data.yaml").write_text(yaml.safe_dump(config, sort_keys=False, allow_unicode=True), "utf-8")


def write_voc(out_folder: Path, split: str, annotated_images: AnnotatedImages, classes: tuple[str, ...]) -> None:
    """Write the annotations of a split as Pascal VOC's `Annotations/NAME.xml`, with pixels counted from 1, and the list
    of its images."""
    for folder in (out_folder / "Annotations", out_folder / "ImageSets" / "Main"):
        folder.mkdir(parents=True, exist_ok=True)
    for name, target in annotated_images:
        root = ElementTree.Element("annotation")
        ElementTree.SubElement(root, "filename").text = name
        size = ElementTree.SubElement(root, "size")
        for key, length in zip(("width", "height", "depth"), (target.size[1], target.size[0], 3), strict=True):
            ElementTree.SubElement(size, key).text = str(length)
        for object_index in range(len(target)):
            element = ElementTree.SubElement(root, "object")
            ElementTree.SubElement(element, "name").text = classes[target.labels[object_index]]
            ElementTree.SubElement(element, "difficult").text = str(int(target.crowd[object_index]))
            box = ElementTree.SubElement(element, "bndbox")
            left, top, right, bottom = (float(edge) for edge in target.boxes[object_index])
            corners = zip(("xmin", "ymin", "xmax", "ymax"), (left + 1, top + 1, right, bottom), strict=True)
            for key, edge in corners:
                ElementTree.SubElement(box, key).text = f"{edge:.9g}"
        ElementTree.indent(root)
        ElementTree.ElementTree(root).write((out_folder / "Annotations" / name).with_suffix(".xml"), "utf-8")
    stems = "\n".join(Path(name).stem for name, _ in annotated_images)
    (out_folder / "ImageSets" / "Main" / f"{split}.txt").write_text(stems + "\n", "utf-8")


def write_masks(out_folder: Path, split: str, annotated_images: AnnotatedImages, classes: tuple[str, ...]) -> None:
    """Write the class maps of a split as `masks/SPLIT/NAME.png`, whose pixels are class indices."""
    folder, colours = out_folder / "masks" / split, create_class_colours(classes)
    folder.mkdir(parents=True)
    for name, target in annotated_images:
        class_map_to_image(target.class_map(), colours).save((folder / name).with_suffix(".png"))


def write_mask_classes(out_folder: Path, splits: dict[str, AnnotatedImages], classes: tuple[str, ...]) -> None:
    """Write the class names as `classes.txt`. Colours are added if a name ends like one with a colour, such as `sign 1
    2 3`."""
    colours = create_class_colours(classes)
    names = list(classes)
    if any(parse_class_line(name)[1] for name in classes):  # a name that ends like a colour gets a colour appended
        names = [f"{name} {' '.join(map(str, colour))}" for name, colour in zip(classes, colours, strict=True)]
    (out_folder / CLASSES_FILE).write_bytes(("\n".join(names) + "\n").encode())


ANNOTATION_FORMATS = {
    "coco": AnnotationFormat("images/{split}", write_coco, loses_masks=False),
    "yolo": AnnotationFormat("images/{split}", write_yolo, write_yolo_config, loses_masks=False),
    "voc": AnnotationFormat("JPEGImages", write_voc),
    "masks": AnnotationFormat("images/{split}", write_masks, write_mask_classes, loses_masks=False),
}
