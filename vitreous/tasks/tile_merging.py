"""Merge the detections of overlapping tiles of an image. Does not import torch.

n detections on an image of H and W pixels, T tiles. Boxes and tiles are left, top, right, bottom in pixels.
"""

from __future__ import annotations

import numpy as np

MERGE_IOU = 0.5  # boxes with at least this intersection over union are the same object
SEAM_MARGIN = 0.02  # a box within this share of a tile's side from its edge is cut by the seam

Window = tuple[int, int, int, int]  # left, top, right, bottom


def merge_tiles(
    boxes: np.ndarray,
    labels: np.ndarray,
    scores: np.ndarray,
    tile: np.ndarray,
    windows: np.ndarray,
    size: tuple[int, int],
) -> list[list[int]]:
    """Group the detections of tiles by object: indices with the best detection first; the box of a group is their hull.

    `boxes` (n, 4), `labels` (n,) and `scores` (n,) are on the image of `size` (H, W); `tile` (n,) is the index of each
    one's tile in `windows` (T, 4). Detections of the same tile are different objects. For two tiles and one class:

    - Two boxes not cut by a seam are the same object if their IoU is at least `MERGE_IOU`; the higher score is kept.
    - A box cut by a seam duplicates an uncut box of another tile if most of it is inside that box. It also does if the
      boxes clipped to the overlap of the tiles have an IoU of at least `MERGE_IOU`. The uncut box is kept.
    - Two boxes cut by seams are fragments of one object if they agree in the overlap; they are joined.

    Groups are sorted by the score of their best detection, highest first; detections without a group are dropped.
    """
    cut = find_boxes_at_seams(boxes, tile, windows, size)
    rivals, joins, dropped = find_duplicate_pairs(boxes, labels, tile, windows, cut)
    alone = np.flatnonzero(~cut)
    taken = np.zeros(len(boxes), bool)
    for row in alone[np.argsort(-scores[alone], kind="stable")]:
        taken[row] = not taken[rivals.get(int(row), [])].any()
    groups = [[int(row)] for row in np.flatnonzero(taken)]
    waiting = dict.fromkeys(row for row in np.flatnonzero(cut).tolist() if row not in dropped)
    while waiting:
        group = [waiting.popitem()[0]]
        for row in group:  # the list grows during the iteration
            group += [other for other in joins.get(row, []) if waiting.pop(other, 0) is None]
        groups.append(sorted(group, key=lambda row: (-scores[row], row)))
    return sorted(groups, key=lambda group: (-scores[group[0]], group[0]))


def find_boxes_at_seams(boxes: np.ndarray, tile: np.ndarray, windows: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Return (n,) bool: the box ends at an edge of its tile inside the image."""
    own = windows[tile].astype(np.float64)
    near = SEAM_MARGIN * np.tile(own[:, 2:] - own[:, :2], 2)
    goes_on = own != np.array([0, 0, size[1], size[0]])
    return ((np.abs(boxes - own) <= near) & goes_on).any(1)


def find_duplicate_pairs(
    boxes: np.ndarray, labels: np.ndarray, tile: np.ndarray, windows: np.ndarray, cut: np.ndarray
) -> tuple[dict[int, list[int]], dict[int, list[int]], set[int]]:
    """Find the pairs that `merge_tiles` considers one object: uncut boxes by index, fragments by index, and the
    fragments that an uncut box of another tile duplicates. Arrays are as in `merge_tiles`; `cut` (n,) bool marks boxes
    at
    seams."""
    rivals: dict[int, list[int]] = {}
    joins: dict[int, list[int]] = {}
    dropped: set[int] = set()
    rows: list[np.ndarray] = [np.flatnonzero(tile == number) for number in range(len(windows))]
    touching: list[list[int]] = np.argwhere(np.triu(compute_intersections(windows, windows)[0] > 0, 1)).tolist()
    for a, b in touching:
        seen = np.concatenate([np.maximum(windows[a, :2], windows[b, :2]), np.minimum(windows[a, 2:], windows[b, 2:])])
        first, second = boxes[rows[a]], boxes[rows[b]]
        same = labels[rows[a]][:, None] == labels[rows[b]]
        inner, areas, others = compute_intersections(first, second)
        agree = compute_iou(
            *compute_intersections(
                *(np.clip(part, np.tile(seen[:2], 2), np.tile(seen[2:], 2)) for part in (first, second))
            )
        )
        one, other = cut[rows[a]][:, None], cut[rows[b]][None]
        whole = same & ~one & ~other & (compute_iou(inner, areas, others) >= MERGE_IOU)
        parts = same & one & other & (agree >= MERGE_IOU)
        for table, pairs in ((rivals, whole), (joins, parts)):
            for i, j in np.argwhere(pairs):
                table.setdefault(int(rows[a][i]), []).append(int(rows[b][j]))
                table.setdefault(int(rows[b][j]), []).append(int(rows[a][i]))
        in_second = same & one & ~other & ((agree >= MERGE_IOU) | (inner >= MERGE_IOU * areas))
        in_first = same & ~one & other & ((agree >= MERGE_IOU) | (inner >= MERGE_IOU * others))
        dropped |= {*rows[a][in_second.any(1)].tolist(), *rows[b][in_first.any(0)].tolist()}
    return rivals, joins, dropped


def compute_intersections(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute the pairwise intersection areas (n, m) of (n, 4) and (m, 4) boxes, and the box areas (n, 1) and (1,
    m)."""
    sides = np.minimum(first[:, None, 2:], second[None, :, 2:]) - np.maximum(first[:, None, :2], second[None, :, :2])
    own = [(part[:, 2:] - part[:, :2]).astype(np.float64).prod(1) for part in (first, second)]
    return sides.clip(0).astype(np.float64).prod(2), own[0][:, None], own[1][None]


def compute_iou(inner: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Compute the intersection over union (n, m) from `compute_intersections`; 0 for boxes without area."""
    return inner / np.maximum(first + second - inner, 1e-12)
