"""The verb `data dedup`: the images of a data set that are in others too, or twice in itself.

Two looks, the second at what the first left: the same bytes or the same pixels; and near copies, which may be cut,
scaled, shifted, mirrored, framed and changed in colour. Those are searched for among all, and each is verified.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from vitreous.cores import default_workers
from vitreous.data.copies.search import candidates, first_equal, like_features
from vitreous.data.copies.verification import PROMISING, THRESHOLD, fit, laid, likeness
from vitreous.data.copies.views import Fingerprints, ImageEmbedder, Joined, Progress, closer, look
from vitreous.data.copies.windows import describe, describe_whole
from vitreous.data.split import Split
from vitreous.errors import DataError, UsageError

CLOSE = 64  # side of the larger views
PAIRS = 4096  # compared at a time
READ = 32_768  # of which larger views are held

Reason = Literal["bytes", "pixels", "near"]


@dataclass(frozen=True)
class Copy:
    """A sample of the data, the sample it is a copy of, how that was found, and how alike they are: up to 1."""

    sample: int
    of: int
    reason: Reason
    score: float


def dedup(
    data: Sequence[Split],
    against: Sequence[Split],
    within: bool = False,
    threshold: float = THRESHOLD,
    workers: int | None = None,
    embedder: ImageEmbedder | None = None,
    progress: Progress = lambda label, done, total: None,
) -> dict[str, Any]:
    """Every sample of `data` that is a copy of one in `against`, or, `within`, of an earlier one in `data`.

    Each copy is named once, with a picture that stays: `copies` has its `path`, `copy_of`, `reason` (bytes, pixels,
    near) and `score`. Pictures that cannot be read are in `unreadable`, by name and reason, and stay.
    Raises UsageError where there is nothing to compare with, DataError where no image can be read.
    """
    if not against and not within:
        raise UsageError("nothing to look for copies in", "name other data with --against, or use --within")
    if not 0 < threshold <= 1:
        raise UsageError(f"--threshold must be above 0 and at most 1, not {threshold}")
    pool, others = Joined([*against, *data]), sum(map(len, against))
    threads = default_workers() if workers is None else workers
    looks = look(pool, threads, progress, embedder)
    if len(looks.bad) == len(pool):
        raise DataError(
            f"none of {len(pool)} images can be read" + "".join(f"; {e.message}" for e in list(looks.bad.values())[:1])
        )
    finder = Finder(pool, looks, others, within, threads, progress)
    copies = finder.copies(threshold)
    return {
        "images": len(pool) - others,
        "against": others,
        "within": within,
        "threshold": threshold,
        "unreadable": [error.message for _, error in sorted(looks.bad.items())],
        "counts": dict(sorted(Counter(copy.reason for copy in copies).items())),
        "copies": [
            {
                "path": pool.name(copy.sample),
                "copy_of": pool.name(copy.of),
                "reason": copy.reason,
                "score": round(copy.score, 4),
            }
            for copy in copies
        ],
    }


@dataclass(frozen=True)
class Finder:
    """A pool of pictures that were looked at: the first `others` are not to be judged, the rest is, in this order."""

    pool: Joined
    looks: Fingerprints
    others: int
    within: bool
    workers: int
    progress: Progress

    def copies(self, threshold: float) -> list[Copy]:
        """All copies, by sample."""
        copies = self.equal()
        return self.settled(copies, self.verified(self.candidates(self.open(copies)), threshold))

    @cached_property
    def known(self) -> np.ndarray:
        """The samples that another one may be a copy of: one of each that are equal."""
        first = first_equal(self.looks.pixels)
        may = self.looks.comparable & (first == np.arange(len(first)))
        return np.flatnonzero(may if self.within else may & (np.arange(len(first)) < self.others))

    def equal(self) -> dict[int, Copy]:
        """The copies of the same bytes or, failing that, of the same pixels."""
        copies: dict[int, Copy] = {}
        reasons: list[tuple[Reason, np.ndarray]] = [("bytes", self.looks.content), ("pixels", self.looks.pixels)]
        for reason, digests in reasons:
            first = first_equal(digests)
            for sample in range(self.others, len(first)):
                of = int(first[sample])
                if (
                    sample not in copies
                    and sample not in self.looks.bad
                    and of < (sample if self.within else self.others)
                ):
                    copies[sample] = Copy(sample, of, reason, 1.0)
        return copies

    def open(self, copies: dict[int, Copy]) -> np.ndarray:
        """The samples that are still to be judged, and can be."""
        samples = np.flatnonzero(self.looks.comparable)
        return samples[(samples >= self.others) & ~np.isin(samples, list(copies))]

    def candidates(self, samples: np.ndarray) -> np.ndarray:
        """(p,) CANDIDATE: what the samples may be copies of, by their views, and by a model's features."""
        views = self.looks.views
        wholes = np.concatenate([describe_whole(views[low : low + 4096]) for low in range(0, len(views), 4096)])
        pairs = candidates(
            wholes,
            lambda numbers: describe(views[numbers]),
            samples,
            self.known,
            progress=lambda *done: self.progress("search", *done),
        )
        if self.looks.features is not None:
            pairs = np.concatenate([pairs, like_features(self.looks.features, samples, self.known)])
        return pairs

    def verified(self, pairs: np.ndarray, threshold: float) -> list[Copy]:
        """Those of (p,) CANDIDATE that are copies: alike in the small views, and then, both pictures read again, in
        larger ones."""
        alike, boxes = np.empty(len(pairs), np.float32), np.empty((len(pairs), 4), np.float32)
        for low in range(0, len(pairs), PAIRS):
            part = slice(low, low + PAIRS)
            alike[part], boxes[part] = fit(*laid(self.looks.views, pairs[part]), pairs["box"][part])
            self.progress("compare", min(low + PAIRS, len(pairs)), len(pairs))
        promising = alike >= PROMISING
        pairs, boxes, copies = pairs[promising], boxes[promising], list[Copy]()
        for low in range(0, len(pairs), READ):
            copies += self.judged(pairs[low : low + READ], boxes[low : low + READ], threshold)
            self.progress("verify", min(low + READ, len(pairs)), len(pairs))
        return copies

    def judged(self, pairs: np.ndarray, boxes: np.ndarray, threshold: float) -> list[Copy]:
        """The copies among candidates, from larger views of them; pictures that cannot be read any more are left
        out."""
        larger = closer(self.pool, np.union1d(pairs["sample"], pairs["of"]).tolist(), CLOSE, self.workers)
        readable = np.isin(pairs["sample"], list(larger)) & np.isin(pairs["of"], list(larger))
        pairs, boxes = pairs[readable], boxes[readable]
        if not len(pairs):
            return []
        numbers = np.array(sorted(larger))
        views, row = np.stack([larger[int(n)] for n in numbers]), pairs.copy()
        row["sample"], row["of"] = np.searchsorted(numbers, pairs["sample"]), np.searchsorted(numbers, pairs["of"])
        score = np.concatenate(
            [
                likeness(*laid(views, row[low : low + PAIRS]), boxes[low : low + PAIRS])
                for low in range(0, len(row), PAIRS)
            ]
        )
        return [
            Copy(int(one["sample"]), int(one["of"]), "near", float(much))
            for one, much in zip(pairs, score, strict=True)
            if much >= threshold
        ]

    def settled(self, equal: dict[int, Copy], alike: list[Copy]) -> list[Copy]:
        """One copy a sample, of a picture that is no copy itself; a picture that is only like copies is none."""
        listed: dict[int, Copy] = {}
        order: dict[int, list[Copy]] = {}
        for copy in alike:
            order.setdefault(copy.sample, []).append(copy)
        for sample in sorted({*equal, *order}):
            if sample in equal:
                root = listed.get(equal[sample].of)
                listed[sample] = Copy(sample, root.of, root.reason, root.score) if root else equal[sample]
                continue
            staying = [copy for copy in order[sample] if copy.of not in listed]
            if staying:
                listed[sample] = max(staying, key=lambda copy: (copy.score, -copy.of))
        return [listed[sample] for sample in sorted(listed)]
