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
from vitreous.reports.training_overlap import drop_excluded, identify_images
from vitreous.system.tables import write_csv_file
from vitreous.training.folder import RunFolder

MAX_DOCUMENT_IMAGES = 10  # images per list in a document


@dataclass(frozen=True)
class TrainingFeatures:
    """Training images with computed features: their source, split, (m, d) features, and `rows` of the readable ones."""

    source: str
    split: Split
    features: np.ndarray
    rows: np.ndarray

    @property
    def labels(self) -> np.ndarray:
        """Return (m,) or (m, K) labels of the readable samples, in the model's class order."""
        return self.split.labels[self.rows]

    @property
    def readable_features(self) -> np.ndarray:
        """Return (n, d) features of the readable samples; memory-mapped if all are readable."""
        return self.features if len(self.rows) == len(self.features) else self.features[self.rows]


def load_training_features(
    answers: SplitPredictions, computing: EvaluationSettings, alone: bool = False
) -> TrainingFeatures:
    """Return the training images of the run, or of the evaluated data if there is no run.

    With `alone`, data without a training split are compared with themselves. Raises UsageError if there are no images
    to compare with.
    """
    source, opened = answers.source, answers.opened
    if RunFolder(Path(answers.run)).config.is_file():
        source, opened = open_run_data(answers.run, None, "train")
        opened = replace(opened, splits={"train": drop_excluded(opened.split("train"), RunFolder(Path(answers.run)))})
    elif "train" not in opened.splits and not alone:
        raise UsageError(f"{source} has no training images to compare with", "use a run, or data with a train split")
    split = opened.splits.get("train")
    bundle, chosen = answers.bundle, answers.split
    if split is not None:
        chosen = align_labels(split, opened, bundle.classes, bundle.classification.multilabel)
    features = compute_split_features(bundle, chosen, "training images", computing)
    return TrainingFeatures(source, chosen, features.rows, np.flatnonzero(features.good))


def score_outliers(
    answers: SplitPredictions, computing: EvaluationSettings, file: str | None, against: str | None
) -> dict[str, Any]:
    """Score how unusual the evaluated images are compared with the training images.

    `score`: relative Mahalanobis distance in squared standard deviations of the features, higher is less familiar.
    `file` lists path, score, and the share of training images with a lower score. `against`: other data; reports how
    well the score separates them from the evaluated images, as AUROC and false-positive rate at 95 % true positives.
    """
    known = load_training_features(answers, computing)
    kinds = fit_mahalanobis_detector(known.readable_features, known.labels, len(answers.bundle.classes))
    features = compute_split_features(answers.bundle, answers.split, "the evaluated images", computing)
    usual, rows = np.sort(kinds.scores(known.readable_features)), np.flatnonzero(features.good)
    scores = kinds.scores(features.rows[rows])
    shares = np.searchsorted(usual, scores) / len(usual)
    order = np.argsort(-scores, kind="stable")
    table = [(answers.split.name(int(rows[i])), float(scores[i]), float(shares[i])) for i in order]
    if file:
        cells = [[name, f"{score:.4f}", f"{share:.4f}"] for name, score, share in table]
        write_csv_file(file, ["path", "score", "training_quantile"], cells)
    return {
        "method": "Mahalanobis" if kinds.classes is None else "relative Mahalanobis",
        "unit": "squared standard deviations of the features; higher is less familiar",
        "fitted_on": {"data": known.source, "split": "train", "images": len(known.rows)},
        "images": len(rows),
        "median": float(np.median(scores)),
        "training_median": float(np.median(usual)),
        "above_training_p99": float((scores > np.percentile(usual, 99)).mean()),
        "top": [
            {"path": name, "score": score, "training_quantile": share}
            for name, score, share in table[:MAX_DOCUMENT_IMAGES]
        ],
        "against": None if against is None else measure_separation(answers, computing, scores, kinds, against),
    }


def measure_separation(
    answers: SplitPredictions, computing: EvaluationSettings, usual: np.ndarray, kinds: Any, against: str
) -> dict[str, Any]:
    """Return how well scores separate the evaluated images, `usual` (n,), from all images of other data."""
    split = open_reference_images(against)
    features = compute_split_features(answers.bundle, split, "the other data", computing)
    known = features.rows[features.good]
    return {"data": against, "images": len(known)} | compute_outlier_separation(usual, kinds.scores(known))


def open_reference_images(source: str) -> Split:
    """Return the test split of other data, all images if there is none, or every image below a folder."""
    opened = open_images(source)
    if isinstance(opened, FileSplit):
        return opened
    return (
        opened.split("test") if "test" in opened.splits and not opened.unsplit else as_test_split(opened).split("test")
    )


def find_label_errors(answers: SplitPredictions, computing: EvaluationSettings, file: str) -> dict[str, Any]:
    """List probable label errors: images for which model and nearest training images agree confidently on another
    class.

    `file` gets one line each, most probable first: path, label, the model's class and probability, the neighbours'
    class and share, score. A training image is excluded from its own neighbours. For labels of training images, use a
    run that was not trained on them. Raises UsageError for multi-label data.
    """
    if answers.split.labels.ndim == 2:
        raise UsageError("--suspects needs single-label data", "leave it out")
    known, classes = load_training_features(answers, computing, alone=True), answers.bundle.classes
    features = known.features
    if known.split is not answers.split:
        features = compute_split_features(answers.bundle, answers.split, "the evaluated images", computing).rows
    rows = np.flatnonzero(answers.readable)
    place = {identity: index for index, identity in enumerate(identify_images(known.split, known.source))}
    at = {int(row): index for index, row in enumerate(known.rows)}
    names = identify_images(answers.split, answers.source)
    own = np.array([at.get(place.get(names[row], -1), -1) for row in rows], dtype=np.int64)
    shares = compute_neighbour_shares(features[rows], known.readable_features, known.labels, len(classes), own)
    listed = find_suspect_labels(answers.bundle.task.activate(answers.raw[rows]), shares, answers.split.labels[rows])
    table = [
        {
            "path": answers.split.name(int(rows[one.sample])),
            "label": classes[one.label],
            "predicted_class": classes[one.answer],
            "probability": one.probability,
            "knn_class": classes[one.neighbour],
            "knn_share": one.share,
            "score": one.score,
        }
        for one in listed
    ]
    head = ["path", "label", "predicted_class", "probability", "knn_class", "knn_share", "score"]
    cells = [[f"{cell:.4f}" if isinstance(cell, float) else cell for cell in row.values()] for row in table]
    write_csv_file(file, head, cells)
    return {
        "file": file,
        "images": len(rows),
        "count": len(table),
        "neighbours": NUM_NEIGHBOURS,
        "min_confidence": MIN_SUSPECT_CONFIDENCE,
        "compared_with": {"data": known.source, "images": len(known.rows)},
        "top": table[:MAX_DOCUMENT_IMAGES],
    }
