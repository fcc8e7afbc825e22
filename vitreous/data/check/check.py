"""The verb `data check`: every image of a data set looked at once, and what is true of all of them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from vitreous.cores import cores
from vitreous.data.check.alike import Groups, linked, proposed, verified
from vitreous.data.check.facts import facts
from vitreous.data.check.findings import FAILS, findings
from vitreous.data.check.record import LARGER, READABLE, Form, probe, review, survey
from vitreous.data.check.scan import Job, ScanResult, scan
from vitreous.data.check.subject import Subject, open_subject, parted
from vitreous.data.split import Split
from vitreous.errors import UsageError

PROBED = 100  # pictures of which one must be readable to tell how all are read
Progress = Callable[[str, int, int, str], None]
InputSize = Callable[[tuple[int, int]], tuple[int, ...]]


def check(
    source: str | os.PathLike[str],
    split: str | None = None,
    workers: int | None = None,
    image_size: int | InputSize = 224,
    group_by: str | None = None,
    progress: Progress = lambda label, done, total, text: None,
) -> dict[str, Any]:
    """Look at every image of a data set, as `train` takes it, or of a folder that it would refuse, and say what is true
    of them.

    The document has counts, classes, unreadable images by name and reason, copies, sizes, kinds of files, what the
    loader does with them, and `findings`; `passed` is whether nothing hinders training. It is the same for any number
    of `workers` (None: one a core; 0: this process, which a decoder that crashes takes along). `image_size` is the side
    of the model's input in pixels, or a function from the first readable image's (height, width) to the (height, width)
    of the input. Raises DataError where there is nothing to look at, UsageError.
    """
    return run_check(os.fspath(source), split, workers, image_size, group_by, progress)[0]


def run_check(
    source: str,
    split: str | None,
    workers: int | None,
    image_size: int | InputSize,
    group_by: str | None,
    progress: Progress,
) -> tuple[dict[str, Any], Subject]:
    """The same, and the images, of which a page shows some."""
    if isinstance(image_size, int) and image_size < 1:
        raise UsageError("--image-size must be at least 1")
    if workers is not None and workers < 0:
        raise UsageError(f"--workers cannot be {workers}")
    subject, workers = open_subject(source, split), cores() if workers is None else workers
    groups = {"by": group_by, "parted": parted(subject, group_by)}
    seen: dict[str, ScanResult] = {}
    form, size = first_form(next(iter(subject.splits.values())), workers)
    side = image_size if isinstance(image_size, int) else min(image_size(size)) if size else None
    total, before, started = sum(subject.lengths), 0, time.perf_counter()
    for name, part in subject.splits.items():

        def report(done: int, before: int = before) -> None:
            rate = (before + done) / (time.perf_counter() - started)
            progress("check", before + done, total, f"{rate:.0f} images/s")

        seen[name] = scan(part, workers, report, partial(survey, form=form))
        before += len(part)
    document = facts(
        subject, seen, near_copies(subject, seen, partial(review, form=form), workers, progress), side, groups
    )
    document["channels"] = {"count": form[0], "numbers": form[1]} if form else None
    results = findings(document)
    return {"passed": all(finding["level"] != FAILS for finding in results), "findings": results, **document}, subject


def first_form(split: Split, workers: int) -> tuple[Form, tuple[int, int] | None]:
    """How the images of a split are read, and the (height, width) of the first: the first readable one of a hundred
    stands for all, as it does for `train`. (None, None) where none of them can be read."""
    for low, high in ((0, 1), (1, PROBED)):
        few = split.take(np.arange(low, min(high, len(split))))
        records = scan(few, min(workers, 1), job=probe).records
        for record in records[records["state"] == READABLE][:1]:
            form = (int(record["channels"]), str(record["numbers"])) if record["channels"] else None
            return form, (int(record["height"]), int(record["width"]))
    return None, None


def near_copies(subject: Subject, seen: dict[str, ScanResult], job: Job, workers: int, progress: Progress) -> Groups:
    """Groups of images that look alike: those that the records say may be copies are read again, and compared."""
    pairs = proposed(np.concatenate([part.records for part in seen.values()]))
    rows, places = np.unique(np.concatenate([pairs["sample"], pairs["of"]]), return_inverse=True)
    pairs["sample"], pairs["of"] = places[: len(pairs)], places[len(pairs) :]
    views, done = np.zeros((len(rows), LARGER, LARGER), np.uint8), 0
    for name, split in subject.splits.items():
        low, high = subject.rows(name)
        first, last = np.searchsorted(rows, (low, high))
        again = split.take(rows[first:last] - low)
        views[first:last] = scan(
            again, workers, lambda n, d=done: progress("compare", d + n, len(rows), ""), job
        ).records["view"]
        done += len(again)
    return linked(rows[verified(pairs, views)])
