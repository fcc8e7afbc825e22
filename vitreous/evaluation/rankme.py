"""What features are worth without labels: how many directions they fill, and how far they are apart.

n images, d numbers of a feature.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from vitreous.data.split import Split
from vitreous.evaluation.evaluator import Evaluator, SplitOutputs
from vitreous.evaluation.knn import KNNEvaluator
from vitreous.tasks.report import Report

MAX_RANKME_FEATURES = 25_600  # features that the rank is taken of, as in the paper


class FeatureEvaluator(Evaluator):
    """Judges features (n, d) by `compute_rankme` and `compute_feature_std`; `knn`, where images have labels, comes
    first."""

    def __init__(self, knn: KNNEvaluator | None = None) -> None:
        self.knn = knn
        self.name = knn.name if knn else "rankme"

    def splits(self, split: Split) -> tuple[Split, ...]:
        """The judged split, and that of the neighbours."""
        return self.knn.splits(split) if self.knn else (split,)

    def without_labels(self) -> FeatureEvaluator:
        """The same without neighbours."""
        return FeatureEvaluator()

    def report(self, outputs: SplitOutputs, *others: SplitOutputs) -> Report:
        """Return the figures of `knn`, where there is one, and those of the readable images' features.

        Raises DataError as `knn` does.
        """
        rows = outputs.rows[outputs.readable]
        unreadable = len(outputs.rows) - len(rows)
        report = Report(
            len(outputs.rows), unreadable, figures={}, intervals={}, per_class=[], cells=None, figure="rankme"
        )
        if self.knn:
            report = self.knn.report(outputs, *others)
        own = (
            {"rankme": compute_rankme(rows), "feature_deviation": compute_feature_std(rows)}
            if len(rows)
            else {"rankme": None}
        )
        return replace(report, figures=report.figures | own)


def compute_rankme(features: np.ndarray) -> float:
    """(n, d) features -> how many directions they fill, 1 to min(n, d): the exponential of the entropy of their
    singular values, each divided by the sum of all (arXiv:2210.02885, Eqs. 1-2; without its epsilon).

        s = svdvals(features); p = s / s.sum(); return exp(-sum(p_k log p_k for p_k > 0))

    In float64, of at most 25,600 rows, evenly spread. Features of zeros have rank 1, and those that are not finite nan.
    """
    rows = torch.from_numpy(np.asarray(features[:: -(-len(features) // MAX_RANKME_FEATURES)], dtype=np.float64))
    if not rows.isfinite().all():
        return float("nan")
    values = torch.linalg.svdvals(rows)
    if not values.sum() > 0:
        return 1.0
    shares = values / values.sum()
    return float(torch.exp(-torch.xlogy(shares, shares).sum()))


def compute_feature_std(features: np.ndarray) -> float:
    """(n, d) features -> the deviation over the images of features of length one, mean of all channels: 0 where all
    images have the same feature, at most 1 / sqrt(d)."""
    rows = np.asarray(features, dtype=np.float64)
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return float((rows / np.maximum(lengths, 1e-12)).std(0).mean())
