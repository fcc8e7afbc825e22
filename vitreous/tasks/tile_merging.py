"""Merge the detections of overlapping tiles of an image. Does not import torch.

In shapes, n is detections and T tiles; H and W are the pixels of the image. Boxes and tiles are left, top, right,
bottom in pixels. A seam is an edge of a tile inside the image.
"""

from __future__ import annotations

import numpy as np

MERGE_IOU = 0.5  # minimum intersection over union of boxes of the same object
SEAM_MARGIN = 0.02  # a box is cut by a seam if it ends within this share of the tile's height or width from it

Window = tuple[int, int, int, int]  # left, top, right, bottom


def merge_tiles(
    boxes: np.ndarray,
    labels: np.ndarray,
    scores: np.ndarray,
    tile: np.ndarray,
    windows: np.ndarray,
    size: tuple[int, int],
) -> list[list[int]]:
    """Group the detections of tiles by object.

    Returns lists of indices with the best detection first; the box of a group is the hull of its boxes. `boxes` (n, 4),
    `labels` (n,) and `scores` (n,) are on the image of `size` (H, W). `tile` (n,) is the index of each detection's tile
    in `windows` (T, 4). Detections of the same tile are different objects. For two tiles and one class:

    - Two boxes that are not cut by a seam are the same object if their IoU is at least `MERGE_IOU`; the higher score is
      kept.
    - A box cut by a seam duplicates an uncut box of another tile if most of it is inside that box. It also does if the
      boxes clipped to the overlap of the tiles have an IoU of at least `MERGE_IOU`. The uncut box is kept.
    - Two boxes cut by seams are fragments of one object if they agree in the overlap; they are joined.

    Groups are sorted by the score of their best detection, highest first; dropped duplicates are in no group.
    """
    is_cut = find_boxes_at_seams(boxes, tile, windows, size)
    rivals, joins, dropped = find_duplicate_pairs(boxes, labels, tile, windows, is_cut)
    uncut = np.flatnonzero(~is_cut)
    is_kept = np.zeros(len(boxes), bool)
    for index in uncut[np.argsort(-scores[uncut], kind="stable")]:
        is_kept[index] = not is_kept[rivals.get(int(index), [])].any()
    groups = [[int(index)] for index in np.flatnonzero(is_kept)]
    remaining = dict.fromkeys(index for index in np.flatnonzero(is_cut).tolist() if index not in dropped)
    while remaining:
        group = [remaining.popitem()[0]]
        for index in group:  # the list grows during the iteration
            group += [neighbour for neighbour in joins.get(index, []) if remaining.pop(neighbour, 0) is None]
        groups.append(sorted(group, key=lambda index: (-scores[index], index)))
    return sorted(groups, key=lambda group: (-scores[group[0]], group[0]))


def find_boxes_at_seams(boxes: np.ndarray, tile: np.ndarray, windows: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Return whether each box ends at a seam, an edge of its tile inside the image, (n,) bool. Arrays are as in
    `merge_tiles`."""
    box_windows = windows[tile].astype(np.float64)
    margin = SEAM_MARGIN * np.tile(box_windows[:, 2:] - box_windows[:, :2], 2)
    is_inner_edge = box_windows != np.array([0, 0, size[1], size[0]])
    return ((np.abs(boxes - box_windows) <= margin) & is_inner_edge).any(1)


def find_duplicate_pairs(
    boxes: np.ndarray, labels: np.ndarray, tile: np.ndarray, windows: np.ndarray, is_cut: np.ndarray
) -> tuple[dict[int, list[int]], dict[int, list[int]], set[int]]:
    """Find the boxes that `merge_tiles` considers one object.

    Returns the duplicates of each uncut box by index, the fragments of the same object of each fragment by index, and
    the fragments that duplicate an uncut box. Arrays are as in `merge_tiles`; `is_cut` (n,) bool marks boxes at seams.
    """
    rivals: dict[int, list[int]] = {}
    joins: dict[int, list[int]] = {}
    dropped: set[int] = set()
    tile_indices: list[np.ndarray] = [np.flatnonzero(tile == tile_index) for tile_index in range(len(windows))]
    touching: list[list[int]] = np.argwhere(np.triu(compute_intersections(windows, windows)[0] > 0, 1)).tolist()
    for a, b in touching:
        overlap = np.concatenate(
            [np.maximum(windows[a, :2], windows[b, :2]), np.minimum(windows[a, 2:], windows[b, 2:])]
        )
        boxes_a, boxes_b = boxes[tile_indices[a]], boxes[tile_indices[b]]
        same_class = labels[tile_indices[a]][:, None] == labels[tile_indices[b]]
        intersections, areas_a, areas_b = compute_intersections(boxes_a, boxes_b)
        overlap_iou = compute_iou(
            *compute_intersections(
                *(
                    np.clip(box_array, np.tile(overlap[:2], 2), np.tile(overlap[2:], 2))
                    for box_array in (boxes_a, boxes_b)
                )
            )
        )
        cut_a, cut_b = is_cut[tile_indices[a]][:, None], is_cut[tile_indices[b]][None]
        uncut_pairs = same_class & ~cut_a & ~cut_b & (compute_iou(intersections, areas_a, areas_b) >= MERGE_IOU)
        fragment_pairs = same_class & cut_a & cut_b & (overlap_iou >= MERGE_IOU)
        for partners, pairs in ((rivals, uncut_pairs), (joins, fragment_pairs)):
            for i, j in np.argwhere(pairs):
                partners.setdefault(int(tile_indices[a][i]), []).append(int(tile_indices[b][j]))
                partners.setdefault(int(tile_indices[b][j]), []).append(int(tile_indices[a][i]))
        inside_b = same_class & cut_a & ~cut_b & ((overlap_iou >= MERGE_IOU) | (intersections >= MERGE_IOU * areas_a))
        inside_a = same_class & ~cut_a & cut_b & ((overlap_iou >= MERGE_IOU) | (intersections >= MERGE_IOU * areas_b))
        dropped |= {*tile_indices[a][inside_b.any(1)].tolist(), *tile_indices[b][inside_a.any(0)].tolist()}
    return rivals, joins, dropped


def compute_intersections(boxes_a: np.ndarray, boxes_b: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute the pairwise intersection areas (n, m) of boxes (n, 4) and (m, 4), and the areas of the boxes, (n, 1) and
    (1, m)."""
    extents = np.minimum(boxes_a[:, None, 2:], boxes_b[None, :, 2:]) - np.maximum(
        boxes_a[:, None, :2], boxes_b[None, :, :2]
    )
    areas = [(boxes[:, 2:] - boxes[:, :2]).astype(np.float64).prod(1) for boxes in (boxes_a, boxes_b)]
    return extents.clip(0).astype(np.float64).prod(2), areas[0][:, None], areas[1][None]


def compute_iou(intersections: np.ndarray, areas_a: np.ndarray, areas_b: np.ndarray) -> np.ndarray:
    """Compute the intersection over union (n, m) from the output of `compute_intersections`; 0 for boxes without
    area."""
    return intersections / np.maximum(areas_a + areas_b - intersections, 1e-12)
