"""Keypoints in YOLO label files: a box, then x, y and optionally a visibility for each keypoint.

A line of a box with keypoints can have as many numbers as a line of a polygon. `kpt_shape` in data.yaml resolves the
ambiguity. If it is not set, a dataset is rejected if every line looks like a box with keypoints inside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitreous.errors import DataError, escape_unprintable

KeypointShape = tuple[int, int] | None  # number of keypoints, and of values per keypoint; None: boxes or polygons
UNSTATED_KEYPOINTS: KeypointShape = (0, 0)  # value if data.yaml has no kpt_shape
MIN_KEYPOINT_LINES = 4  # minimum number of lines for distinguishing boxes with keypoints from polygons
KEYPOINT_MARGIN = 0.02  # share of the image by which a keypoint may lie outside its box


def read_keypoint_shape(config: dict[str, Any], origin: str) -> KeypointShape:
    """Read `kpt_shape` from the content of data.yaml. Raises DataError, with `origin`, if it is not two positive
    integers, the second of them 2 or 3."""
    if "kpt_shape" not in config:
        return UNSTATED_KEYPOINTS
    shape = config["kpt_shape"]
    if shape is None:
        return None
    if not isinstance(shape, list) or len(shape) != 2 or not all(type(count) is int and count > 0 for count in shape):
        hint = "write kpt_shape: [17, 3] for 17 keypoints of x, y and visibility; kpt_shape: null for polygons"
        raise DataError(f"{origin}: kpt_shape {str(shape)[:40]} is not [keypoints, values per keypoint]", hint)
    if shape[1] not in (2, 3):
        raise DataError(f"{origin}: kpt_shape {shape} has {shape[1]} values per keypoint", "use 2 or 3")
    return shape[0], shape[1]


def count_keypoint_values(keypoints: KeypointShape) -> int:
    """Return the number of keypoint values after the box in a line; 0 if lines are boxes or polygons."""
    return keypoints[0] * keypoints[1] if keypoints else 0


def check_unstated_keypoints(lines: Mapping[Path, Sequence[tuple[int, tuple[float, ...]]]]) -> None:
    """Raise DataError if all lines of all label files look like boxes with keypoints. It is called if data.yaml has no
    `kpt_shape`."""
    label_lines = [(image, coordinates) for image, image_lines in lines.items() for _, coordinates in image_lines]
    lengths = {len(coordinates) for _, coordinates in label_lines}
    if len(label_lines) < MIN_KEYPOINT_LINES or len(lengths) > 1 or lengths <= {4}:
        return
    num_extra = lengths.pop() - 4
    for values in (3, 2):
        if num_extra % values == 0 and all(is_keypoint_line(coordinates, values) for _, coordinates in label_lines):
            shape = f"kpt_shape: [{num_extra // values}, {values}]"
            problem = (
                f"all {len(label_lines):,} label lines look like a box and "
                f"{num_extra // values} keypoints, not like polygons"
            )
            hint = f"add {shape} to data.yaml to read the boxes, or kpt_shape: null to read polygons"
            raise DataError(f"{problem}; the first are those of {escape_unprintable(label_lines[0][0])}", hint)


def is_keypoint_line(coordinates: Sequence[float], values: int) -> bool:
    """Return whether the numbers of a line can be a box within the image, followed by keypoints of `values` values each
    that are inside the box or at (0, 0)."""
    x, y, width, height = coordinates[:4]
    points = [coordinates[start : start + values] for start in range(4, len(coordinates), values)]
    if any(abs(centre - 0.5) + extent / 2 > 0.5 + KEYPOINT_MARGIN for centre, extent in ((x, width), (y, height))):
        return False
    if values == 3 and any(point[2] not in (0, 1, 2) for point in points):
        return False
    return all(
        (point[0] == 0 and point[1] == 0)
        or (abs(point[0] - x) <= width / 2 + KEYPOINT_MARGIN and abs(point[1] - y) <= height / 2 + KEYPOINT_MARGIN)
        for point in points
    )
