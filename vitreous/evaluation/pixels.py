"""Evaluate semantic segmentation: confusion matrices of images, and the metrics from them.

n images, K classes, H and W pixels.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from vitreous.data.annotations.target import IGNORE_INDEX, AnnotatedSplit, Target
from vitreous.data.loader import EvalLoader
from vitreous.errors import DataError
from vitreous.evaluation.boundary import compute_boundary_f, count_boundary_pixels
from vitreous.evaluation.evaluator import Evaluator, SplitOutputs
from vitreous.evaluation.panoptic import (
    compute_panoptic_quality,
    count_panoptic_matches,
    segments_from_class_map,
    segments_from_target,
)
from vitreous.inference.engine import ModelEngine
from vitreous.tasks.intervals import bootstrap_metrics, percentile_interval
from vitreous.tasks.report import Report
from vitreous.tasks.tiles import TileFunction, predict_class_map, to_native_array

MIOU_BOOTSTRAP_DRAWS = 1000  # bootstrap draws


class SegmentationEvaluator(Evaluator):
    """Evaluates class maps by the mean intersection over union (mIoU).

    A model's output for an image is its confusion matrix, (K * K,) counts of pixels by true and predicted class. If
    `boundary` is set, it is followed by 4 K values of `count_boundary_pixels`; if `things` (K,) bool marks countable
    classes, by 4 K of `count_panoptic_matches`, with one predicted segment per connected component of these.
    """

    name = "miou"

    def __init__(self, classes: tuple[str, ...], boundary: bool = False, things: np.ndarray | None = None) -> None:
        self.classes, self.boundary, self.things = classes, boundary, things

    def outputs(
        self, engine: ModelEngine, reader: EvalLoader, on_images: Callable[[int], None] = lambda images: None
    ) -> tuple[np.ndarray, dict[int, DataError]]:
        """Compute (n, K * K) float64 confusion matrices of the images of `reader.split`, at their native size, and the
        other counts.

        Unreadable images have zeros, and are also returned by index. Raises DataError for annotations that cannot be
        read."""
        split, preprocess, count = reader.split, engine.preprocess, len(self.classes)
        assert isinstance(split, AnnotatedSplit), "the split must have annotations"
        width = count * count + 4 * count * (self.boundary + (self.things is not None))
        rows, bad = np.zeros((len(split), width)), {}
        for sample in range(len(split)):
            try:
                picture = preprocess.decode(split.raw(sample), split.name(sample))
            except DataError as error:
                bad[sample] = error
                continue
            answer = predict_class_map(make_logits_function(engine), to_native_array(picture), preprocess.image)
            rows[sample] = self.counts(split.target(sample), answer)
            on_images(1)
        return rows, bad

    def counts(self, truth: Target, answer: np.ndarray) -> np.ndarray:
        """Compute an image's row (width,) of counts from its annotation and its predicted class map (*image) int32."""
        classes, count = truth.class_map(), len(self.classes)
        parts = [compute_pixel_confusion(classes, answer, count)]
        if self.boundary:
            parts.append(count_boundary_pixels(classes, answer, count))
        if self.things is not None:
            parts.append(
                count_panoptic_matches(segments_from_target(truth), segments_from_class_map(answer, self.things), count)
            )
        return np.concatenate([part.ravel() for part in parts])

    def metrics(self, sums: np.ndarray) -> dict[str, float | None]:
        """Compute the metrics from the sums (width,) of the images' rows."""
        count, rest = len(self.classes), sums[len(self.classes) ** 2 :].reshape(-1, len(self.classes), 4)
        metrics = compute_segmentation_metrics(sums[: count * count].reshape(count, count))
        if self.boundary:
            metrics["boundary_f"] = compute_boundary_f(rest[0])
        return metrics | (compute_panoptic_quality(rest[-1], self.things) if self.things is not None else {})

    def report(self, outputs: SplitOutputs, *others: SplitOutputs) -> Report:
        """Compute mIoU, mean Dice, pixel accuracy and per-class metrics, and boundary F and panoptic quality if they
        were counted; 95 % bootstrap intervals over images."""
        flat = outputs.rows.astype(np.float64)
        matrices, metrics = extract_confusion_matrices(flat, len(self.classes)), self.metrics(flat.sum(0))
        intervals = {}
        if len(matrices) > 1:

            def drawn(counts: np.ndarray) -> dict[str, np.ndarray]:
                """Compute each metric (D,) from draw counts (n, D)."""
                sums = [self.metrics(one) for one in (flat.T @ counts).T]
                return {name: np.array([one[name] or 0.0 for one in sums]) for name in metrics}

            draws = bootstrap_metrics(drawn, len(matrices), MIOU_BOOTSTRAP_DRAWS)
            intervals = {name: percentile_interval(draws[name]) for name in metrics}
        rows = compute_class_metrics(matrices, self.classes)
        true, answered = np.nonzero(matrices.sum(0))
        cells = np.stack([true, answered, matrices.sum(0)[true, answered].astype(np.int64)], 1)
        unreadable = int((~outputs.readable).sum())
        return Report(
            len(outputs.rows),
            unreadable,
            metrics=dict(metrics),
            intervals=dict(intervals),
            per_class=rows,
            cells=cells,
            primary="miou",
        )

    def paired_intervals(
        self, rows: np.ndarray, other: SegmentationEvaluator, other_rows: np.ndarray
    ) -> dict[str, tuple[float, float] | None]:
        """Return the intervals of the differences of mIoU, Dice and pixel accuracy."""
        return bootstrap_miou_differences(rows, other_rows, len(self.classes))


