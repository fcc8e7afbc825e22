"""Two models judged on the same images: by how much they differ, and whether that can be told from chance.

In shapes, n is images, K classes, D draws of the bootstrap. A difference is the second model's figure less the first
one's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from vitreous.evaluation.calibration_error import BINS, Gaps, difference_errors, image_gaps
from vitreous.evaluation.multilabel import BUDGET, FEWEST, average_precision, bootstrap, ranking
from vitreous.evaluation.report import DRAWS
from vitreous.evaluation.temperature import log_softmax, losses

Interval = tuple[float, float] | None
LEVEL = 0.05  # of the p-value below which a difference is told
ERRORS = ("least", "most")  # names of what `difference_errors` gives, while the interval of the ECE is made from it


@dataclass(frozen=True)
class Answers:
    """What one model says of the images: logits (n, K) float64, labels (n,) or (n, K) in its order of the classes,
    readable (n,) bool."""

    logits: np.ndarray
    labels: np.ndarray
    readable: np.ndarray

    @property
    def right(self) -> np.ndarray:
        """(n,) bool: the highest logit is the label's, the first of equal ones counts, and the image could be read."""
        return self.readable & (self.logits.argmax(1) == self.labels)


@dataclass(frozen=True)
class Comparison:
    """What `compare` found. `figures` has each model's, `counts` and `p` are None where images have several labels."""

    figure: str  # the one to look at first: top1 or map
    figures: dict[str, tuple[float | None, float | None]]
    differences: dict[str, float | None]
    intervals: dict[str, Interval]
    counts: dict[str, int] | None
    p: float | None

    @property
    def told(self) -> bool:
        """Whether one of the two is better beyond chance: by McNemar's test, or where there is none, by the
        interval."""
        if self.p is not None:
            return self.p < LEVEL
        ends = self.intervals[self.figure]
        return ends is not None and (ends[0] > 0 or ends[1] < 0)

    def verdict(self, first: str, second: str) -> str:
        """One sentence for people; `first` and `second` are what the models are called."""
        name = "mAP" if self.figure == "map" else "top-1"
        difference, ends = self.differences[self.figure] or 0.0, self.intervals[self.figure]
        better, sign = (second, 1) if difference >= 0 else (first, -1)
        low, high = sorted(100 * sign * end for end in ends) if ends else (math.nan, math.nan)
        test = [f"95 % interval {low:.1f} to {high:.1f}"] if ends else []
        test += [f"McNemar p {rounded(self.p)}"] if self.p is not None else []
        found = f"{100 * abs(difference):.1f} points of {name} ({', '.join(test)})"
        if self.told:
            return f"{better} is better by {found}"
        ahead = f"{better} is ahead by {found}" if difference else f"both have the same {name} ({', '.join(test)})"
        return f"no difference can be told: {ahead}"


def compare(first: Answers, second: Answers) -> Comparison:
    """Compare two models on the same images in the same order, with what chance alone would make of them.

    Accuracies: McNemar's exact test on the images that one has right and the other wrong, and an interval of their
    difference. mAP, NLL: percentile intervals of the differences over images drawn with replacement, the same draws for
    both; ECE: from the same draws, with bounds of its bias. An image that a model could not read is wrong (or never
    retrieved); NLL and ECE are of the images that both could read. Intervals cover 95 %. Labels of both must be (n,),
    or both (n, K) in one order of the classes.
    """
    both = first.readable & second.readable
    calibration = None if first.labels.ndim == 2 or not both.any() else paired_calibration(first, second, both)
    parts, one = [soft(answers, both) for answers in (first, second)], np.ones((len(both), 1), np.float32)
    alone = [{name: float(value[0]) for name, value in part(one).items()} for part in parts]

    def differences(counts: np.ndarray) -> dict[str, np.ndarray]:
        before, after = (part(counts) for part in parts)
        errors = dict(zip(ERRORS, calibration(counts), strict=True)) if calibration else {}
        return {name: after[name] - before[name] for name in before} | errors

    figures: dict[str, tuple[float | None, float | None]] = {
        name: (alone[0][name], alone[1][name]) for name in alone[0]
    }
    none = [name for name in figures if name != "map" and not both.any()]
    found: dict[str, float | None] = {name: alone[1][name] - alone[0][name] for name in figures}
    several = first.labels.ndim == 2
    draws = max(FEWEST, min(DRAWS, int(BUDGET / max(first.logits.size, 1)))) if several else DRAWS
    intervals: dict[str, Interval] = dict.fromkeys(found)
    if both.sum() > 1:
        intervals |= bootstrap(differences, len(both), draws)
    errors = [intervals.pop(name, None) for name in ERRORS]
    if errors[0] and errors[1]:
        ece = alone[1]["ece"] - alone[0]["ece"]
        intervals["ece"] = ece - max(0.0, errors[1][1]), ece - min(0.0, errors[0][0])
    for name in none:
        figures[name], found[name], intervals[name] = (None, None), None, None
    if several:
        return Comparison("map", figures, found, intervals, None, None)
    right, also = first.right, second.right
    counts = {"both": right & also, "only_a": right & ~also, "only_b": ~right & also, "neither": ~right & ~also}
    cells = {name: int(part.sum()) for name, part in counts.items()}
    top1 = float(right.mean()), float(also.mean())
    ends = paired(cells["only_b"], cells["only_a"], len(right))
    return Comparison(
        "top1",
        {"top1": top1, **figures},
        {"top1": (cells["only_b"] - cells["only_a"]) / len(right), **found},
        {"top1": ends, **intervals},
        cells,
        mcnemar(cells["only_a"], cells["only_b"]),
    )


