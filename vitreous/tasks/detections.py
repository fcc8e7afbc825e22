"""Detections: convert the fixed-shape outputs of a detector to boxes and masks on the image. Does not import torch.

In shapes, n is detections, H and W the pixels of the image, N the output slots of a model, M x M the pixels of its
masks, (h, w) the model's image size. Boxes are left, top, right, bottom in pixels; the image spans 0 to its width and
height.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass

import numpy as np
from PIL import Image

from vitreous.data.modalities.base import Preprocess
from vitreous.tasks.tile_merging import Window, merge_tiles
from vitreous.tasks.tiles import TILE_BATCH_SIZE, list_tile_starts

MASK_THRESHOLD = 0.5  # minimum probability of a pixel that belongs to an object

#: boxes (B, N, 4), scores (B, N), labels (B, N); with instance masks also masks (B, N, M, M)
DetectorOutputs = Sequence[np.ndarray]
DetectorFunction = Callable[[np.ndarray], DetectorOutputs]  # pixels (B, C, h, w) -> outputs


@dataclass(frozen=True, eq=False)
class Detections:
    """The detections of an image of `size` (H, W), sorted by score, highest first.

    `boxes` are (n, 4) float32, `labels` (n,) int64 class indices, `scores` (n,) float32. `masks` are the run lengths of
    each mask for `rle_to_mask` (COCO's uncompressed RLE), or None without instance masks. Raises ValueError for arrays
    of other shapes.
    """

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
            raise ValueError(
                f"numbers of objects differ: boxes {shapes[0]}, labels {shapes[1]}, scores {shapes[2]}, "
                f"masks {None if self.masks is None else len(self.masks)}"
            )
        if (np.diff(self.scores) > 0).any():
            raise ValueError("scores must be sorted from the highest to the lowest")

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, selection: np.ndarray) -> Detections:
        """Return a subset of the detections: at indices (m,) int64 in ascending order, or where a boolean mask (n,) is
        true."""
        indices = np.flatnonzero(selection) if selection.dtype == bool else selection
        masks = None if self.masks is None else tuple(self.masks[index] for index in indices)
        return Detections(self.size, self.boxes[indices], self.labels[indices], self.scores[indices], masks=masks)

    def filter_by_score(self, threshold: float) -> Detections:
        """Return the detections whose scores are at least `threshold`, in [0, 1]."""
        return self.take(self.scores >= threshold)


def fit_image(pixels: np.ndarray, preprocess: Preprocess) -> tuple[np.ndarray, tuple[float, float]]:
    """Resize an image to fit a model's size with its aspect ratio kept, and pad it at the right and the bottom.

    Converts pixels (C, H, W) to (C, h, w) of the same dtype, and returns the scale factors of height and width too. The
    padding is the mean of the model's `preprocess`, which is 0 after normalisation, as in ViTDet (arXiv:2203.16527) and
    SAM. For uint8 pixels the mean is rounded to an integer.
    """
    height, width = pixels.shape[1:]
    scale = min(
        model_length / image_length
        for model_length, image_length in zip(preprocess.image, (height, width), strict=True)
    )
    resized = [
        max(1, min(model_length, round(image_length * scale)))
        for model_length, image_length in zip(preprocess.image, (height, width), strict=True)
    ]
    if resized != [height, width]:
        channels = [Image.fromarray(channel).resize(resized[::-1], preprocess.resampling) for channel in pixels]
        pixels = np.stack([np.asarray(channel) for channel in channels])
    return pad_to_model_size(pixels, preprocess), (resized[0] / height, resized[1] / width)


def pad_to_model_size(pixels: np.ndarray, preprocess: Preprocess) -> np.ndarray:
    """Pad pixels (C, H, W) of at most the model's size to (C, h, w) at the right and the bottom, with the mean of
    `preprocess`."""
    if pixels.shape[1:] == preprocess.image:
        return pixels
    mean = np.array(preprocess.mean, np.float32) * preprocess.peak
    mean = np.rint(mean) if np.issubdtype(pixels.dtype, np.integer) else mean
    padded = np.empty((len(pixels), *preprocess.image), pixels.dtype)
    padded[:] = mean.astype(pixels.dtype).reshape(-1, 1, 1)
    padded[:, : pixels.shape[1], : pixels.shape[2]] = pixels
    return padded


def decode_detections(
    outputs: DetectorOutputs,
    size: tuple[int, int],
    scale: tuple[float, float] = (1.0, 1.0),
    threshold: float = 0.0,
    window: Window | None = None,
) -> Detections:
    """Convert a model's outputs for one image to detections on the image of `size` (H, W).

    Args:
        outputs: boxes (N, 4), scores (N,), labels (N,), and optionally masks (N, M, M).
        size: height and width of the image.
        scale: the scale factors of `fit_image`.
        threshold: the minimum score.
        window: the region of the image that the model received; None for the full image. Boxes are clipped to it.

    Slots are dropped if their score is 0 or below `threshold`, if they contain non-finite values, or if their box has
    no area. Equal scores keep their order.
    """
    boxes, scores, labels = (np.asarray(output) for output in outputs[:3])
    left, top, right, bottom = window or (0, 0, size[1], size[0])
    image_boxes = boxes.astype(np.float64) / np.array([*scale[::-1], *scale[::-1]]) + np.array([left, top, left, top])
    clipped_boxes = np.clip(image_boxes, [left, top] * 2, [right, bottom] * 2).astype(np.float32)
    is_valid = (scores > 0) & (scores >= threshold) & np.isfinite(image_boxes).all(1) & np.isfinite(scores)
    is_valid &= (clipped_boxes[:, 2] > clipped_boxes[:, 0]) & (clipped_boxes[:, 3] > clipped_boxes[:, 1])
    indices = np.flatnonzero(is_valid)
    indices = indices[np.argsort(-scores[indices], kind="stable")]
    masks = None
    if len(outputs) > 3:
        area = (left, top, right, bottom)
        masks = tuple(
            paste_mask_runs(np.asarray(outputs[3][index], np.float32), image_boxes[index], size, area)
            for index in indices
        )
    selected_scores = scores[indices].astype(np.float32)
    return Detections(size, clipped_boxes[indices], labels[indices].astype(np.int64), selected_scores, masks=masks)


def paste_mask_runs(probabilities: np.ndarray, box: np.ndarray, size: tuple[int, int], window: Window) -> list[int]:
    """Paste a mask of probabilities (M, M), which covers a box (4,), into an empty image (H, W), and return the run
    lengths of the result.

    Each pixel gets the probability at its centre: bilinear between the centres of the mask's cells, falling to 0 half a
    cell outside. A pixel belongs to the object if its probability is at least `MASK_THRESHOLD`, as in detectron2. If a
    box extends beyond the `window` of the image, its mask is cropped, not resized.
    """
    left, top, right, bottom = window
    x0, y0 = max(left, int(np.floor(box[0])) - 1), max(top, int(np.floor(box[1])) - 1)
    x1, y1 = min(right, int(np.ceil(box[2])) + 1), min(bottom, int(np.ceil(box[3])) + 1)
    if x1 <= x0 or y1 <= y0:
        return [size[0] * size[1]]
    rows = bilinear_cell_weights(np.arange(y0, y1) + 0.5, box[1], box[3], len(probabilities))
    columns = bilinear_cell_weights(np.arange(x0, x1) + 0.5, box[0], box[2], len(probabilities))
    return encode_mask_crop(rows @ probabilities @ columns.T >= MASK_THRESHOLD, (y0, x0), size)


def bilinear_cell_weights(coordinates: np.ndarray, low: float, high: float, num_cells: int) -> np.ndarray:
    """Compute the bilinear weights (m, num_cells) float32 of `num_cells` equal cells between `low` and `high` at
    coordinates (m,) along an axis."""
    centres = (coordinates - low) / (high - low) * num_cells - 0.5
    lower_cell = np.floor(centres).astype(np.int64)
    weights = np.zeros((len(coordinates), num_cells), np.float32)
    for cell, weight in ((lower_cell, lower_cell + 1 - centres), (lower_cell + 1, centres - lower_cell)):
        is_inside = (cell >= 0) & (cell < num_cells)
        weights[np.flatnonzero(is_inside), cell[is_inside]] += weight[is_inside]
    return weights


def encode_mask_crop(crop: np.ndarray, corner: tuple[int, int], size: tuple[int, int]) -> list[int]:
    """Return the run lengths of a mask of `size` (H, W) that equals `crop` (h, w) bool at `corner` (top, left) and is
    empty elsewhere.

    The result equals `mask_to_rle` of the full mask, which is not created.
    """
    top, left = corner
    padded_columns = np.zeros((crop.shape[1], crop.shape[0] + 2), np.int8)
    padded_columns[:, 1:-1] = crop.T
    column, row = np.nonzero(np.diff(padded_columns, axis=1))  # alternating starts and ends of runs
    run_edges = (column + left) * size[0] + row + top
    touching_ends = (
        np.flatnonzero(run_edges[1:-1:2] == run_edges[2::2]) * 2 + 1
    )  # a run to the bottom continues in the next column
    run_edges = np.delete(run_edges, np.concatenate([touching_ends, touching_ends + 1]))
    lengths = np.diff([0, *run_edges.tolist(), size[0] * size[1]]).tolist()
    return lengths[:-1] if lengths[-1] == 0 else lengths


def detect_objects(
    compute: DetectorFunction, pixels: np.ndarray, preprocess: Preprocess, tiles: bool = False, threshold: float = 0.0
) -> Detections:
    """Detect the objects in an image (C, H, W) of any size with `compute`, a function of batches of the model's size.

    Without `tiles` the image is resized to the model's size. With `tiles`, an image larger than the model's size is
    processed at its native resolution in tiles of that size, which overlap by half. An object in several tiles is
    returned once (`merge_tiles`).
    """
    size, tile = (pixels.shape[1], pixels.shape[2]), preprocess.image
    if not tiles or (size[0] <= tile[0] and size[1] <= tile[1]):
        fitted, scale = fit_image(pixels, preprocess)
        return decode_detections([output[0] for output in compute(fitted[None])], size, scale, threshold)
    windows = [
        (left, top, min(left + tile[1], size[1]), min(top + tile[0], size[0]))
        for top in list_tile_starts(max(size[0], tile[0]), tile[0])
        for left in list_tile_starts(max(size[1], tile[1]), tile[1])
    ]
    tile_detections: list[Detections] = []
    for start in range(0, len(windows), TILE_BATCH_SIZE):
        batch_windows = windows[start : start + TILE_BATCH_SIZE]
        outputs = compute(
            np.stack([pad_to_model_size(pixels[:, y0:y1, x0:x1], preprocess) for x0, y0, x1, y1 in batch_windows])
        )
        for tile_index, window in enumerate(batch_windows):
            tile_detections.append(
                decode_detections([output[tile_index] for output in outputs], size, (1.0, 1.0), threshold, window)
            )
    return merge_tile_detections(tile_detections, windows)


def merge_tile_detections(tile_detections: Sequence[Detections], windows: Sequence[Window]) -> Detections:
    """Merge the detections of tiles to one detection per object. All are in coordinates of the image; `windows` are the
    regions of the tiles."""
    size, masks = tile_detections[0].size, None
    boxes, labels, scores = (
        np.concatenate([getattr(detections, name) for detections in tile_detections])
        for name in ("boxes", "labels", "scores")
    )
    tile_indices = np.repeat(np.arange(len(tile_detections)), [len(detections) for detections in tile_detections])
    groups = merge_tiles(boxes, labels, scores=scores, tile=tile_indices, windows=np.array(windows), size=size)
    if tile_detections[0].masks is not None:
        runs = [mask for detections in tile_detections for mask in detections.masks or ()]
        masks = tuple(union_mask_runs([runs[index] for index in group]) for group in groups)
    lows = [boxes[group, :2].min(0) for group in groups]
    highs = [boxes[group, 2:].max(0) for group in groups]
    merged_boxes = np.concatenate([np.reshape(lows, (-1, 2)), np.reshape(highs, (-1, 2))], 1).astype(np.float32)
    firsts = np.array([group[0] for group in groups], np.int64)
    return Detections(size, merged_boxes, labels[firsts], scores[firsts], masks=masks)


def union_mask_runs(runs: Sequence[list[int]]) -> list[int]:
    """Return the run lengths of the union of masks, which are run lengths on images of equal size."""
    if len(runs) == 1:
        return runs[0]
    edges = [np.cumsum(lengths) for lengths in runs]
    begins = np.concatenate([run_ends[: len(run_ends) // 2 * 2 : 2] for run_ends in edges])
    positions = np.concatenate([begins, *(run_ends[1::2] for run_ends in edges)])
    order = np.argsort(positions, kind="stable")  # at equal positions a start sorts before an end
    num_covering = np.cumsum(np.where(order < len(begins), 1, -1))
    boundaries = np.flatnonzero(np.diff([0, *(num_covering > 0).astype(np.int8)]))
    lengths = np.diff([0, *positions[order][boundaries].tolist(), sum(runs[0])]).tolist()
    return lengths[:-1] if lengths[-1] == 0 else lengths