def bootstrap_miou_differences(
    first: np.ndarray, second: np.ndarray, count: int
) -> dict[str, tuple[float, float] | None]:
    """Compute 95 % intervals of metric differences, second minus first, by a bootstrap over the same images.

    (n, width) rows of both, which begin with K * K confusion counts; K is `count`. None for fewer than two images.
    """
    names = ("miou", "dice", "pixel_accuracy")
    if len(first) < 2:
        return dict.fromkeys(names)
    sides = [rows[:, : count * count].astype(np.float64) for rows in (first, second)]

    def drawn(counts: np.ndarray) -> dict[str, np.ndarray]:
        """Compute each difference (D,) from draw counts (n, D)."""
        sums = [(rows.T @ counts).T.reshape(-1, count, count) for rows in sides]
        pairs = [
            (compute_segmentation_metrics(one), compute_segmentation_metrics(other))
            for one, other in zip(*sums, strict=True)
        ]
        return {name: np.array([(b[name] or 0.0) - (a[name] or 0.0) for a, b in pairs]) for name in names}

    draws = bootstrap_metrics(drawn, len(first), MIOU_BOOTSTRAP_DRAWS)
    return {name: percentile_interval(draws[name]) for name in names}


def extract_confusion_matrices(rows: np.ndarray, count: int) -> np.ndarray:
    """Return the (n, K, K) confusion matrices in (n, width) rows of images; K is `count`."""
    return rows[:, : count * count].reshape(-1, count, count)


def make_logits_function(engine: ModelEngine) -> TileFunction:
    """Return a function that computes (B, K, *image) logits of tiles (B, C, *image) with an engine."""
    return lambda tiles: engine(torch.from_numpy(tiles)).numpy()


def compute_pixel_confusion(classes: np.ndarray, answer: np.ndarray, count: int) -> np.ndarray:
    """Count pixels by true (rows) and predicted class, (K, K) int64, of (H, W) int maps; IGNORE is skipped."""
    known = classes != IGNORE_INDEX
    codes = classes[known].astype(np.int64) * count + answer[known]
    return np.bincount(codes, minlength=count * count).reshape(count, count)


def compute_segmentation_metrics(matrix: np.ndarray) -> dict[str, float | None]:
    """Compute mIoU, mean Dice and pixel accuracy from (K, K) counts of pixels, rows are true.

    Classes that are neither true nor predicted are excluded from means. None if no pixel was counted."""
    right, true, answered = np.diag(matrix), matrix.sum(1), matrix.sum(0)
    present = true + answered > 0
    if not present.any():
        return {"miou": None, "dice": None, "pixel_accuracy": None}
    union = (true + answered - right)[present]
    dice = 2 * right[present] / (true + answered)[present]
    accuracy = right.sum() / matrix.sum()
    return {
        "miou": float((right[present] / union).mean()),
        "dice": float(dice.mean()),
        "pixel_accuracy": float(accuracy),
    }


def compute_class_metrics(matrices: np.ndarray, classes: tuple[str, ...]) -> list[dict[str, object]]:
    """Return one row per class from (n, K, K) counts: images with the class, IoU, Dice, recall, precision, and the
    class it is most often confused with. `image_dice` is the mean Dice over the images with the class, as usual for
    volumes."""
    matrix = matrices.sum(0)
    right, true, answered = np.diag(matrix), matrix.sum(1), matrix.sum(0)
    own = 2 * np.diagonal(matrices, axis1=1, axis2=2) / (matrices.sum(1) + matrices.sum(2)).clip(min=1)  # (n, K)
    holding = matrices.sum(2) > 0
    rows: list[dict[str, object]] = []
    for index, name in enumerate(classes):
        others = matrix[index].copy()
        others[index] = 0
        union = true[index] + answered[index] - right[index]
        rows.append(
            {
                "class": name,
                "images": int((matrices[:, index].sum(1) > 0).sum()),
                "recall": right[index] / true[index] if true[index] else None,
                "precision": right[index] / answered[index] if answered[index] else None,
                "f1": 2 * right[index] / (true[index] + answered[index]) if true[index] + answered[index] else None,
                "image_dice": own[holding[:, index], index].mean() if holding[:, index].any() else None,
                "iou": right[index] / union if union else None,
                "confused_with": classes[int(others.argmax())] if others.any() else None,
            }
        )
    return rows
