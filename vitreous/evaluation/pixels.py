"""Evaluate semantic segmentation: count pixels of each image in a confusion matrix, and compute metrics from the
counts.

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

MIOU_BOOTSTRAP_DRAWS = 1000  # bootstrap draws for confidence intervals


class SegmentationEvaluator(Evaluator):
    """Evaluates class maps by the mean intersection over union (mIoU).

    A model's output for an image is a row of counts: its confusion matrix, (K * K,) counts of pixels by true and
    predicted class. If `boundary` is set, 4 K values of `count_boundary_pixels` follow. If `things` (K,) bool marks
    countable classes, 4 K values of `count_panoptic_matches` follow, with one predicted segment per connected component
    of these classes.
    """

    name = "miou"

    def __init__(self, classes: tuple[str, ...], boundary: bool = False, things: np.ndarray | None = None) -> None:
        self.classes, self.boundary, self.things = classes, boundary, things

    def outputs(
        self, engine: ModelEngine, reader: EvalLoader, on_images: Callable[[int], None] = lambda images: None
    ) -> tuple[np.ndarray, dict[int, DataError]]:
        """Compute the counts of the images of `reader.split` at their native size, (n, width) float64, and read errors
        by index. Unreadable images have zeros. Raises DataError for annotations that cannot be read."""
        split, preprocess, num_classes = reader.split, engine.preprocess, len(self.classes)
        assert isinstance(split, AnnotatedSplit), "the split must have annotations"
        width = num_classes * num_classes + 4 * num_classes * (self.boundary + (self.things is not None))
        image_counts, read_errors = np.zeros((len(split), width)), {}
        for sample in range(len(split)):
            try:
                image = preprocess.decode(split.raw(sample), split.name(sample))
            except DataError as error:
                read_errors[sample] = error
                continue
            prediction = predict_class_map(make_logits_function(engine), to_native_array(image), preprocess.image)
            image_counts[sample] = self.count_image(split.target(sample), prediction)
            on_images(1)
        return image_counts, read_errors

    def count_image(self, truth: Target, prediction: np.ndarray) -> np.ndarray:
        """Compute an image's row of counts (width,) from its annotation and its predicted class map (*image) int32."""
        classes, num_classes = truth.class_map(), len(self.classes)
        count_arrays = [compute_pixel_confusion(classes, prediction, num_classes)]
        if self.boundary:
            count_arrays.append(count_boundary_pixels(classes, prediction, num_classes))
        if self.things is not None:
            count_arrays.append(
                count_panoptic_matches(
                    segments_from_target(truth), segments_from_class_map(prediction, self.things), num_classes
                )
            )
        return np.concatenate([array.ravel() for array in count_arrays])

    def metrics(self, sums: np.ndarray) -> dict[str, float | None]:
        """Compute the metrics from counts (width,) that are summed over images."""
        num_classes, class_counts = len(self.classes), sums[len(self.classes) ** 2 :].reshape(-1, len(self.classes), 4)
        metrics = compute_segmentation_metrics(sums[: num_classes * num_classes].reshape(num_classes, num_classes))
        if self.boundary:
            metrics["boundary_f"] = compute_boundary_f(class_counts[0])
        return metrics | (compute_panoptic_quality(class_counts[-1], self.things) if self.things is not None else {})

    def report(self, outputs: SplitOutputs, *extra_outputs: SplitOutputs) -> Report:
        """Compute mIoU, mean Dice, pixel accuracy and metrics per class, with 95 % bootstrap intervals over images;
        also boundary F and panoptic quality if they were counted."""
        image_counts = outputs.outputs.astype(np.float64)
        matrices, metrics = (
            extract_confusion_matrices(image_counts, len(self.classes)),
            self.metrics(image_counts.sum(0)),
        )
        intervals = {}
        if len(matrices) > 1:

            def compute_draws(counts: np.ndarray) -> dict[str, np.ndarray]:
                """Compute each metric (D,) from draw counts (n, D)."""
                drawn_metrics = [self.metrics(draw) for draw in (image_counts.T @ counts).T]
                return {name: np.array([draw[name] or 0.0 for draw in drawn_metrics]) for name in metrics}

            draws = bootstrap_metrics(compute_draws, len(matrices), MIOU_BOOTSTRAP_DRAWS)
            intervals = {name: percentile_interval(draws[name]) for name in metrics}
        class_rows = compute_class_metrics(matrices, self.classes)
        true, predicted = np.nonzero(matrices.sum(0))
        confusion_cells = np.stack([true, predicted, matrices.sum(0)[true, predicted].astype(np.int64)], 1)
        unreadable = int((~outputs.readable).sum())
        return Report(
            len(outputs.outputs),
            unreadable,
            metrics=dict(metrics),
            intervals=dict(intervals),
            per_class=class_rows,
            confusion_cells=confusion_cells,
            primary="miou",
        )

    def paired_intervals(
        self, outputs: np.ndarray, other_evaluator: SegmentationEvaluator, other_outputs: np.ndarray
    ) -> dict[str, tuple[float, float] | None]:
        """Compute the 95 % intervals of the differences of mIoU, Dice and pixel accuracy, the other model minus this
        one."""
        return bootstrap_miou_differences(outputs, other_outputs, len(self.classes))


