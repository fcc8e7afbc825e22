"""Answers of detectors: from a model's arrays of fixed shapes to boxes and masks on the image. Without torch.

n answers on an image of H and W pixels; N rows that a model gives, M pixels along a side of its masks, (h, w) its size.
Boxes are left, top, right, bottom in pixels; the image reaches from 0 to its width and height.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass

import numpy as np
from PIL import Image

from vitreous.data.modalities.base import Preprocess
from vitreous.tasks.tile_merging import Window, merge_tiles
from vitreous.tasks.tiles import TILE_BATCH_SIZE, list_tile_starts

MASK_THRESHOLD = 0.5  # probability from which a pixel is of an object

DetectorOutputs = Sequence[
    np.ndarray
]  # boxes (B, N, 4), scores (B, N), labels (B, N), of instances also masks (B, N, M, M)
DetectorFunction = Callable[[np.ndarray], DetectorOutputs]  # (B, C, h, w) pixels -> the arrays


@dataclass(frozen=True, eq=False)
class Detections:
    """What a detector answers for an image of `size` (H, W): `boxes` (n, 4) float32, `labels` (n,) int64, positions in
    the list of classes, `scores` (n,) float32, the highest first; of instances also `masks`, the run lengths of each as
    `mask_of_runs` takes them (COCO's uncompressed ones), else None. Raises ValueError for arrays of other shapes."""

    size: tuple[int, int]
    boxes: np.ndarray
    labels: np.ndarray
    scores: np.ndarray
    _: KW_ONLY
    masks: tuple[list[int], ...] | None = None

    def __post_init__(self) -> None:
        n = len(self.labels)
        shapes = self.boxes.shape, self.labels.shape, self.scores.shape
        if shapes != ((n, 4), (n,), (n,)) or (self.masks is not None and len(self.masks) != n):
            raise ValueError(f"boxes {shapes[0]}, labels {shapes[1]}, scores {shapes[2]}, or masks of another number")
        if (np.diff(self.scores) > 0).any():
            raise ValueError("the highest score comes first")

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: np.ndarray) -> Detections:
        """Return the answers at positions (m,) int64 in ascending order, or of a mask (n,) bool."""
        places = np.flatnonzero(rows) if rows.dtype == bool else rows
        masks = None if self.masks is None else tuple(self.masks[place] for place in places)
        return Detections(self.size, self.boxes[places], self.labels[places], self.scores[places], masks=masks)

    def filter_by_score(self, threshold: float) -> Detections:
        """Return the answers whose scores are at least `threshold`, in [0, 1]."""
        return self.take(self.scores >= threshold)


def fit_image(pixels: np.ndarray, preprocess: Preprocess) -> tuple[np.ndarray, tuple[float, float]]:
    """Scale an image to fit whole into a model's size, its sides in proportion, filled up at the right and the bottom.

    (C, H, W) -> (C, h, w) of the same dtype, and what the rows and the columns were scaled by. What is filled in has
    the mean of the model's `preprocess`, which is 0 after normalisation, as in ViTDet (arXiv:2203.16527) and SAM; of
    uint8 to half a step.
    """
    height, width = pixels.shape[1:]
    unit = min(side / own for side, own in zip(preprocess.image, (height, width), strict=True))
    inner = [max(1, min(side, round(own * unit))) for side, own in zip(preprocess.image, (height, width), strict=True)]
    if inner != [height, width]:
        bands = [Image.fromarray(band).resize(inner[::-1], preprocess.resampling) for band in pixels]
        pixels = np.stack([np.asarray(band) for band in bands])
    return pad_to_model_size(pixels, preprocess), (inner[0] / height, inner[1] / width)


def pad_to_model_size(pixels: np.ndarray, preprocess: Preprocess) -> np.ndarray:
    """(C, H, W), not larger than a model's size -> (C, h, w): filled up with its mean at the right and the bottom."""
    if pixels.shape[1:] == preprocess.image:
        return pixels
    mean = np.array(preprocess.mean, np.float32) * preprocess.peak
    mean = np.rint(mean) if np.issubdtype(pixels.dtype, np.integer) else mean
    whole = np.empty((len(pixels), *preprocess.image), pixels.dtype)
    whole[:] = mean.astype(pixels.dtype).reshape(-1, 1, 1)
    whole[:, : pixels.shape[1], : pixels.shape[2]] = pixels
    return whole


