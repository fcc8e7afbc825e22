"""Copies among clips, for `data dedup`: the same bytes, or clips whose frames look alike and that move alike.

They are surveyed and compared as `data check` does it: FRAMES evenly spread frames of each, whole frames with whole
ones. A clip that was cut out of another one, or shifted in time, is not found.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vitreous.apps.curation.copies.alike import alike_pairs, comparable_rows, shown_rows, verified
from vitreous.apps.curation.copies.clips import review_clips, survey_clips
from vitreous.apps.curation.copies.listing import Copy, settled
from vitreous.apps.curation.copies.scan import READABLE, Joined, Reasons, scan
from vitreous.apps.curation.copies.search import first_equal
from vitreous.apps.curation.copies.verification import renumbered


def clip_copies(
    pool: Joined, others: int, within: bool, threshold: float, workers: int, progress: Callable[[str, int, int], None]
) -> tuple[list[Copy], Reasons]:
    """The clips from `others` on that are copies of one before, or, `within`, of any earlier one; and why some cannot
    be read."""
    records, reasons = scan(
        pool,
        range(len(pool)),
        job=survey_clips,
        workers=workers,
        progress=lambda done: progress("look at clips", done, len(pool)),
        slow=True,
    )
    samples, first = np.arange(len(pool)), first_equal(records["digest"])
    same = (samples >= others) & (records["state"] == READABLE) & (first < (samples if within else others))
    equal = {int(s): Copy(int(s), int(first[s]), "bytes", 1.0) for s in np.flatnonzero(same)}
    asked, known = shown_rows(records), comparable_rows(records)
    asked, known = asked[(asked >= others) & ~same[asked]], known if within else known[known < others]
    read, pairs = renumbered(alike_pairs(records, asked, known))
    again, _ = scan(
        pool,
        read.tolist(),
        job=review_clips,
        workers=workers,
        progress=lambda done: progress("compare", done, len(read)),
        slow=True,
    )
    pairs, scores = verified(pairs, again["view"], threshold)
    alike = [
        Copy(int(read[pair["sample"]]), int(read[pair["of"]]), "near", float(score))
        for pair, score in zip(pairs, scores, strict=True)
    ]
    return settled(equal, alike), reasons
