"""Find outliers and suspected label errors by comparison with the training images."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vitreous.data.class_order import align_labels
from vitreous.data.run_data import as_test_split, open_run_data
from vitreous.data.sources import open_images
from vitreous.data.split import FileSplit, Split
from vitreous.errors import UsageError
from vitreous.evaluation.familiarity import (
    MIN_SUSPECT_CONFIDENCE,
    NUM_NEIGHBOURS,
    compute_neighbour_shares,
    compute_outlier_separation,
    find_suspect_labels,
    fit_mahalanobis_detector,
)
from vitreous.reports.answers import EvaluationSettings, SplitPredictions, compute_split_features
from vitreous.reports.training_overlap import drop_excluded_images, identify_images
from vitreous.system.tables import write_csv_file
from vitreous.training.folder import RunFolder

MAX_DOCUMENT_IMAGES = 10  # images in each list of the JSON document


@dataclass(frozen=True)
class TrainingFeatures:
    """Features (m, d) of the images of a training split, which is in the dataset `source`.

    `readable_indices` (n,) are the indices of the readable images.
    """

    source: str
    split: Split
    features: np.ndarray
    readable_indices: np.ndarray

    @property
    def labels(self) -> np.ndarray:
        """Return the labels of the readable images, (n,) or (n, K), in the model's class order."""
        return self.split.labels[self.readable_indices]

    @property
    def readable_features(self) -> np.ndarray:
        """Return the features of the readable images, (n, d); memory-mapped if all are readable."""
        return (
            self.features if len(self.readable_indices) == len(self.features) else self.features[self.readable_indices]
        )


def load_training_features(
    predictions: SplitPredictions, evaluation_settings: EvaluationSettings, allow_self_comparison: bool = False
) -> TrainingFeatures:
    """Compute the features of the run's training images, or those of the evaluated dataset if there is no run.

    With `allow_self_comparison`, data without a training split are compared with themselves. Raises UsageError if there
    are no training images to compare with.
    """
    source, dataset = predictions.source, predictions.data
    if RunFolder(Path(predictions.run)).config.is_file():
        source, dataset = open_run_data(predictions.run, None, "train")
        dataset = replace(
            dataset, splits={"train": drop_excluded_images(dataset.split("train"), RunFolder(Path(predictions.run)))}
        )
    elif "train" not in dataset.splits and not allow_self_comparison:
        raise UsageError(f"{source} has no training images to compare with", "use a run, or data with a train split")
    split = dataset.splits.get("train")
    bundle, compared_split = predictions.bundle, predictions.split
    if split is not None:
        compared_split = align_labels(split, dataset, bundle.classes, bundle.classification.multilabel)
    features = compute_split_features(bundle, compared_split, "training images", evaluation_settings)
    return TrainingFeatures(source, compared_split, features.features, np.flatnonzero(features.is_readable))


def score_outliers(
    predictions: SplitPredictions, evaluation_settings: EvaluationSettings, file: str | None, against: str | None
) -> dict[str, Any]:
    """Score how unusual the evaluated images are compared with the training images.

    `score`: relative Mahalanobis distance in squared standard deviations of the features, higher is less familiar.
    `file`, if set, gets one line per image, most unusual first: path, score, and the share of training images with a
    lower score. `against`, if set, is another dataset: the AUROC, and the false-positive rate at 95 % true positives,
    of separating its images from the evaluated ones by the score.
    """
    training = load_training_features(predictions, evaluation_settings)
    detector = fit_mahalanobis_detector(training.readable_features, training.labels, len(predictions.bundle.classes))
    features = compute_split_features(predictions.bundle, predictions.split, "evaluated images", evaluation_settings)
    training_scores, readable = (
        np.sort(detector.scores(training.readable_features)),
        np.flatnonzero(features.is_readable),
    )
    scores = detector.scores(features.features[readable])
    shares = np.searchsorted(training_scores, scores) / len(training_scores)
    order = np.argsort(-scores, kind="stable")
    table = [(predictions.split.name(int(readable[i])), float(scores[i]), float(shares[i])) for i in order]
    if file:
        cells = [[name, f"{score:.4f}", f"{share:.4f}"] for name, score, share in table]
        write_csv_file(file, ["path", "score", "training_quantile"], cells)
    return {
        "method": "Mahalanobis" if detector.class_stats is None else "relative Mahalanobis",
        "unit": "squared standard deviations of the features; higher is less familiar",
        "fitted_on": {"data": training.source, "split": "train", "images": len(training.readable_indices)},
        "images": len(readable),
        "median": float(np.median(scores)),
        "training_median": float(np.median(training_scores)),
        "above_training_p99": float((scores > np.percentile(training_scores, 99)).mean()),
        "top": [
            {"path": name, "score": score, "training_quantile": share}
            for name, score, share in table[:MAX_DOCUMENT_IMAGES]
        ],
        "against": None
        if against is None
        else measure_separation(predictions, evaluation_settings, scores, detector, against),
    }