def bootstrap_miou_differences(
    counts_a: np.ndarray, counts_b: np.ndarray, num_classes: int
) -> dict[str, tuple[float, float] | None]:
    """Compute 95 % intervals of metric differences, second minus first, by a bootstrap over the same images. `counts_a`
    and `counts_b` (n, width) are the rows of both models, which begin with K * K confusion counts; K is `num_classes`.
    None for fewer than two images."""
    names = ("miou", "dice", "pixel_accuracy")
    if len(counts_a) < 2:
        return dict.fromkeys(names)
    confusions = [
        image_counts[:, : num_classes * num_classes].astype(np.float64) for image_counts in (counts_a, counts_b)
    ]

    def compute_differences(counts: np.ndarray) -> dict[str, np.ndarray]:
        """Compute each difference (D,) from draw counts (n, D)."""
        sums = [(confusion.T @ counts).T.reshape(-1, num_classes, num_classes) for confusion in confusions]
        pairs = [
            (compute_segmentation_metrics(matrix_a), compute_segmentation_metrics(matrix_b))
            for matrix_a, matrix_b in zip(*sums, strict=True)
        ]
        return {
            name: np.array([(metrics_b[name] or 0.0) - (metrics_a[name] or 0.0) for metrics_a, metrics_b in pairs])
            for name in names
        }

    draws = bootstrap_metrics(compute_differences, len(counts_a), MIOU_BOOTSTRAP_DRAWS)
    return {name: percentile_interval(draws[name]) for name in names}


def extract_confusion_matrices(image_counts: np.ndarray, num_classes: int) -> np.ndarray:
    """Extract the confusion matrices (n, K, K) from the rows of counts (n, width); K is `num_classes`."""
    return image_counts[:, : num_classes * num_classes].reshape(-1, num_classes, num_classes)


def make_logits_function(engine: ModelEngine) -> TileFunction:
    """Return a function that computes logits (B, K, *image) of tiles (B, C, *image) with an engine."""
    return lambda tiles: engine(torch.from_numpy(tiles)).numpy()


def compute_pixel_confusion(classes: np.ndarray, prediction: np.ndarray, num_classes: int) -> np.ndarray:
    """Count pixels by true class (row) and predicted class (column), (K, K) int64, in (H, W) int class maps; IGNORE
    pixels are skipped."""
    is_known = classes != IGNORE_INDEX
    codes = classes[is_known].astype(np.int64) * num_classes + prediction[is_known]
    return np.bincount(codes, minlength=num_classes * num_classes).reshape(num_classes, num_classes)


def compute_segmentation_metrics(matrix: np.ndarray) -> dict[str, float | None]:
    """Compute mIoU, mean Dice and pixel accuracy from a (K, K) confusion matrix of pixels, whose rows are true classes.

    Classes that are neither true nor predicted are excluded from means. None if no pixel was counted."""
    correct, true, predicted = np.diag(matrix), matrix.sum(1), matrix.sum(0)
    is_present = true + predicted > 0
    if not is_present.any():
        return {"miou": None, "dice": None, "pixel_accuracy": None}
    union = (true + predicted - correct)[is_present]
    dice = 2 * correct[is_present] / (true + predicted)[is_present]
    accuracy = correct.sum() / matrix.sum()
    return {
        "miou": float((correct[is_present] / union).mean()),
        "dice": float(dice.mean()),
        "pixel_accuracy": float(accuracy),
    }


def compute_class_metrics(matrices: np.ndarray, classes: tuple[str, ...]) -> list[dict[str, object]]:
    """Build the report's table of classes from confusion matrices (n, K, K): images with the class, IoU, Dice, recall,
    precision, and the most frequently confused class. `image_dice` is the mean Dice over the images with the class, as
    usual for volumes."""
    matrix = matrices.sum(0)
    correct, true, predicted = np.diag(matrix), matrix.sum(1), matrix.sum(0)
    image_dice = 2 * np.diagonal(matrices, axis1=1, axis2=2) / (matrices.sum(1) + matrices.sum(2)).clip(min=1)  # (n, K)
    has_class = matrices.sum(2) > 0
    class_rows: list[dict[str, object]] = []
    for index, name in enumerate(classes):
        confusions = matrix[index].copy()
        confusions[index] = 0
        union = true[index] + predicted[index] - correct[index]
        class_rows.append(
            {
                "class": name,
                "images": int((matrices[:, index].sum(1) > 0).sum()),
                "recall": correct[index] / true[index] if true[index] else None,
                "precision": correct[index] / predicted[index] if predicted[index] else None,
                "f1": 2 * correct[index] / (true[index] + predicted[index]) if true[index] + predicted[index] else None,
                "image_dice": image_dice[has_class[:, index], index].mean() if has_class[:, index].any() else None,
                "iou": correct[index] / union if union else None,
                "confused_with": classes[int(confusions.argmax())] if confusions.any() else None,
            }
        )
    return class_rows