def soft(answers: Answers, both: np.ndarray):
    """The figures of a model that have no test of their own, as a function of how often each image is drawn, (n, D) ->
    (D,) each.

    One label an image: NLL and ECE over the images that `both` models could read; several: mAP over all, NLL over
    those.
    """
    rows = np.flatnonzero(both)
    loss = np.zeros(len(both))
    several = answers.labels.ndim == 2
    loss[rows] = losses(answers.logits[rows], answers.labels[rows])
    if several:
        scores = np.where(answers.readable[:, None], answers.logits, -np.inf)
        rankings = [ranking(scores[:, c], answers.labels[:, c] > 0) for c in range(scores.shape[1])]
        there = (answers.labels > 0).astype(np.float32)

        def of_several(counts: np.ndarray) -> dict[str, np.ndarray]:
            precisions, present = (
                np.stack([average_precision(ranked, counts) for ranked in rankings]),
                (there.T @ counts) > 0,
            )
            return {
                "map": precisions.sum(0) / np.maximum(present.sum(0), 1),
                "nll": loss @ counts / np.maximum(both @ counts, 1),
            }

        return of_several
    gaps = bin_gaps(answers, both)

    def of_one(counts: np.ndarray) -> dict[str, np.ndarray]:
        drawn = np.maximum(both @ counts, 1)
        return {"nll": loss @ counts / drawn, "ece": np.abs(gaps.T @ counts).sum(0) / drawn}

    return of_one


def bin_gaps(answers: Answers, both: np.ndarray) -> np.ndarray:
    """(n, BINS): right - confidence of each image in the column of its confidence's bin; images not in `both` (n,) have
    zeros alone."""
    gaps, rows = np.zeros((len(both), BINS)), np.flatnonzero(both)
    gaps[rows] = image_gaps(np.exp(log_softmax(answers.logits[rows]).max(1)), answers.right[rows])
    return gaps


def paired_calibration(
    first: Answers, second: Answers, both: np.ndarray
) -> Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """`difference_errors` of two models as a function of how often each image is drawn, (n, D) -> (D,) twice."""
    images = [bin_gaps(answers, both) for answers in (first, second)]
    measured = [Gaps.of_images(gaps[both]) for gaps in images]

    def errors(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        drawn = np.maximum(both @ counts, 1)
        before, after = ((gaps.T @ counts / drawn).T for gaps in images)
        return difference_errors(measured[0], measured[1], before, after)

    return errors


def mcnemar(only_a: int, only_b: int) -> float:
    """The exact two-sided p-value of so many images that one model alone has right, and the other alone (McNemar,
    1947).

    n = only_a + only_b; few = min(only_a, only_b); min(1, 2 * sum(comb(n, k) for k in range(few + 1)) / 2**n). 1 for no
    image.
    """
    n, few = only_a + only_b, min(only_a, only_b)
    k = np.arange(1, few + 1)
    logs = np.concatenate([[0.0], np.cumsum(np.log((n - k + 1) / k))]) - n * math.log(2)  # of comb(n, k) / 2^n
    return min(1.0, 2 * float(np.exp(logs).sum()))


def paired(gained: int, lost: int, images: int, z: float = 1.959963984540054) -> tuple[float, float]:
    """The 95 % interval of (gained - lost) / images, a difference of two accuracies on the same images (Bonett and
    Price, 2012)."""
    up, down = (gained + 1) / (images + 2), (lost + 1) / (images + 2)
    half = z * math.sqrt(max(0.0, up + down - (up - down) ** 2) / (images + 2))
    return max(-1.0, up - down - half), min(1.0, up - down + half)


def rounded(p: float) -> str:
    """A p-value as people write it: `= 0.012`, `< 0.0001`."""
    return "< 0.0001" if p < 1e-4 else f"= {p:.2g}" if p < 0.995 else "= 1"
