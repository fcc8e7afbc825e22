"""Scenes, images with object annotations: common code of the readers of COCO, Pascal VOC, YOLO, LabelMe and CSV."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vitreous.data.annotations.shapes import Box, Shape, shapes_to_target
from vitreous.data.annotations.target import Target, VerifiedClasses
from vitreous.data.decoding.decode import read_input_file, read_upright_size
from vitreous.data.layouts.file_names import normalise_name, resolve_unicode_path
from vitreous.errors import DataError, escape_unprintable
from vitreous.system.cores import default_worker_count


@dataclass(frozen=True, eq=False)
class Scene:
    """An image file and its objects. `origin`: the annotation file; `size`: the (height, width) that it states, if any;
    `verified`: the verified classes, if the annotations are not exhaustive."""

    image: Path
    shapes: tuple[Shape, ...]
    origin: Path
    size: tuple[int, int] | None = None
    _: KW_ONLY
    verified: VerifiedClasses | None = None


@dataclass(frozen=True, eq=False)
class ObjectAnnotations:
    """Annotations of the images in a split as scenes; the index is that of the image."""

    scenes: Sequence[Scene]

    def read(self, index: int) -> Target:
        """Read the annotations of an image. Raises DataError if the image cannot be read, or differs from the stated
        size."""
        scene = self.scenes[index]
        size = read_image_size(scene.image)
        if scene.size is not None and scene.size != size:
            sizes = [f"{width} x {height}" for height, width in (size, scene.size)]
            problem = (
                f"{escape_unprintable(scene.image)} has {sizes[0]} pixels, "
                f"but {escape_unprintable(scene.origin)} states {sizes[1]}"
            )
            raise DataError(problem, "correct one of them, or delete both")
        return replace(shapes_to_target(scene.shapes, size, escape_unprintable(scene.origin)), verified=scene.verified)

    def update(self, digest: Any, indices: np.ndarray) -> None:
        """Update a hashlib digest with the objects of the images at `indices` (n,) int64."""
        for index in indices:
            if (verified := self.scenes[int(index)].verified) is not None:
                digest.update(verified.absent.tobytes() + verified.partial.tobytes())
            for shape in self.scenes[int(index)].shapes:
                digest.update(repr((shape.label, shape.box, shape.crowd)).encode())
                for polygon in shape.polygons:
                    digest.update(polygon.tobytes())
                digest.update(repr(shape.runs).encode() if shape.runs is not None else b"")


def check_unique_classes(name: str, classes: Sequence[str]) -> None:
    """Raise DataError for two classes with the same name, in any Unicode form."""
    names = list(map(normalise_name, classes))
    if len(set(names)) < len(names):
        duplicate = next(class_name for index, class_name in enumerate(names) if class_name in names[:index])
        raise DataError(f"{name} has two classes {escape_unprintable(duplicate)}", "rename or merge them")


def check_train_split(name: str, splits: Mapping[str, Sized]) -> None:
    """Raise DataError if the dataset `name` has no images in `train`. `splits` maps a split to its samples."""
    if "train" not in splits or not len(splits["train"]):
        other_splits = ", ".join(split for split, samples in splits.items() if len(samples))
        problem = f"{name} has {other_splits} but no train images" if other_splits else f"no images in {name}"
        raise DataError(problem, "rename one of the splits to train")


def is_empty_box(box: Box | None) -> bool:
    """Return whether a box has no area; False for None, an object whose box is not known."""
    return box is not None and (box[2] <= box[0] or box[3] <= box[1])


def parse_in_threads(paths: Sequence[Path], parse: Callable[[Path], Any]) -> list[Any]:
    """Parse files in parallel threads, in order. Raises the first DataError."""
    with ThreadPoolExecutor(max(1, default_worker_count())) as pool:
        return list(pool.map(parse, paths))


def parse_coordinates(values: Sequence[Any], origin: str) -> list[float]:
    """Convert the values of an annotation file to floats. Raises DataError, with `origin`, for anything but finite
    numbers."""
    try:
        coordinates = [float(value) for value in values]
    except (TypeError, ValueError):
        raise DataError(f"{origin}: {list(values)[:8]} are not coordinates", "use numbers") from None
    if not all(map(math.isfinite, coordinates)):
        raise DataError(f"{origin}: {coordinates[:8]} are not coordinates", "use finite numbers")
    return coordinates


def read_image_size(path: Path) -> tuple[int, int]:
    """Read the (height, width) of an image file, (0, 0) if the header is not understood. Raises DataError if the file
    cannot be read."""
    width, height = read_upright_size(read_input_file(path), escape_unprintable(path))
    return height, width


def check_stated_image(stated_image: Any, folder: Path, stem: str, origin: str) -> None:
    """Raise DataError if an annotation file states another existing image than the one that it is matched with by name.

    The file `origin` is matched with the image `stem` in `folder`. `stated_image` is the file name or path of an image
    in that file, or a value of another type if there is none.
    """
    name = re.split(r"[/\\]", stated_image.strip())[-1] if isinstance(stated_image, str) else ""
    other_path = resolve_unicode_path(folder / name) if name else None
    if other_path and normalise_name(Path(other_path).stem) != normalise_name(stem):
        problem = (
            f"{origin} is named like the image {escape_unprintable(stem)} and "
            f"states the image {escape_unprintable(name)}"
        )
        raise DataError(problem, "rename the file, or correct the image that it states")


def check_unique_images(images: Sequence[Path], origin: str) -> None:
    """Raise DataError, with `origin`, if two samples have the same image file."""
    if duplicate := next((image for image, count in Counter(images).items() if count > 1), None):
        problem = f"{origin}: {images.count(duplicate)} entries refer to the image {escape_unprintable(duplicate)}"
        raise DataError(problem, "keep one of them, in one annotation file, or use longer paths")
