"""The verb `data check`: read every image or clip of a dataset once, and report problems and statistics.

Records of images and clips are numpy arrays of dtype `RECORD` (`checks.record`) or `CLIP_RECORD` (`copies.clips`).
"""

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

MAX_PROBED_IMAGES = 100  # maximum images that are read to detect the pixel format
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
    """Check every image of a dataset, or of a folder that `train` would refuse. Return the JSON document and the
    dataset. Clips are checked like images, and counted as `images`.

    The document contains counts, classes, unreadable images by name and reason, duplicates, sizes, file formats,
    effects of the loader, and the findings of `derive_findings`. `passed` is false if a finding has the level error.
    The document does not depend on `workers`: None is one process per core, 0 is this process, which would then crash
    with its decoder.

    `image_size` is the model's input size in pixels, or a function of the first readable image: from its (height,
    width) and the target type (`objects`, `classes`, or an empty string) to the input size. `axes`, `ignore_index` and
    `targets` are those of `open_data`. Raises DataError if there are no images, UsageError for options out of range.
    """
    if isinstance(image_size, int) and image_size < 1:
        raise UsageError(f"--image-size must be at least 1, not {image_size}")
    if workers is not None and workers < 0:
        raise UsageError(f"--workers must be at least 0, not {workers}")
    subject = open_checked_dataset(
        os.fspath(source), split, group_by, axes=axes, ignore_index=ignore_index, targets=tuple(targets)
    )
    workers = count_usable_cores() if workers is None else workers
    groups = {"group_by": group_by, "across_splits": find_leaking_groups(subject, group_by)}
    pool, started = subject.pool, time.perf_counter()
    has_clips = get_sample_noun(pool.splits[0]) == "clips"
    pixel_format, size = (None, None) if has_clips else detect_pixel_format(pool.splits[0], workers)
    survey_job, view_job = (
        (survey_clips, read_clip_views)
        if has_clips
        else (partial(survey_images, form=pixel_format), partial(read_image_views, form=pixel_format))
    )

    def report_progress(done: int) -> None:
        """Report the samples that are read so far, with the throughput."""
        throughput = done / (time.perf_counter() - started)
        progress("check", done, len(pool), f"{throughput:.1f} clips/s" if has_clips else f"{throughput:.0f} images/s")

    def report_comparison(done: int, total: int) -> None:
        """Report the candidate duplicates that are compared so far."""
        progress("compare", done, total, "")

    records, reasons = scan_samples(
        pool, range(len(pool)), job=survey_job, workers=workers, progress=report_progress, slow=has_clips
    )
    if has_clips:
        size = find_first_size(records[: min(len(pool.splits[0]), MAX_PROBED_IMAGES)])
    if pixel_format and pixel_format[1] in AXES_BY_CONTENT:
        input_size: int | None = 0  # volumes and signals are not scaled to the size of a model
    elif isinstance(image_size, int):
        input_size = image_size
    else:
        input_size = min(image_size(size, detect_target_kind(subject))) if size else None
    # signals that look similar are not duplicates
    near_copies = (
        []
        if pixel_format and pixel_format[1] == SIGNAL
        else group_near_copies(pool, records, job=view_job, workers=workers, progress=report_comparison, slow=has_clips)
    )
    document = summarise_dataset(
        subject, records, reasons=reasons, near_copies=near_copies, image_size=input_size, groups=groups
    )
    document["channels"] = {"count": pixel_format[0], "dtype": pixel_format[1]} if pixel_format else None
    document["clips"] = summarise_clips(subject, records)
    findings = derive_findings(document)
    passed = all(finding["level"] != FAIL_LEVEL for finding in findings)
    return {"passed": passed, "findings": findings, **document}, subject


def find_first_size(records: np.ndarray) -> tuple[int, int] | None:
    """Return (height, width) of the first readable sample of (n,) records of dtype `RECORD`; None if there is none."""
    readable = records[records["state"] == READABLE]
    return (int(readable[0]["height"]), int(readable[0]["width"])) if len(readable) else None


def detect_target_kind(subject: CheckedDataset) -> str:
    """Return the target type of the annotations that `train` would use: `objects`, `classes` for class maps, or an
    empty string without annotations."""
    splits = subject.splits
    if not all(isinstance(split, AnnotatedSplit) for split in splits.values()):
        return ""
    target = find_first_target(splits.values())
    return "classes" if target is not None and target.classes is not None else "objects"


def detect_pixel_format(split: Split, workers: int) -> tuple[PixelFormat, tuple[int, int] | None]:
    """Detect the pixel format of a split, and (height, width) of its first readable image, as `train` does.

    If none of the first `MAX_PROBED_IMAGES` images is readable, return the first format in a file header, and None.
    """
    header_format = None
    for samples in (range(min(1, len(split))), range(1, min(MAX_PROBED_IMAGES, len(split)))):
        records, _ = scan_samples(split, samples, probe_pixel_formats, min(workers, 1))
        for record in records[records["state"] == READABLE][:1]:
            return record_to_pixel_format(record), (int(record["height"]), int(record["width"]))
        header_format = header_format or next(filter(None, map(record_to_pixel_format, records)), None)
    return header_format, None


def record_to_pixel_format(record: Any) -> PixelFormat:
    """Return the (channels, dtype) of one record of `probe_pixel_formats`; None for colour images."""
    return (int(record["channels"]), str(record["numbers"])) if record["channels"] else None
