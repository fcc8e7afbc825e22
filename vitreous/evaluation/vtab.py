"""The 19 tasks of VTAB (arXiv:1910.04867): names, groups, classes, and mappings from raw labels to classes.

Values are those of github.com/google-research/task_adaptation; crop and flip are the augmentations of BiT
(arXiv:1912.11370) and of the paper.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

VTAB_GROUPS = ("natural", "specialized", "structured")
TRAIN_IMAGES, DEV_IMAGES = 800, 200  # training and selection images; the final training uses all 1,000
CLEVR_DISTANCE_EDGES = (0.0, 8.0, 8.5, 9.0, 9.5, 10.0, 100.0)  # distance of the nearest object in CLEVR
KITTI_DISTANCE_EDGES = (-100.0, 8.0, 20.0, 999.0)  # distance to the nearest vehicle in KITTI; 1000 without a vehicle

LabelRule = Callable[[np.ndarray], np.ndarray]  # a mapping from raw labels (n,) float64 to classes (n,) int64


@dataclass(frozen=True)
class VTABTask:
    """A task of VTAB. `names`: other names of the dataset. `rule`: the mapping from raw labels to classes, None if they
    are equal. `crop` and `flip`: whether BiT's augmentation crops and flips its images."""

    group: str
    classes: int
    names: tuple[str, ...] = ()
    rule: LabelRule | None = None
    crop: bool = True
    flip: bool = True


def map_object_counts(raw: np.ndarray) -> np.ndarray:
    """Map counts (n,) of 3 to 10 objects to classes (n,) from 0 to 7."""
    return (raw - 3).astype(np.int64)


def bin_by_edges(edges: tuple[float, ...]) -> LabelRule:
    """Return a mapping from raw labels to the index of the last edge below them."""
    return lambda raw: np.searchsorted(edges, raw, side="left") - 1


def bin_evenly(values: int, classes: int) -> LabelRule:
    """Return a mapping from `values` consecutive raw labels to `classes` bins, which floor division makes as even as
    possible."""
    return lambda raw: np.floor(raw / (values / classes)).astype(np.int64)


VTAB_TASKS: Mapping[str, VTABTask] = {
    "caltech101": VTABTask("natural", 102),
    "cifar100": VTABTask("natural", 100, ("cifar",)),
    "dtd": VTABTask("natural", 47),
    "flowers102": VTABTask("natural", 102, ("oxford_flowers102", "flowers", "oxford_flowers")),
    "pets": VTABTask("natural", 37, ("oxford_iiit_pet", "oxford_pets", "pet")),
    "sun397": VTABTask("natural", 397, ("sun",)),
    "svhn": VTABTask("natural", 10, ("svhn_cropped",)),
    "patch_camelyon": VTABTask("specialized", 2, ("pcam", "camelyon")),
    "eurosat": VTABTask("specialized", 10),
    "resisc45": VTABTask("specialized", 45),
    "diabetic_retinopathy": VTABTask("specialized", 5, ("retinopathy", "diabetic_retinopathy_detection")),
    "clevr_count": VTABTask("structured", 8, ("clevr_count_all",), map_object_counts, crop=False),
    "clevr_distance": VTABTask(
        "structured", 6, ("clevr_dist", "clevr_closest_object_distance"), bin_by_edges(CLEVR_DISTANCE_EDGES), crop=False
    ),
    "dmlab": VTABTask("structured", 6, crop=False),
    "dsprites_location": VTABTask(
        "structured",
        16,
        names=("dsprites_loc", "dsprites_label_x_position"),
        rule=bin_evenly(32, 16),
        crop=False,
        flip=False,
    ),
    "dsprites_orientation": VTABTask(
        "structured", 16, ("dsprites_ori", "dsprites_label_orientation"), bin_evenly(40, 16), flip=False
    ),
    "kitti": VTABTask(
        "structured",
        4,
        ("kitti_distance", "kitti_closest_vehicle_distance"),
        bin_by_edges(KITTI_DISTANCE_EDGES),
        crop=False,
    ),
    "smallnorb_azimuth": VTABTask("structured", 18, ("smallnorb_azi", "smallnorb_label_azimuth"), flip=False),
    "smallnorb_elevation": VTABTask("structured", 9, ("smallnorb_ele", "smallnorb_label_elevation")),
}


def map_to_task_classes(task: VTABTask, names: tuple[str, ...]) -> np.ndarray | None:
    """Map the class names of a dataset with raw labels to the task's classes, (K,) int64. Raw labels are numeric, and
    there are more of them than classes of the task. None if the dataset's classes are already the task's."""
    if task.rule is None or len(names) <= task.classes:
        return None
    try:
        return task.rule(np.array([float(name) for name in names]))
    except ValueError:
        return None


def average_by_group(top1: Mapping[str, float]) -> dict[str, float | None]:
    """Average top-1 accuracy over each group and over all 19 tasks; None if a task is missing."""
    group_tasks = {group: [name for name, task in VTAB_TASKS.items() if task.group == group] for group in VTAB_GROUPS}
    names_of = {**group_tasks, "mean": list(VTAB_TASKS)}
    return {
        group_name: float(np.mean([top1[name] for name in names])) if set(names) <= set(top1) else None
        for group_name, names in names_of.items()
    }
