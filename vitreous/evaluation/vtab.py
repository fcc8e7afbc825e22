"""The 19 tasks of VTAB (arXiv:1910.04867): names, groups, classes, and rules from raw labels to classes.

Numbers are those of github.com/google-research/task_adaptation; crop and flip are what BiT (arXiv:1912.11370) and the
paper train with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

GROUPS = ("natural", "specialized", "structured")
TRAIN, DEV = 800, 200  # images to learn from, and to choose by; then all 1,000 are learnt from
DISTANCES = (0.0, 8.0, 8.5, 9.0, 9.5, 10.0, 100.0)  # of the nearest object in CLEVR
METRES = (-100.0, 8.0, 20.0, 999.0)  # to the nearest vehicle in KITTI; 1000 where there is none

Rule = Callable[[np.ndarray], np.ndarray]  # (n,) float64 raw labels -> (n,) int64 classes


@dataclass(frozen=True)
class Task:
    """A task: group, classes, other names, the rule from raw labels to classes (None: they are), and BiT's
    augmentation."""

    group: str
    classes: int
    names: tuple[str, ...] = ()
    rule: Rule | None = None
    crop: bool = True
    flip: bool = True


def objects(raw: np.ndarray) -> np.ndarray:
    """(n,) counts of 3 to 10 objects -> (n,) classes from 0 to 7."""
    return (raw - 3).astype(np.int64)


def between(edges: tuple[float, ...]) -> Rule:
    """Return a rule: the last edge that a label is above."""
    return lambda raw: np.searchsorted(edges, raw, side="left") - 1


def divided(values: int, classes: int) -> Rule:
    """Return a rule: `values` consecutive labels -> `classes`, as even as floor division makes them."""
    return lambda raw: np.floor(raw / (values / classes)).astype(np.int64)


TASKS: Mapping[str, Task] = {
    "caltech101": Task("natural", 102),
    "cifar100": Task("natural", 100, ("cifar",)),
    "dtd": Task("natural", 47),
    "flowers102": Task("natural", 102, ("oxford_flowers102", "flowers", "oxford_flowers")),
    "pets": Task("natural", 37, ("oxford_iiit_pet", "oxford_pets", "pet")),
    "sun397": Task("natural", 397, ("sun",)),
    "svhn": Task("natural", 10, ("svhn_cropped",)),
    "patch_camelyon": Task("specialized", 2, ("pcam", "camelyon")),
    "eurosat": Task("specialized", 10),
    "resisc45": Task("specialized", 45),
    "diabetic_retinopathy": Task("specialized", 5, ("retinopathy", "diabetic_retinopathy_detection")),
    "clevr_count": Task("structured", 8, ("clevr_count_all",), objects, crop=False),
    "clevr_distance": Task(
        "structured", 6, ("clevr_dist", "clevr_closest_object_distance"), between(DISTANCES), crop=False
    ),
    "dmlab": Task("structured", 6, crop=False),
    "dsprites_location": Task(
        "structured",
        16,
        names=("dsprites_loc", "dsprites_label_x_position"),
        rule=divided(32, 16),
        crop=False,
        flip=False,
    ),
    "dsprites_orientation": Task(
        "structured", 16, ("dsprites_ori", "dsprites_label_orientation"), divided(40, 16), flip=False
    ),
    "kitti": Task("structured", 4, ("kitti_distance", "kitti_closest_vehicle_distance"), between(METRES), crop=False),
    "smallnorb_azimuth": Task("structured", 18, ("smallnorb_azi", "smallnorb_label_azimuth"), flip=False),
    "smallnorb_elevation": Task("structured", 9, ("smallnorb_ele", "smallnorb_label_elevation")),
}


def classes_of(task: Task, names: tuple[str, ...]) -> np.ndarray | None:
    """Return (K,) int64 classes of the task for a data set with raw labels: more than the task has, all numbers.

    None where the data set's classes are the task's already.
    """
    if task.rule is None or len(names) <= task.classes:
        return None
    try:
        return task.rule(np.array([float(name) for name in names]))
    except ValueError:
        return None


def means(top1: Mapping[str, float]) -> dict[str, float | None]:
    """Return the mean top-1 of each group and of all 19 tasks, None where one is missing."""
    parts = {group: [name for name, task in TASKS.items() if task.group == group] for group in GROUPS}
    names_of = {**parts, "mean": list(TASKS)}
    return {
        part: float(np.mean([top1[name] for name in names])) if set(names) <= set(top1) else None
        for part, names in names_of.items()
    }
