"""The verb `data check`: read every image or clip of a dataset once and report problems and statistics."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from vitreous.apps.curation.checks.facts import summarise_dataset
from vitreous.apps.curation.checks.findings import FAIL_LEVEL, derive_findings
from vitreous.apps.curation.checks.record import (
    AXES_BY_CONTENT,
    SIGNAL,
    PixelFormat,
    probe_pixel_formats,
    read_image_views,
    survey_images,
)
from vitreous.apps.curation.checks.subject import CheckedDataset, find_leaking_groups, open_checked_dataset
from vitreous.apps.curation.copies.alike import group_near_copies
from vitreous.apps.curation.copies.clips import read_clip_views, summarise_clips, survey_clips
from vitreous.apps.curation.copies.scan import READABLE, scan_samples
from vitreous.data.annotations.painted import find_first_target
from vitreous.data.annotations.target import AnnotatedSplit, get_sample_noun
from vitreous.data.split import Split
from vitreous.errors import UsageError
from vitreous.system.cores import count_usable_cores

MAX_PROBED_IMAGES = 100  # images that are tried to detect the pixel format
CheckProgress = Callable[[str, int, int, str], None]
InputSizeFunction = Callable[[tuple[int, int], str], tuple[int, ...]]


def check_dataset(
    source: str | os.PathLike[str],
    split: str | None = None,
    workers: int | None = None,
    image_size: int | InputSizeFunction = 224,
    group_by: str | None = None,
    axes: int | None = None,
    ignore_index: int | None = None,
    targets: tuple[str, ...] = (),
    progress: CheckProgress = lambda label, done, total, text: None,
) -> tuple[dict[str, Any], CheckedDataset]:
    """Check every image of a dataset, or of a folder that `train` would refuse; return the document and the dataset.
    Clips are checked as images are, and counted as `images`.

    The document has counts, classes, unreadable images by name and reason, duplicates, sizes, file formats, effects of
    the loader, and `derive_findings`; `passed` is false if training is impaired. It does not depend on `workers` (None:
    one per core; 0: this process, which a crashing decoder ends). `image_size` is the model's input size in pixels, or
    a function from the first readable image's (height, width) and the target type (`objects`, `classes`, or an empty
    string) to the (height, width) of the input. `axes`, `ignore_index` and `targets` are those of `open_data`. Raises
    DataError without images, and UsageError.
    """
    if isinstance(image_size, int) and image_size < 1:
        raise UsageError("--image-size must be at least 1")
    if workers is not None and workers < 0:
        raise UsageError(f"--workers must be at least 0, not {workers}")
    subject = open_checked_dataset(
        os.fspath(source), split, group_by, axes=axes, ignore_index=ignore_index, targets=tuple(targets)
    )
    workers = count_usable_cores() if workers is None else workers
    groups = {"group_by": group_by, "across_splits": find_leaking_groups(subject, group_by)}
    pool, started = subject.pool, time.perf_counter()
    clips = get_sample_noun(pool.splits[0]) == "clips"
    form, size = (None, None) if clips else detect_pixel_format(pool.splits[0], workers)
    survey_job, view_job = (
        (survey_clips, read_clip_views)
        if clips
        else (partial(survey_images, form=form), partial(read_image_views, form=form))
    )

    def report_progress(done: int) -> None:
        throughput = done / (time.perf_counter() - started)
        progress("check", done, len(pool), f"{throughput:.1f} clips/s" if clips else f"{throughput:.0f} images/s")

    def report_comparison(done: int, total: int) -> None:
        progress("compare", done, total, "")

    records, reasons = scan_samples(
        pool, range(len(pool)), job=survey_job, workers=workers, progress=report_progress, slow=clips
    )
    if clips:
        size = find_first_size(records[: min(len(pool.splits[0]), MAX_PROBED_IMAGES)])
    if form and form[1] in AXES_BY_CONTENT:
        input_size: int | None = 0  # these are not scaled to a model's size
    elif isinstance(image_size, int):
        input_size = image_size
    else:
        input_size = min(image_size(size, detect_target_kind(subject))) if size else None
    # similar signals are not duplicates
    near_copies = (
        []
        if form and form[1] == SIGNAL
        else group_near_copies(pool, records, job=view_job, workers=workers, progress=report_comparison, slow=clips)
    )
    document = summarise_dataset(
        subject, records, reasons=reasons, near_copies=near_copies, image_size=input_size, groups=groups
    )
    document["channels"] = {"count": form[0], "dtype": form[1]} if form else None
    document["clips"] = summarise_clips(subject, records)
    results = derive_findings(document)
    passed = all(finding["level"] != FAIL_LEVEL for finding in results)
    return {"passed": passed, "findings": results, **document}, subject


def find_first_size(records: np.ndarray) -> tuple[int, int] | None:
    """Return (height, width) of the first readable sample of (n,) RECORD, or None."""
    readable = records[records["state"] == READABLE]
    return (int(readable[0]["height"]), int(readable[0]["width"])) if len(readable) else None


def detect_target_kind(subject: CheckedDataset) -> str:
    """Return the target type of the annotations for `train`: `objects`, `classes` of pixels, or an empty string
    without annotations."""
    splits = subject.splits
    if not all(isinstance(split, AnnotatedSplit) for split in splits.values()):
        return ""
    target = find_first_target(splits.values())
    return "classes" if target is not None and target.classes is not None else "objects"


def detect_pixel_format(split: Split, workers: int) -> tuple[PixelFormat, tuple[int, int] | None]:
    """Detect the pixel format of a split, and (height, width) of the first readable image, as `train` does.

    If none of MAX_PROBED_IMAGES is readable, return (the first format in a header, None).
    """
    header_format = None
    for samples in (range(min(1, len(split))), range(1, min(MAX_PROBED_IMAGES, len(split)))):
        records, _ = scan_samples(split, samples, probe_pixel_formats, min(workers, 1))
        for record in records[records["state"] == READABLE][:1]:
            return record_to_pixel_format(record), (int(record["height"]), int(record["width"]))
        header_format = header_format or next(filter(None, map(record_to_pixel_format, records)), None)
    return header_format, None


def record_to_pixel_format(record: Any) -> PixelFormat:
    """The channels and dtype of a record of `probe_pixel_formats`; None for colour images."""
    return (int(record["channels"]), str(record["numbers"])) if record["channels"] else None
