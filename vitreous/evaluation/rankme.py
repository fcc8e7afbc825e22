"""Label-free metrics of features: effective rank and standard deviation.

n images, d features.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from vitreous.data.split import Split
from vitreous.evaluation.evaluator import Evaluator, SplitOutputs
from vitreous.evaluation.knn import KNNEvaluator
from vitreous.tasks.report import Report

MAX_RANKME_FEATURES = 25_600  # largest number of rows for the rank, as in the paper


class FeatureEvaluator(Evaluator):
    """Evaluates features (n, d) by their effective rank and standard deviation; with labels, the metrics of `knn` come
    first."""

    def __init__(self, knn: KNNEvaluator | None = None) -> None:
        self.knn = knn
        self.name = knn.name if knn else "rankme"

    def required_splits(self, split: Split) -> tuple[Split, ...]:
        """Return the evaluated split, and the split of the neighbours if there is one."""
        return self.knn.required_splits(split) if self.knn else (split,)

    def without_labels(self) -> FeatureEvaluator:
        """Return an evaluator without nearest neighbours."""
        return FeatureEvaluator()

    def report(self, outputs: SplitOutputs, *extra_outputs: SplitOutputs) -> Report:
        """Compute the metrics of `knn`, if it is set, and the effective rank and standard deviation of the readable
        images' features. Raises DataError if `knn` has no neighbours."""
        features = outputs.outputs[outputs.readable]
        unreadable = len(outputs.outputs) - len(features)
        report = Report(
            len(outputs.outputs),
            unreadable,
            metrics={},
            intervals={},
            per_class=[],
            confusion_cells=None,
            primary="rankme",
        )
        if self.knn:
            report = self.knn.report(outputs, *extra_outputs)
        feature_metrics = (
            {"rankme": compute_rankme(features), "feature_std": compute_feature_std(features)}
            if len(features)
            else {"rankme": None}
        )
        return replace(report, metrics=report.metrics | feature_metrics)


def compute_rankme(features: np.ndarray) -> float:
    """Compute the effective rank of (n, d) features, 1 to min(n, d): the exponential of the entropy of their normalised
    singular values (RankMe, arXiv:2210.02885, Eqs. 1-2; without its epsilon).

        s = svdvals(features); p = s / s.sum(); return exp(-sum(p_k log p_k for p_k > 0))

    In float64, from at most 25,600 evenly spaced rows. Zero features have rank 1, non-finite features nan.
    """
    sampled = torch.from_numpy(np.asarray(features[:: -(-len(features) // MAX_RANKME_FEATURES)], dtype=np.float64))
    if not sampled.isfinite().all():
        return float("nan")
    values = torch.linalg.svdvals(sampled)
    if not values.sum() > 0:
        return 1.0
    shares = values / values.sum()
    return float(torch.exp(-torch.xlogy(shares, shares).sum()))


def compute_feature_std(features: np.ndarray) -> float:
    """Compute the standard deviation over images of (n, d) features scaled to unit length, mean over channels. 0 if all
    images have the same feature, at most 1 / sqrt(d)."""
    vectors = np.asarray(features, dtype=np.float64)
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return float((vectors / np.maximum(lengths, 1e-12)).std(0).mean())
