"""Checks of annotations: counts of objects and of pixels per class, unreadable annotations, and suspicious boxes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from vitreous.apps.curation.checks.subject import CheckedDataset
from vitreous.data.annotations.objects import ObjectAnnotations, Scene, read_image_size
from vitreous.data.annotations.target import IGNORE_INDEX, AnnotatedFiles, AnnotatedSplit, Target
from vitreous.errors import DataError

MAX_BOX_OVERHANG = 1.0  # pixels by which a box may exceed its image without being reported
DUPLICATE_IOU = 0.95  # minimum intersection over union of two boxes of one class that count as duplicates
COCO_AREA_LIMITS = {
    "small": 32**2,
    "medium": 96**2,
}  # COCO's limits: an object below this area in pixels is small or medium, else large
MAX_LISTED_PROBLEMS = 10_000  # listed locations per problem

ProblemLocation = dict[str, Any]  # split, path, and details


def summarise_annotations(subject: CheckedDataset) -> dict[str, Any] | None:
    """Summarise the annotations of a dataset for the document; None for data without annotations.

    `objects` and, for class maps, `pixels` are counts by class. `unreadable`, `out_of_bounds` (boxes that exceed the
    image) and `duplicates` list locations. `unused_classes` are classes without annotations in any split,
    `classes_missing_in_train` are classes of other splits without training images.
    """
    splits = {name: split for name, split in subject.splits.items() if isinstance(split, AnnotatedSplit)}
    if not splits or not subject.classes:
        return None
    tally = AnnotationTally(len(subject.classes))
    for name, split in splits.items():
        for sample in range(len(split)):
            try:
                tally.add(name, split, sample)
            except DataError as error:
                tally.unreadable.append({"split": name, "path": split.name(sample), "reason": error.message})
    has_images = {name: subject.count_classes(name) > 0 for name in splits}
    used_in_any_split = np.array(
        [any(is_used[label] for is_used in has_images.values()) for label in range(len(subject.classes))], bool
    )
    has_train_images = has_images.get("train", used_in_any_split)
    return {
        "objects": dict(zip(subject.classes, tally.objects.tolist(), strict=True)) if tally.objects.any() else {},
        "pixels": dict(zip(subject.classes, tally.pixels.tolist(), strict=True)) if tally.pixels.any() else {},
        "ignored_pixels": tally.unknown,
        "object_sizes": {key: tally.sizes[key] for key in (*COCO_AREA_LIMITS, "large")},
        "crowd_regions": tally.crowds,
        "without_objects": tally.num_without_objects,
        **{key: getattr(tally, key)[:MAX_LISTED_PROBLEMS] for key in ("unreadable", "out_of_bounds", "duplicates")},
        "unused_classes": [
            label for label, is_used in zip(subject.classes, used_in_any_split, strict=True) if not is_used
        ],
        "classes_missing_in_train": [
            label
            for label, is_used, used_anywhere in zip(subject.classes, has_train_images, used_in_any_split, strict=True)
            if used_anywhere and not is_used
        ],
    }


class AnnotationTally:
    """Counts and problem locations for K classes, accumulated image by image."""

    def __init__(self, classes: int) -> None:
        self.objects, self.pixels = np.zeros(classes, np.int64), np.zeros(classes, np.int64)
        self.unknown = self.crowds = self.num_without_objects = 0
        self.sizes: Counter[str] = Counter()
        self.unreadable: list[ProblemLocation] = []
        self.out_of_bounds: list[ProblemLocation] = []
        self.duplicates: list[ProblemLocation] = []

    def add(self, name: str, split: AnnotatedSplit, sample: int) -> None:
        """Add the annotations of an image of the split `name`. Raises DataError if they cannot be read."""
        location = {"split": name, "path": split.name(sample), "index": sample}
        if isinstance(split, AnnotatedFiles) and isinstance(split.annotations, ObjectAnnotations):
            scene = split.annotations.scenes[int(split.annotation_indices[sample])]
            self.add_scene(scene, location)
            return
        self.add_target(split.target(sample), location)

    def add_scene(self, scene: Scene, location: ProblemLocation) -> None:
        """Add the annotated objects of an image without drawing their masks. Raises DataError if the image cannot be
        read, or if its size differs from the size in the annotations."""
        height, width = read_image_size(scene.image)
        if scene.size not in (None, (height, width)):
            assert scene.size is not None, "checked above"
            problem = f"{width} x {height} pixels, but {scene.size[1]} x {scene.size[0]} in the annotations"
            raise DataError(problem)
        objects = [(shape.label, shape.compute_bounding_box(), shape.crowd) for shape in scene.shapes]
        boxes = np.array([box or (0, 0, width, height) for _, box, _ in objects], np.float64).reshape(-1, 4)
        labels = np.array([label for label, _, _ in objects], np.int64)
        self.crowds += sum(crowd for _, _, crowd in objects)
        edges = np.array([-MAX_BOX_OVERHANG, -MAX_BOX_OVERHANG, width + MAX_BOX_OVERHANG, height + MAX_BOX_OVERHANG])
        is_outside = (boxes[:, :2] < edges[:2]).any(1) | (boxes[:, 2:] > edges[2:]).any(1)
        for object_index in np.flatnonzero(is_outside):
            self.out_of_bounds.append(
                {**location, "objects": [int(object_index) + 1], "box": boxes[object_index].tolist()}
            )
        self.add_objects(labels, boxes, location)

    def add_target(self, target: Target, location: ProblemLocation) -> None:
        """Add the objects or, for a class map, the pixels of an image."""
        self.crowds += int(target.crowd.sum())
        if target.classes is not None:
            has_class = target.classes != IGNORE_INDEX
            self.unknown += int((~has_class).sum())
            self.pixels += np.bincount(target.classes[has_class], minlength=len(self.pixels))
            return
        self.add_objects(target.labels, target.boxes.astype(np.float64), location)

    def add_objects(self, labels: np.ndarray, boxes: np.ndarray, location: ProblemLocation) -> None:
        """Add objects with labels (n,) and boxes (n, 4), and find duplicates among them."""
        self.num_without_objects += not len(labels)
        self.objects += np.bincount(labels, minlength=len(self.objects))
        areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
        for area in areas:
            self.sizes[next((size_name for size_name, limit in COCO_AREA_LIMITS.items() if area < limit), "large")] += 1
        for index, duplicate in find_duplicate_objects(labels, boxes, areas):
            self.duplicates.append({**location, "objects": [index + 1, duplicate + 1], "box": boxes[index].tolist()})


def find_duplicate_objects(labels: np.ndarray, boxes: np.ndarray, areas: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield index pairs of objects with the same label (n,) whose boxes (n, 4) with `areas` (n,) overlap by at least
    `DUPLICATE_IOU`."""
    for index in range(len(labels)):
        candidates = index + 1 + np.flatnonzero(labels[index + 1 :] == labels[index])
        low = np.maximum(boxes[candidates, :2], boxes[index, :2])
        high = np.minimum(boxes[candidates, 2:], boxes[index, 2:])
        intersections = (high - low).clip(min=0).prod(1)
        union = areas[candidates] + areas[index] - intersections
        for duplicate in candidates[intersections >= DUPLICATE_IOU * np.maximum(union, 1e-9)]:
            if areas[index] > 0:
                yield index, int(duplicate)
