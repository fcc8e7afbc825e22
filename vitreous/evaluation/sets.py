"""Top-1 and top-5 where an image has a set of right answers: ImageNet ReaL (arXiv:2006.07159) and ObjectNet."""

from __future__ import annotations

import numpy as np

from vitreous.evaluation.classification import wilson
from vitreous.evaluation.report import Report


def judge_sets(logits: np.ndarray, right: np.ndarray, readable: np.ndarray) -> Report:
    """(n, K) logits and (n, K) bool, every right answer -> top-1 and top-5, with Wilson's 95 % intervals.

    An image is right if the highest logit is of its set, or one of the five highest. Equal logits rank by position.
    Images without a right answer are not judged; those that are not `readable` (n,) count as wrong.
    """
    judged = right.any(1)
    best = np.argsort(-logits[judged], axis=1, kind="stable")[:, :5]
    found = np.take_along_axis(right[judged], best, 1) & readable[judged, None]
    count, hits = len(found), {"top1": int(found[:, 0].sum()), "top5": int(found.any(1).sum())}
    figures: dict[str, float | None] = {name: hit / count if count else None for name, hit in hits.items()}
    none = dict.fromkeys(("macro_f1", "nll", "ece"))
    intervals: dict[str, tuple[float, float] | None] = {name: wilson(hit, count) for name, hit in hits.items()}
    return Report(count, int((~readable[judged]).sum()), figures | none, intervals | none, [], None)