def decode_detections(
    outputs: DetectorOutputs,
    size: tuple[int, int],
    scale: tuple[float, float] = (1.0, 1.0),
    threshold: float = 0.0,
    window: Window | None = None,
) -> Detections:
    """What a model gives for one image -> answers on the image of `size` (H, W).

    `outputs`: boxes (N, 4), scores (N,), labels (N,), masks (N, M, M). `scale` is that of `fit_image`; `window`: the
    part of the image that the model saw, by default all of it. Boxes end at its edges; rows with scores of 0 or below
    `threshold`, numbers that are not finite, and boxes without area are left out. Equal scores stay in order.
    """
    boxes, scores, labels = (np.asarray(part) for part in outputs[:3])
    left, top, right, bottom = window or (0, 0, size[1], size[0])
    whole = boxes.astype(np.float64) / np.array([*scale[::-1], *scale[::-1]]) + np.array([left, top, left, top])
    cut = np.clip(whole, [left, top] * 2, [right, bottom] * 2).astype(np.float32)
    good = (scores > 0) & (scores >= threshold) & np.isfinite(whole).all(1) & np.isfinite(scores)
    good &= (cut[:, 2] > cut[:, 0]) & (cut[:, 3] > cut[:, 1])
    rows = np.flatnonzero(good)
    rows = rows[np.argsort(-scores[rows], kind="stable")]
    masks = None
    if len(outputs) > 3:
        area = (left, top, right, bottom)
        masks = tuple(paste_mask_runs(np.asarray(outputs[3][row], np.float32), whole[row], size, area) for row in rows)
    chosen = scores[rows].astype(np.float32)
    return Detections(size, cut[rows], labels[rows].astype(np.int64), chosen, masks=masks)


def paste_mask_runs(probabilities: np.ndarray, box: np.ndarray, size: tuple[int, int], window: Window) -> list[int]:
    """A mask (M, M) of probabilities inside a box (4,) -> run lengths of the pixels of an image (H, W) that are its.

    Each pixel takes the probability at its centre, bilinear between the centres of the cells of the mask and 0 half a
    cell outside, and is the object's from `MASK_THRESHOLD` on, as in detectron2. The box may reach over the `window` of
    the image, which then cuts the mask off and does not squeeze it.
    """
    left, top, right, bottom = window
    x0, y0 = max(left, int(np.floor(box[0])) - 1), max(top, int(np.floor(box[1])) - 1)
    x1, y1 = min(right, int(np.ceil(box[2])) + 1), min(bottom, int(np.ceil(box[3])) + 1)
    if x1 <= x0 or y1 <= y0:
        return [size[0] * size[1]]
    rows = bilinear_cell_weights(np.arange(y0, y1) + 0.5, box[1], box[3], len(probabilities))
    columns = bilinear_cell_weights(np.arange(x0, x1) + 0.5, box[0], box[2], len(probabilities))
    return encode_placed_mask(rows @ probabilities @ columns.T >= MASK_THRESHOLD, (y0, x0), size)


def bilinear_cell_weights(places: np.ndarray, low: float, high: float, cells: int) -> np.ndarray:
    """(m,) places along an axis -> (m, `cells`) float32, the share of each of the cells that divide low .. high."""
    centres = (places - low) / (high - low) * cells - 0.5
    first = np.floor(centres).astype(np.int64)
    shares = np.zeros((len(places), cells), np.float32)
    for cell, share in ((first, first + 1 - centres), (first + 1, centres - first)):
        inside = (cell >= 0) & (cell < cells)
        shares[np.flatnonzero(inside), cell[inside]] += share[inside]
    return shares


