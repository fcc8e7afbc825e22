"""Detections: from a detector's fixed-shape outputs to boxes and masks on the image. Does not import torch.

n detections on an image of H and W pixels; N output slots of a model, masks of M x M pixels, and its size (h, w).
Boxes are left, top, right, bottom in pixels; the image spans 0 to its width and height.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass

import numpy as np
from PIL import Image

from vitreous.data.modalities.base import Preprocess
from vitreous.tasks.tile_merging import Window, merge_tiles
from vitreous.tasks.tiles import TILE_BATCH_SIZE, list_tile_starts

MASK_THRESHOLD = 0.5  # a pixel belongs to an object from this probability

DetectorOutputs = Sequence[
    np.ndarray
]  # boxes (B, N, 4), scores (B, N), labels (B, N); with instance masks also masks (B, N, M, M)
DetectorFunction = Callable[[np.ndarray], DetectorOutputs]  # (B, C, h, w) pixels -> outputs


@dataclass(frozen=True, eq=False)
class Detections:
    """The detections of an image of `size` (H, W): `boxes` (n, 4) float32, `labels` (n,) int64 class indices, and
    `scores` (n,) float32, highest first. With instance masks also `masks`, the run lengths of each as `mask_of_runs`
    expects them (COCO's uncompressed RLE), else None. Raises ValueError for arrays of other shapes."""

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
            raise ValueError(f"boxes {shapes[0]}, labels {shapes[1]}, scores {shapes[2]}, or masks do not match")
        if (np.diff(self.scores) > 0).any():
            raise ValueError("scores must be sorted from the highest to the lowest")

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: np.ndarray) -> Detections:
        """Return the detections at indices (m,) int64 in ascending order, or of a boolean mask (n,)."""
        places = np.flatnonzero(rows) if rows.dtype == bool else rows
        masks = None if self.masks is None else tuple(self.masks[place] for place in places)
        return Detections(self.size, self.boxes[places], self.labels[places], self.scores[places], masks=masks)

    def filter_by_score(self, threshold: float) -> Detections:
        """Return the detections whose scores are at least `threshold`, in [0, 1]."""
        return self.take(self.scores >= threshold)


def fit_image(pixels: np.ndarray, preprocess: Preprocess) -> tuple[np.ndarray, tuple[float, float]]:
    """Resize an image to fit a model's size with its aspect ratio kept, padded at the right and the bottom.

    Returns pixels (C, H, W) -> (C, h, w) of the same dtype, and the scale of rows and columns. The padding is the mean
    of the model's `preprocess`, which is 0 after normalisation, as in ViTDet (arXiv:2203.16527) and SAM; uint8 pixels
    are rounded to within half a step.
    """
    height, width = pixels.shape[1:]
    unit = min(side / own for side, own in zip(preprocess.image, (height, width), strict=True))
    inner = [max(1, min(side, round(own * unit))) for side, own in zip(preprocess.image, (height, width), strict=True)]
    if inner != [height, width]:
        bands = [Image.fromarray(band).resize(inner[::-1], preprocess.resampling) for band in pixels]
        pixels = np.stack([np.asarray(band) for band in bands])
    return pad_to_model_size(pixels, preprocess), (inner[0] / height, inner[1] / width)


def pad_to_model_size(pixels: np.ndarray, preprocess: Preprocess) -> np.ndarray:
    """Pad pixels (C, H, W), at most a model's size, to (C, h, w) with its mean at the right and the bottom."""
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
    """Convert a model's outputs for one image to detections on the image of `size` (H, W).

    `outputs`: boxes (N, 4), scores (N,), labels (N,), masks (N, M, M). `scale` is that of `fit_image`. `window` is the
    region of the image that the model received, by default all of it; boxes are clipped to it. Drops slots with scores
    of 0 or below `threshold`, non-finite values, and boxes without area. Equal scores keep their order.
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
    """Paste a mask (M, M) of probabilities inside a box (4,) into an image (H, W) and return its run lengths.

    Each pixel has the probability at its centre: bilinear between the centres of the mask's cells, and 0 half a cell
    outside. It belongs to the object from `MASK_THRESHOLD`, as in detectron2. A box may extend beyond the `window` of
    the image; its mask is then cropped, not squeezed.
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
    """Compute the weight (m, `cells`) float32 of each cell of low .. high for (m,) coordinates along an axis."""
    centres = (places - low) / (high - low) * cells - 0.5
    first = np.floor(centres).astype(np.int64)
    shares = np.zeros((len(places), cells), np.float32)
    for cell, share in ((first, first + 1 - centres), (first + 1, centres - first)):
        inside = (cell >= 0) & (cell < cells)
        shares[np.flatnonzero(inside), cell[inside]] += share[inside]
    return shares


def encode_placed_mask(part: np.ndarray, corner: tuple[int, int], size: tuple[int, int]) -> list[int]:
    """Return run lengths of a mask of `size` (H, W) that is (h, w) bool at `corner` (top, left) and empty elsewhere.

    Equals `runs_of_mask` of the full mask, without creating it.
    """
    top, left = corner
    columns = np.zeros((part.shape[1], part.shape[0] + 2), np.int8)
    columns[:, 1:-1] = part.T
    column, row = np.nonzero(np.diff(columns, axis=1))  # alternating starts and ends of runs
    edges = (column + left) * size[0] + row + top
    ends = np.flatnonzero(edges[1:-1:2] == edges[2::2]) * 2 + 1  # a run to the bottom continues in the next column
    edges = np.delete(edges, np.concatenate([ends, ends + 1]))
    lengths = np.diff([0, *edges.tolist(), size[0] * size[1]]).tolist()
    return lengths[:-1] if lengths[-1] == 0 else lengths


def detect_objects(
    compute: DetectorFunction, pixels: np.ndarray, preprocess: Preprocess, tiles: bool = False, threshold: float = 0.0
) -> Detections:
    """Detect the objects in an image (C, H, W) of any size.

    The image is resized to the model's size. With `tiles`, a larger image is processed at its native resolution in
    tiles of that size, which overlap by half; an object on a seam is returned once (`merge_tiles`).
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
    """Merge the detections of tiles, on the image that their `windows` cover: one detection per object."""
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
    """Return the run lengths of the union of masks of equal size."""
    if len(runs) == 1:
        return runs[0]
    edges = [np.cumsum(lengths) for lengths in runs]
    begins = np.concatenate([cut[: len(cut) // 2 * 2 : 2] for cut in edges])
    places = np.concatenate([begins, *(cut[1::2] for cut in edges)])
    order = np.argsort(places, kind="stable")  # at equal positions a start sorts before an end
    depth = np.cumsum(np.where(order < len(begins), 1, -1))
    first = np.flatnonzero(np.diff([0, *(depth > 0).astype(np.int8)]))
    lengths = np.diff([0, *places[order][first].tolist(), sum(runs[0])]).tolist()
    return lengths[:-1] if lengths[-1] == 0 else lengths
