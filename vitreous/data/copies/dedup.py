"""The verb `data dedup`: the images of a data set that are in others too, or twice in itself.

Three looks, each at what the ones before left: the same bytes or the same pixels; perceptual hashes that differ in a few bits;
and near copies, which may be cut, scaled, mirrored and changed in colour. What the last two propose is verified.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch

from vitreous.cores import default_workers
from vitreous.data.copies.hashes import first_equal, near, perceptual
from vitreous.data.copies.search import candidates
from vitreous.data.copies.verification import fit, refit, same
from vitreous.data.copies.views import SIDE, Joined, Looker, Looks, Progress, closer, look
from vitreous.data.copies.windows import Windows
from vitreous.data.split import Split
from vitreous.errors import DataError, UsageError

RADIUS = 6  # bits in which two perceptual hashes may differ
CERTAIN = 0.95  # how alike two views of near hashes have to be, nothing moved
PROMISING = 0.6  # how alike small views have to be for both pictures to be read again
THRESHOLD = 0.75  # how alike larger views of copies are at least, where the one lies best over the other
SURE = 7.0  # standard deviations from chance: photographs' copies have 6.5 to 80, two handwritten digits of one kind up to 6.6
CLOSE = 64  # side of the larger views
PAIRS = 4096  # verified at a time

Reason = Literal["bytes", "pixels", "hash", "near"]


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
    looker: Looker | None = None,
    device: str = "cpu",
    progress: Progress = lambda label, done, total: None,
) -> dict[str, Any]:
    """Every sample of `data` that is a copy of one in `against`, or, `within`, of an earlier one in `data`.

    Each copy is named once, with a picture that stays: `copies` has its `path`, `copy_of`, `reason` (bytes, pixels, hash, near)
    and `score`. Pictures that cannot be read are in `unreadable`, by name and reason, and stay.
    Raises UsageError where there is nothing to compare with, DataError where no image can be read.
    """
    if not against and not within:
        raise UsageError("nothing to look for copies in", "name other data with --against, or use --within")
    if not 0 < threshold <= 1:
        raise UsageError(f"--threshold must be above 0 and at most 1, not {threshold}")
    pool, others = Joined([*against, *data]), sum(map(len, against))
    threads = default_workers() if workers is None else workers
    looks = look(pool, threads, progress, looker)
    if len(looks.bad) == len(pool):
        raise DataError(f"none of {len(pool)} images can be read" + "".join(f"; {e.message}" for e in list(looks.bad.values())[:1]))
    found = Finder(pool, looks, others, within, threads, device, progress)
    copies = found.copies(threshold)
    return {
        "images": len(pool) - others,
        "against": others,
        "within": within,
        "threshold": threshold,
        "unreadable": [error.message for _, error in sorted(looks.bad.items())],
        "counts": dict(sorted(Counter(copy.reason for copy in copies).items())),
        "copies": [
            {"path": pool.name(copy.sample), "copy_of": pool.name(copy.of), "reason": copy.reason, "score": round(copy.score, 4)}
            for copy in copies
        ],
    }


@dataclass(frozen=True)
class Finder:
    """A pool of pictures that were looked at: the first `others` are not to be judged, the rest is, in this order."""

    pool: Joined
    looks: Looks
    others: int
    within: bool
    workers: int
    device: str
    progress: Progress

    def copies(self, threshold: float) -> list[Copy]:
        """All copies, by sample."""
        found = self.equal()
        left = self.open(found)
        hashed = self.hashes(left)
        sure = self.judged(hashed)
        searched = np.array(sorted({*left.tolist()} - {copy.sample for copy in sure}), dtype=np.int64)
        proposed = candidates(self.looks, searched, self.known, self.device, lambda n: self.progress("search", n, len(searched)))
        proposed = np.unique(np.concatenate([hashed[np.isin(hashed[:, 0], searched)], proposed]), axis=0)
        return self.settled(found, [*sure, *self.verified(proposed, threshold)])

    @cached_property
    def known(self) -> np.ndarray:
        """The samples that another one may be a copy of: one of each that are equal."""
        first = first_equal(self.looks.pixels)
        may = self.looks.comparable & (first == np.arange(len(first)))
        return np.flatnonzero(may if self.within else may & (np.arange(len(first)) < self.others))

    def equal(self) -> dict[int, Copy]:
        """The copies of the same bytes or, failing that, of the same pixels."""
        found: dict[int, Copy] = {}
        reasons: list[tuple[Reason, np.ndarray]] = [("bytes", self.looks.content), ("pixels", self.looks.pixels)]
        for reason, digests in reasons:
            first = first_equal(digests)
            for sample in range(self.others, len(first)):
                of = int(first[sample])
                if sample not in found and sample not in self.looks.bad and of < (sample if self.within else self.others):
                    found[sample] = Copy(sample, of, reason, 1.0)
        return found

    def open(self, found: dict[int, Copy]) -> np.ndarray:
        """The samples that are still to be judged, and can be."""
        samples = np.flatnonzero(self.looks.comparable)
        return samples[(samples >= self.others) & ~np.isin(samples, list(found))]

    def hashes(self, samples: np.ndarray) -> np.ndarray:
        """(p, 2) pairs of near perceptual hashes, upright or mirrored: a sample, and an earlier one."""
        known, views = self.known, self.looks.views
        if not len(known) or not len(samples):
            return np.empty((0, 2), np.int64)
        words, first = np.unique(perceptual(views[known]), return_index=True)
        pairs = []
        for seen in (views[samples], views[samples][:, :, ::-1]):
            i, j = near(perceptual(seen), words, RADIUS)
            pairs.append(np.stack([samples[i], known[first[j]]], 1))
        all_pairs = np.concatenate(pairs)
        return np.unique(all_pairs[all_pairs[:, 1] < all_pairs[:, 0]], axis=0)

    def judged(self, pairs: np.ndarray) -> list[Copy]:
        """Those of the pairs whose small views leave no doubt, nothing moved."""
        found: list[Copy] = []
        for low in range(0, len(pairs), PAIRS):
            part = pairs[low : low + PAIRS]
            alike, surety = (n.cpu().numpy() for n in same(self.views(part[:, 0]), self.views(part[:, 1])))
            good = (alike >= CERTAIN) & (surety >= SURE)
            found += [Copy(int(i), int(j), "hash", float(s)) for (i, j), s in zip(part[good], alike[good], strict=True)]
        return found

    def verified(self, pairs: np.ndarray, threshold: float) -> list[Copy]:
        """Those of the pairs that are copies: alike in the small views, and then, both pictures read again, in larger ones."""
        windows, found = Windows(SIDE, self.device), list[Copy]()
        for low in range(0, len(pairs), PAIRS):
            part = pairs[low : low + PAIRS]
            score, way, boxes = fit(windows, self.views(part[:, 0]), self.views(part[:, 1]))
            good = (score >= PROMISING).cpu().numpy()
            near_by = closer(self.pool, np.unique(part[good]).tolist(), CLOSE, self.workers)
            good[good] = [int(i) in near_by and int(j) in near_by for i, j in part[good]]
            if good.any():
                a, b = (torch.from_numpy(np.stack([near_by[int(n)] for n in column])).to(self.device).float() for column in part[good].T)
                kept = torch.from_numpy(good).to(self.device)
                alike, surety = (n.cpu().numpy() for n in refit(a, b, way[kept], boxes[kept]))
                sure = (alike >= threshold) & (surety >= SURE)
                found += [Copy(int(i), int(j), "near", float(s)) for (i, j), s in zip(part[good][sure], alike[sure], strict=True)]
            self.progress("verify", min(low + PAIRS, len(pairs)), len(pairs))
        return found

    def views(self, samples: np.ndarray) -> torch.Tensor:
        """The small views of some samples, (n, SIDE, SIDE) float32."""
        return torch.from_numpy(self.looks.views[samples]).to(self.device).float()

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
                listed[sample] = max(staying, key=lambda copy: (copy.reason == "hash", copy.score, -copy.of))
        return [listed[sample] for sample in sorted(listed)]