def encode_placed_mask(part: np.ndarray, corner: tuple[int, int], size: tuple[int, int]) -> list[int]:
    """Run lengths of a mask of `size` (H, W) that is (h, w) bool at `corner` (top, left) and empty elsewhere.

    `runs_of_mask` of the whole, without the whole.
    """
    top, left = corner
    columns = np.zeros((part.shape[1], part.shape[0] + 2), np.int8)
    columns[:, 1:-1] = part.T
    column, row = np.nonzero(np.diff(columns, axis=1))  # where a run begins and where it ends, in turn
    edges = (column + left) * size[0] + row + top
    ends = np.flatnonzero(edges[1:-1:2] == edges[2::2]) * 2 + 1  # a run down to the last row goes on in the next column
    edges = np.delete(edges, np.concatenate([ends, ends + 1]))
    lengths = np.diff([0, *edges.tolist(), size[0] * size[1]]).tolist()
    return lengths[:-1] if lengths[-1] == 0 else lengths


def detect_objects(
    compute: DetectorFunction, pixels: np.ndarray, preprocess: Preprocess, tiles: bool = False, threshold: float = 0.0
) -> Detections:
    """The answers for an image (C, H, W) of any size.

    The image is scaled to the model's size; with `tiles` one that is larger is answered at its own resolution by tiles
    of that size, half of which its neighbour covers too, and an object on a seam is answered once (`merge_tiles`).
    """
    size, tile = (pixels.shape[1], pixels.shape[2]), preprocess.image
    if not tiles or (size[0] <= tile[0] and size[1] <= tile[1]):
        fitted, scale = fit_image(pixels, preprocess)
        return decode_detections([part[0] for part in compute(fitted[None])], size, scale, threshold)
    windows = [
        (left, top, min(left + tile[1], size[1]), min(top + tile[0], size[0]))
        for top in list_tile_starts(max(size[0], tile[0]), tile[0])
        for left in list_tile_starts(max(size[1], tile[1]), tile[1])
    ]
    parts: list[Detections] = []
    for begin in range(0, len(windows), TILE_BATCH_SIZE):
        some = windows[begin : begin + TILE_BATCH_SIZE]
        outputs = compute(np.stack([pad_to_model_size(pixels[:, y0:y1, x0:x1], preprocess) for x0, y0, x1, y1 in some]))
        for row, window in enumerate(some):
            parts.append(decode_detections([part[row] for part in outputs], size, (1.0, 1.0), threshold, window))
    return merge_tile_detections(parts, windows)


def merge_tile_detections(parts: Sequence[Detections], windows: Sequence[Window]) -> Detections:
    """The answers of tiles, on the image that their `windows` cover -> one answer for each object."""
    size, masks = parts[0].size, None
    boxes, labels, scores = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("boxes", "labels", "scores")
    )
    tile = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    groups = merge_tiles(boxes, labels, scores=scores, tile=tile, windows=np.array(windows), size=size)
    if parts[0].masks is not None:
        runs = [one for part in parts for one in part.masks or ()]
        masks = tuple(union_mask_runs([runs[row] for row in group]) for group in groups)
    lows = [boxes[group, :2].min(0) for group in groups]
    highs = [boxes[group, 2:].max(0) for group in groups]
    table = np.concatenate([np.reshape(lows, (-1, 2)), np.reshape(highs, (-1, 2))], 1).astype(np.float32)
    firsts = np.array([group[0] for group in groups], np.int64)
    return Detections(size, table, labels[firsts], scores[firsts], masks=masks)


def union_mask_runs(runs: Sequence[list[int]]) -> list[int]:
    """Run lengths of masks of one size -> those of the pixels that any of them has."""
    if len(runs) == 1:
        return runs[0]
    edges = [np.cumsum(lengths) for lengths in runs]
    begins = np.concatenate([cut[: len(cut) // 2 * 2 : 2] for cut in edges])
    places = np.concatenate([begins, *(cut[1::2] for cut in edges)])
    order = np.argsort(places, kind="stable")  # where a run ends and another begins, it begins first
    depth = np.cumsum(np.where(order < len(begins), 1, -1))
    first = np.flatnonzero(np.diff([0, *(depth > 0).astype(np.int8)]))
    lengths = np.diff([0, *places[order][first].tolist(), sum(runs[0])]).tolist()
    return lengths[:-1] if lengths[-1] == 0 else lengths
