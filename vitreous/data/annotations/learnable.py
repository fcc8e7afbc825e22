"""Check, right after reading annotations, which objects and classes training can use.

Crowds, boxes without area and boxes outside their image are unusable. If the coordinates are not in pixels, all objects
are unusable. Training and `data check` reject data without usable annotations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal

import numpy as np

from vitreous.data.annotations.objects import Scene, is_empty_box, read_image_size
from vitreous.data.annotations.shapes import Box, Shape
from vitreous.data.annotations.target import IGNORE_INDEX, AnnotatedSplit, Target
from vitreous.data.split import Data, Split
from vitreous.errors import DataError, escape_unprintable

MEASURED_IMAGES = 2_000  # number of images of a split, evenly spread, whose size is compared with their boxes
MIN_NOTED_CROWD_SHARE = 0.1  # minimum share of crowds among the objects for a note
MIN_NOTED_OVERHANG_SHARE = 0.25  # minimum share of boxes beyond the image edge for a note
QUARTER_OBJECTS, QUARTER_IMAGES = 20, 10  # minimum objects and images for a note about boxes in one quarter
LOSS_FIXES = {  # reason for unusable objects -> fix
    "crowds (iscrowd or difficult is 1)": "set iscrowd or difficult to 0 for single objects",
    "boxes without area": "fix the corners of the boxes",
    "boxes outside their image": "scale the boxes to the pixels of the images",
    "boxes of images whose size cannot be read": "convert the images to a format such as PNG",
}
CROWD_REASON, EMPTY_REASON, OUTSIDE_REASON, UNREADABLE_REASON = LOSS_FIXES
LearnableContent = Literal["objects", "classes"]


@dataclass
class ObjectTally:
    """Counts of the objects in the scenes of a split. A measured image is one whose size is compared with its boxes."""

    objects: int = 0
    num_measured: int = 0  # measured images
    measured_objects: int = 0  # boxes on measured images
    beyond: int = 0  # boxes that extend beyond the edge of a measured image
    _: KW_ONLY
    quarter: int = 0  # measured images whose boxes are all in the upper left quarter
    largest: float = 0.0  # maximum right or lower edge of all boxes
    lost_counts: Counter[str] = field(default_factory=Counter)  # reason -> number of unusable objects
    firsts: dict[str, str] = field(default_factory=dict)  # reason -> annotation file of its first object
    mismatches: list[str] = field(default_factory=list)  # messages about images whose stated size is wrong

    def count_lost(self, reason: str, scene: Scene) -> None:
        """Count an unusable object of a scene."""
        self.lost_counts[reason] += 1
        self.firsts.setdefault(reason, escape_unprintable(scene.origin))

    def describe_losses(self) -> str:
        """Format the reasons for unusable objects with their counts, the most frequent reason first."""
        return ", ".join(f"{count:,} {reason}" for reason, count in self.lost_counts.most_common())


def tally_objects(scenes: Sequence[Scene]) -> ObjectTally:
    """Count the objects of a split, and compare up to `MEASURED_IMAGES` images, evenly spread, with their boxes."""
    tally = ObjectTally()
    sampled_indices = np.linspace(0, len(scenes) - 1, min(len(scenes), MEASURED_IMAGES)).astype(int)
    measured_indices = set(sampled_indices.tolist())
    for index, scene in enumerate(scenes):
        tally.objects += len(scene.shapes)
        size = read_scene_size(scene) if index in measured_indices and (scene.shapes or scene.size) else None
        boxes = [box for shape in scene.shapes if (box := shape.compute_bounding_box()) is not None]
        tally.largest = max([tally.largest, *(max(box[2:]) for box in boxes)])
        for shape in scene.shapes:
            if (reason := find_loss_reason(shape, size)) is not None:
                tally.count_lost(reason, scene)
        if size is not None and min(size) > 0:
            compare_sizes(tally, scene, size, boxes)
    return tally


def read_scene_size(scene: Scene) -> tuple[int, int] | None:
    """Read the (height, width) of a scene's image; (0, 0) if the header is not understood, None if the file cannot be
    read."""
    try:
        return read_image_size(scene.image)
    except DataError:  # reported when the images are decoded
        return None


def find_loss_reason(shape: Shape, size: tuple[int, int] | None) -> str | None:
    """Return the reason why an object is unusable, a key of LOSS_FIXES; None if it is usable. `size`: the
    (height, width) of the image, None if it was not measured."""
    box = shape.compute_bounding_box()
    if size is not None and min(size) < 1:
        return UNREADABLE_REASON
    if shape.crowd:
        return CROWD_REASON
    if is_empty_box(box):
        return EMPTY_REASON
    is_outside = (
        size is not None and box is not None and (box[2] <= 0 or box[3] <= 0 or box[0] >= size[1] or box[1] >= size[0])
    )
    return OUTSIDE_REASON if is_outside else None


def compare_sizes(tally: ObjectTally, scene: Scene, size: tuple[int, int], boxes: Sequence[Box]) -> None:
    """Compare the boxes and the stated size of a scene with the `size` (height, width) of its image, and count
    differences in `tally`."""
    height, width = size
    tally.num_measured += 1
    tally.measured_objects += len(boxes)
    tally.beyond += sum(box[2] > width + 1 or box[3] > height + 1 or min(box[:2]) < -1 for box in boxes)
    tally.quarter += bool(boxes) and all(box[2] <= width / 2 and box[3] <= height / 2 for box in boxes)
    if scene.size is not None and scene.size != size:
        stated_size = f"{scene.size[1]} x {scene.size[0]}"
        tally.mismatches.append(
            f"{escape_unprintable(scene.image)} has {width} x {height} pixels, "
            f"{escape_unprintable(scene.origin)} states {stated_size}"
        )


def find_objects_error(name: str, scenes: Sequence[Scene], tally: ObjectTally) -> DataError | None:
    """Return the error that explains why no object of the training split is usable; None if there are usable
    objects."""
    if tally.mismatches:
        problem = f"{len(tally.mismatches):,} of {tally.num_measured:,} images differ in size from their annotations"
        hint = "restore the images of the stated size, or correct the size and the coordinates"
        return DataError(f"{problem}; the first: {tally.mismatches[0]}", hint)
    if not tally.objects:
        missing = [scene for scene in scenes if not scene.origin.is_file()]
        problem = f"{name}: none of {len(scenes):,} training images has an annotated object"
        if missing:
            problem += f"; {len(missing):,} of {len(scenes):,} label files do not exist, such as"
            return DataError(
                f"{problem} {escape_unprintable(missing[0].origin)}", "put the label files into that folder"
            )
        return DataError(problem, f"annotate objects in files such as {escape_unprintable(scenes[0].origin)}")
    if 0 < tally.largest <= 1:
        problem = f"{name}: all {tally.objects:,} boxes end at 1 or less: they are relative coordinates, not pixels"
        return DataError(problem, "multiply the coordinates by the width and height of the images")
    if tally.lost_counts.total() < tally.objects:
        return None
    problem = f"{name}: none of {tally.objects:,} training objects are usable: {tally.describe_losses()}"
    reason = tally.lost_counts.most_common(1)[0][0]
    return DataError(f"{problem}; the first is in {tally.firsts[reason]}", LOSS_FIXES[reason])


def describe_lost_objects(split: str, scenes: Sequence[Scene], tally: ObjectTally) -> list[str]:
    """Return the notes about the unusable objects of a split, boxes that do not fit their images, and missing label
    files."""
    notes = []
    num_lost = tally.lost_counts.total() - tally.lost_counts[CROWD_REASON]
    if num_lost or tally.lost_counts[CROWD_REASON] > MIN_NOTED_CROWD_SHARE * tally.objects:
        share = (
            f"{tally.lost_counts.total():,} of {tally.objects:,} objects "
            f"({tally.lost_counts.total() / tally.objects:.0%})"
        )
        first_file = next(tally.firsts[reason] for reason in tally.lost_counts)
        notes.append(f"{split}: {share} are unusable: {tally.describe_losses()}; the first is in {first_file}")
    if tally.measured_objects >= QUARTER_OBJECTS and tally.num_measured >= QUARTER_IMAGES:
        boxes = f"{tally.measured_objects:,} boxes"
        if tally.quarter == sum(bool(scene.shapes) for scene in scenes):
            text = f"{split}: all {boxes} end in the upper left quarter of their images"
            notes.append(f"{text}: check whether they are percentages, or refer to smaller images")
        if tally.beyond > MIN_NOTED_OVERHANG_SHARE * tally.measured_objects:
            text = f"{split}: {tally.beyond:,} of {boxes} reach over the edge of their image"
            notes.append(f"{text}: check whether they refer to larger images")
    unlabelled = sum(not scene.shapes and not scene.origin.is_file() for scene in scenes)
    if len(scenes) > unlabelled >= len(scenes) / 2:
        notes.append(f"{split}: {unlabelled:,} of {len(scenes):,} images have no label file and count as empty")
    return notes


def require_learnable(data: Data, content: LearnableContent) -> None:
    """Raise DataError, with the reason, if the training images have no usable objects or classes, as `content` requires
    (see `find_unlearnable`)."""
    if (error := find_unlearnable(data, content)) is not None:
        raise error


def find_unlearnable(data: Data, content: LearnableContent | None = None) -> DataError | None:
    """Return the error that explains why the annotations of the training images are unusable; None if they are usable.

    `content` "objects" requires an object that is not a crowd, "classes" requires class maps with at least two classes;
    by default, either suffices. Returns None also for data without annotations.
    """
    split = data.full_train_split or data.splits.get("train")
    if not isinstance(split, AnnotatedSplit):
        return None
    if data.unlearnable is not None:
        return data.unlearnable
    target, error = find_learnable_target(split, content)
    if target is None:
        noun = "class map" if content == "classes" else "object"
        problem = f"{data.name}: no {noun} on {len(split):,} training images is usable"
        return DataError(f"{problem}; the first: {error.message}" if error else problem, "annotate the images")
    if content == "objects" or target.classes is None or (content is None and has_learnable_objects(target)):
        return None
    present = np.flatnonzero(split.labels.any(0))
    if len(present) > 1:
        return None
    names = escape_unprintable(data.classes[present[0]]) if len(present) else "none"
    problem = f"{data.name}: every labelled pixel of {len(split):,} training masks has one class ({names})"
    return DataError(problem, "add masks with other classes, or check how the masks were saved")


def find_learnable_target(split: Split, content: LearnableContent | None) -> tuple[Target | None, DataError | None]:
    """Find the first target of a split that has the `content` to learn. If there is none, returns None and the first
    error of an unreadable target, if any."""
    first_error = None
    assert isinstance(split, AnnotatedSplit)
    for sample_index in range(len(split)):
        try:
            target = split.target(sample_index)
        except DataError as error:
            first_error = first_error or error
            continue
        if has_learnable_objects(target) or (content != "objects" and has_labelled_pixels(target)):
            return target, None
    return None, first_error


def has_learnable_objects(target: Target) -> bool:
    """Return whether a target has an object that is not a crowd."""
    return bool((~target.crowd).any())


def has_labelled_pixels(target: Target) -> bool:
    """Return whether a target has a class map with at least one labelled pixel."""
    return target.classes is not None and bool((target.classes != IGNORE_INDEX).any())
