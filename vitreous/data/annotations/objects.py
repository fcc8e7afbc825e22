"""Images with objects from files of annotations: what COCO, Pascal VOC, YOLO, LabelMe and CSV have in common."""

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
    """An image file and what is on it. `origin`: the file that says so; `size`: (height, width) as it has it, if at
    all; `verified`: what else is known of it, if not all."""

    image: Path
    shapes: tuple[Shape, ...]
    origin: Path
    size: tuple[int, int] | None = None
    _: KW_ONLY
    verified: VerifiedClasses | None = None


@dataclass(frozen=True, eq=False)
class ObjectAnnotations:
    """The scenes of a data set; a row is one."""

    scenes: Sequence[Scene]

    def read(self, row: int) -> Target:
        """Read what is on an image. Raises DataError where its file cannot be read or has another size than told."""
        scene = self.scenes[row]
        size = read_image_size(scene.image)
        if scene.size is not None and scene.size != size:
            sizes = [f"{width} x {height}" for height, width in (size, scene.size)]
            problem = (
                f"{escape_unprintable(scene.image)} has {sizes[0]} pixels, "
                f"{escape_unprintable(scene.origin)} says {sizes[1]}"
            )
            raise DataError(problem, "mend either, or remove both")
        return replace(shapes_to_target(scene.shapes, size, escape_unprintable(scene.origin)), verified=scene.verified)

    def update(self, digest: Any, rows: np.ndarray) -> None:
        """Update a hashlib digest with the objects of the images at `rows` (n,) int64."""
        for row in rows:
            if (verified := self.scenes[int(row)].verified) is not None:
                digest.update(verified.absent.tobytes() + verified.partial.tobytes())
            for shape in self.scenes[int(row)].shapes:
                digest.update(repr((shape.label, shape.box, shape.crowd)).encode())
                for polygon in shape.polygons:
                    digest.update(polygon.tobytes())
                digest.update(repr(shape.runs).encode() if shape.runs is not None else b"")


def check_unique_classes(name: str, classes: Sequence[str]) -> None:
    """Raise DataError for two classes of one name, in any Unicode form."""
    names = list(map(normalise_name, classes))
    if len(set(names)) < len(names):
        twice = next(one for number, one in enumerate(names) if one in names[:number])
        raise DataError(f"{name} names two classes {escape_unprintable(twice)}", "rename or join them")


def check_train_split(name: str, splits: Mapping[str, Sized]) -> None:
    """Raise DataError for splits without images in `train`."""
    if "train" not in splits or not len(splits["train"]):
        others = ", ".join(split for split, rows in splits.items() if len(rows))
        problem = f"{name} has {others} but no train images" if others else f"no images in {name}"
        raise DataError(problem, "name one of the splits train")


def is_empty_box(box: Box | None) -> bool:
    """Whether a box has no area; None is no box."""
    return box is not None and (box[2] <= box[0] or box[3] <= box[1])


def parse_in_threads(places: Sequence[Path], parse: Callable[[Path], Any]) -> list[Any]:
    """Parse files side by side, in order. Raises the first DataError."""
    with ThreadPoolExecutor(max(1, default_worker_count())) as pool:
        return list(pool.map(parse, places))


def parse_coordinates(values: Sequence[Any], origin: str) -> list[float]:
    """Numbers as floats. Raises DataError, naming `origin`, for what is no finite number."""
    try:
        numbers = [float(value) for value in values]
    except (TypeError, ValueError):
        raise DataError(f"{origin}: {list(values)[:8]} are no coordinates", "they are numbers") from None
    if not all(map(math.isfinite, numbers)):
        raise DataError(f"{origin}: {numbers[:8]} are no coordinates", "they are finite numbers")
    return numbers


def read_image_size(place: Path) -> tuple[int, int]:
    """(height, width) of an image file. Raises DataError."""
    width, height = read_upright_size(read_input_file(place), escape_unprintable(place))
    return height, width


def check_stated_image(stated: Any, folder: Path, stem: str, origin: str) -> None:
    """Raise DataError, naming `origin`, where an annotation file pairs with the image `stem` in `folder`, named without
    its ending, and states another image that is there. `stated`: a file name or path, or anything else where none is
    stated."""
    name = re.split(r"[/\\]", stated.strip())[-1] if isinstance(stated, str) else ""
    other = resolve_unicode_path(folder / name) if name else None
    if other and normalise_name(Path(other).stem) != normalise_name(stem):
        problem = (
            f"{origin} is named like the image {escape_unprintable(stem)} and "
            f"states the image {escape_unprintable(name)}"
        )
        raise DataError(problem, "rename the file, or correct the image that it states")


def check_unique_images(images: Sequence[Path], origin: str) -> None:
    """Raise DataError, naming `origin`, for two samples of one image file."""
    if twice := next((image for image, count in Counter(images).items() if count > 1), None):
        problem = f"{origin}: {images.count(twice)} entries mean the image {escape_unprintable(twice)}"
        raise DataError(problem, "keep one of them, in one annotation file, or write more of the path")