def measure_separation(
    predictions: SplitPredictions,
    evaluation_settings: EvaluationSettings,
    scores: np.ndarray,
    detector: Any,
    against: str,
) -> dict[str, Any]:
    """Return how well the outlier score separates the evaluated images from the images of another dataset.

    `scores` (n,) are those of the evaluated images, `detector` computes the others, `against` is the dataset.
    """
    split = open_reference_images(against)
    features = compute_split_features(predictions.bundle, split, f"images of {against}", evaluation_settings)
    other_features = features.features[features.is_readable]
    return {"data": against, "images": len(other_features)} | compute_outlier_separation(
        scores, detector.scores(other_features)
    )


def open_reference_images(source: str) -> Split:
    """Open the images of a dataset: its test split, or all images if it has none or is a folder of images."""
    dataset = open_images(source)
    if isinstance(dataset, FileSplit):
        return dataset
    return (
        dataset.split("test")
        if "test" in dataset.splits and not dataset.unsplit
        else as_test_split(dataset).split("test")
    )


def find_label_errors(
    predictions: SplitPredictions, evaluation_settings: EvaluationSettings, file: str
) -> dict[str, Any]:
    """List probable label errors: images for which model and nearest training images agree confidently on another
    class.

    `file` gets one line per image, most probable error first: path, label, the model's class and probability, the
    neighbours' class and share, score. A training image is not its own neighbour. For labels of training images, use a
    run that was not trained on them. Raises UsageError for multi-label data.
    """
    if predictions.split.labels.ndim == 2:
        raise UsageError("--suspects needs single-label data", "leave it out")
    training, classes = (
        load_training_features(predictions, evaluation_settings, allow_self_comparison=True),
        predictions.bundle.classes,
    )
    features = training.features
    if training.split is not predictions.split:
        features = compute_split_features(
            predictions.bundle, predictions.split, "evaluated images", evaluation_settings
        ).features
    readable = np.flatnonzero(predictions.readable)
    sample_by_identity = {
        identity: index for index, identity in enumerate(identify_images(training.split, training.source))
    }
    feature_rows = {int(row): index for index, row in enumerate(training.readable_indices)}
    identities = identify_images(predictions.split, predictions.source)
    training_indices = np.array(
        [feature_rows.get(sample_by_identity.get(identities[row], -1), -1) for row in readable], dtype=np.int64
    )
    shares = compute_neighbour_shares(
        features[readable], training.readable_features, training.labels, len(classes), training_indices
    )
    suspects = find_suspect_labels(
        predictions.bundle.task.activate(predictions.raw_logits[readable]), shares, predictions.split.labels[readable]
    )
    table = [
        {
            "path": predictions.split.name(int(readable[suspect.sample])),
            "label": classes[suspect.label],
            "predicted_class": classes[suspect.predicted_label],
            "probability": suspect.probability,
            "knn_class": classes[suspect.neighbour],
            "knn_share": suspect.share,
            "score": suspect.score,
        }
        for suspect in suspects
    ]
    header = ["path", "label", "predicted_class", "probability", "knn_class", "knn_share", "score"]
    cells = [[f"{cell:.4f}" if isinstance(cell, float) else cell for cell in row.values()] for row in table]
    write_csv_file(file, header, cells)
    return {
        "file": file,
        "images": len(readable),
        "count": len(table),
        "neighbours": NUM_NEIGHBOURS,
        "min_confidence": MIN_SUSPECT_CONFIDENCE,
        "compared_with": {"data": training.source, "images": len(training.readable_indices)},
        "top": table[:MAX_DOCUMENT_IMAGES],
    }
