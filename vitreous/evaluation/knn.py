"""k-nearest-neighbour classification as in DINO (arXiv:2104.14294, section 4.1 and appendix F.2).

n training images, m evaluated images, d features, K classes, k neighbours.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitreous.data.labels import get_label_kind
from vitreous.data.split import Split
from vitreous.errors import DataError
from vitreous.evaluation.evaluator import Evaluator, SplitOutputs
from vitreous.tasks.classification_metrics import evaluate_classification
from vitreous.tasks.report import Report

MEMORY_CHUNK, QUERY_CHUNK = 16_384, 1_024  # images per chunk of the similarity matrix
VOTE_TEMPERATURE = 0.07
DEFAULT_NEIGHBOURS = 20  # the best value of DINO


class KNNEvaluator(Evaluator):
    """Evaluates features (n, d) by k-nearest-neighbour classification: the `k` nearest images of the labelled split
    `memory` vote. Without `memory`, the neighbours are the other evaluated images."""

    def __init__(
        self,
        classes: tuple[str, ...],
        memory: Split | None = None,
        multilabel: bool = False,
        k: int = DEFAULT_NEIGHBOURS,
        *,
        device: str = "cpu",
    ) -> None:
        self.classes, self.labelled_split, self.labels = classes, memory, get_label_kind(multilabel)
        self.k, self.device = k, device
        self.name = f"knn_{self.labels.metric_key}"

    def required_splits(self, split: Split) -> tuple[Split, ...]:
        """Return the evaluated split, and the labelled split of the neighbours if there is one."""
        return (split,) if self.labelled_split is None else (split, self.labelled_split)

    def report(self, outputs: SplitOutputs, *extra_outputs: SplitOutputs) -> Report:
        """Compute top-1 accuracy or mAP of the votes, with its 95 % interval. Unreadable images count as wrong, and are
        not neighbours. Raises DataError if no neighbours are left."""
        memory, is_leave_one_out = extra_outputs[0] if extra_outputs else outputs, not extra_outputs
        memory_features, labels = memory.outputs[memory.readable], memory.split.labels[memory.readable]
        k = min(self.k, len(memory_features) - is_leave_one_out)
        if k < 1:
            problem = "nearest neighbours need labelled images that can be read"
            raise DataError(problem, "add images, or evaluate without neighbours")
        logits = np.zeros((len(outputs.outputs), len(self.classes)))
        cosines, neighbours = find_nearest_neighbours(
            memory_features, outputs.outputs[outputs.readable], k, self.device, is_leave_one_out
        )
        logits[outputs.readable] = self.labels.shares_to_logits(
            compute_neighbour_votes(cosines, neighbours, labels, len(self.classes))
        )
        report = evaluate_classification(logits, outputs.split.labels, self.classes, outputs.readable)
        primary = self.labels.metric_key
        metrics, intervals = {self.name: report.metrics[primary]}, {self.name: report.intervals[primary]}
        return replace(report, metrics=metrics, intervals=intervals, primary=self.name)


def find_nearest_neighbours(
    memory: np.ndarray, queries: np.ndarray, k: int, device: str = "cpu", exclude_self: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Find the k nearest `memory` features (n, d), by cosine similarity, of the query features (m, d).

    Returns cosines (m, k), highest first, and memory indices (m, k) int64. `memory` is read once, a chunk at a time, so
    it may be larger than RAM. `exclude_self`: the queries are the memory, and none is its own neighbour. A zero feature
    has cosine 0 to all. Raises ValueError if there are fewer than k neighbours.
    """
    if k > len(memory) - exclude_self:
        raise ValueError(f"{k} neighbours were requested, but there are only {len(memory) - exclude_self}")
    best_cosines = np.full((len(queries), k), -np.inf, np.float32)
    best_indices = np.zeros((len(queries), k), np.int64)
    for start in range(0, len(memory), MEMORY_CHUNK):
        memory_chunk = to_unit_rows(memory[start : start + MEMORY_CHUNK], device)
        for query_start in range(0, len(queries), QUERY_CHUNK):
            query_slice = slice(query_start, query_start + QUERY_CHUNK)
            cosines = to_unit_rows(queries[query_slice], device) @ memory_chunk.T
            if exclude_self:
                is_itself = torch.arange(query_start, query_start + len(cosines), device=device)[
                    :, None
                ] == torch.arange(start, start + len(memory_chunk), device=device)
                cosines[is_itself] = -torch.inf
            topk_cosines, topk_indices = cosines.topk(min(k, len(memory_chunk)), dim=1)
            merged_cosines = np.concatenate([best_cosines[query_slice], topk_cosines.cpu().numpy()], 1)
            merged_indices = np.concatenate([best_indices[query_slice], topk_indices.cpu().numpy() + start], 1)
            order = np.argsort(-merged_cosines, axis=1, kind="stable")[:, :k]
            best_cosines[query_slice], best_indices[query_slice] = (
                np.take_along_axis(merged_cosines, order, 1),
                np.take_along_axis(merged_indices, order, 1),
            )
    return best_cosines, best_indices


def to_unit_rows(features: np.ndarray, device: str) -> Tensor:
    """Scale features (b, d) to unit length, as a tensor on a device."""
    return F.normalize(torch.from_numpy(np.array(features, dtype=np.float32)).to(device), dim=1)


def compute_neighbour_votes(
    cosines: np.ndarray,
    neighbour_indices: np.ndarray,
    labels: np.ndarray,
    num_classes: int,
    temperature: float = VOTE_TEMPERATURE,
) -> np.ndarray:
    """Compute the share of votes per class, (m, K) float64, from the k nearest neighbours of m images.

    `cosines` and `neighbour_indices` (m, k) are of the neighbours, `labels` (n,) or (n, K) of all n labelled images. A
    neighbour's vote counts exp(cosine / temperature). Shares of single-label data sum to one; those of multi-label data
    are independent per class.
    """
    # relative to the nearest neighbour: the shares do not change
    weights = np.exp((cosines - cosines[:, :1]).astype(np.float64) / temperature)
    weights /= weights.sum(1, keepdims=True)
    if labels.ndim == 1:
        flat_indices = np.arange(len(neighbour_indices))[:, None] * num_classes + labels[neighbour_indices]
        return np.bincount(flat_indices.ravel(), weights.ravel(), len(neighbour_indices) * num_classes).reshape(
            len(neighbour_indices), num_classes
        )
    shares = np.zeros((len(neighbour_indices), num_classes))
    for rank in range(neighbour_indices.shape[1]):
        shares += weights[:, rank, None] * (labels[neighbour_indices[:, rank]] > 0)
    return shares
