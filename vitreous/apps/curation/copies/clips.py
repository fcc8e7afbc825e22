"""Records of clips for `data check` and `data dedup`: length, frame rate, contrast, motion, and descriptors for
comparison.

Each file is decoded to its end as in training, so that both refuse the same files. As in evaluation by default, the
selected frames are evenly spread over the clip. Only one clip is in memory at a time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from PIL import Image

from vitreous.apps.curation.checks.facts import MAX_LISTED_GROUPS, describe_sample_entry, summarise_range
from vitreous.apps.curation.checks.record import (
    FILE_FORMATS,
    IMAGE_MODES,
    RECORD,
    ImageTrait,
    category_index,
    compute_channel_moments,
)
from vitreous.apps.curation.checks.subject import CheckedDataset
from vitreous.apps.curation.copies.alike import (
    find_comparable_samples,
    find_contrasting_samples,
    search_whole_pairs,
    verify_frame_pairs,
)
from vitreous.apps.curation.copies.listing import Copy, resolve_copies
from vitreous.apps.curation.copies.scan import (
    READABLE,
    ConcatenatedSplits,
    ReadErrors,
    digest_content,
    fill_records,
    scan_samples,
)
from vitreous.apps.curation.copies.search import find_first_equal_rows
from vitreous.apps.curation.copies.verification import compact_indices
from vitreous.apps.curation.copies.windows import (
    LARGER_VIEW_SIZE,
    MIN_VIEW_STD,
    VIEW_SIZE,
    compute_whole_descriptors,
    make_grey_view,
)
from vitreous.data.annotations.target import get_sample_noun
from vitreous.data.decoding.clip import DEFAULT_CLIP_FRAMES, Clip, sample_frames_evenly
from vitreous.data.decoding.clips import list_frame_images, open_clip
from vitreous.data.decoding.decode import read_input_file
from vitreous.data.decoding.video import detect_demuxer
from vitreous.data.layouts.video import ClipFiles, StoredClips

#: a `RECORD` over the selected frames (`whole` is the mean of their descriptors), and the clip's length (0 s: unknown)
CLIP_RECORD = np.dtype([*RECORD.descr, ("frames", "<u4"), ("seconds", "<f4")])
CLIP_VIEWS = np.dtype([("view", "u1", (DEFAULT_CLIP_FRAMES, LARGER_VIEW_SIZE, LARGER_VIEW_SIZE)), ("state", "u1")])
STILL_TOLERANCE = 8  # grey levels (of 0 to 255) by which compression may change uniform or still content
CONTAINER_FORMATS = {"mov": "MOV", "avi": "AVI", "matroska": "MATROSKA", "mpeg": "MPEG", "mpegvideo": "MPEG"}


def locate_clip(pool: ConcatenatedSplits, sample: int) -> tuple[ClipFiles | StoredClips, int]:
    """Return the split of a clip in the pool, and the clip's index in that split."""
    split, index = pool.get_split_and_index(sample)
    assert isinstance(split, ClipFiles | StoredClips)
    return split, index


def survey_clips(pool: ConcatenatedSplits, samples: Sequence[int]) -> tuple[np.ndarray, ReadErrors]:
    """Read and decode n clips once. Return (n,) records of dtype `CLIP_RECORD`, and the read errors."""
    records, views = (
        np.zeros(len(samples), CLIP_RECORD),
        np.zeros((len(samples), DEFAULT_CLIP_FRAMES, VIEW_SIZE, VIEW_SIZE), np.uint8),
    )
    record_indices = {sample: index for index, sample in enumerate(samples)}

    def survey_clip(pool: ConcatenatedSplits, sample: int, record: Any) -> None:
        """Read one clip, and fill its record."""
        split, index = locate_clip(pool, sample)
        clip, record["format"], record["digest"], record["bytes"] = open_clip_with_digest(split, index)
        pixels = clip.read_frames(sample_frames_evenly(len(clip), DEFAULT_CLIP_FRAMES))
        views[record_indices[sample]] = make_frame_views(pixels, VIEW_SIZE)
        record["height"], record["width"] = clip.size
        record["mean"], record["std"] = compute_channel_moments(Image.fromarray(pixels.reshape(-1, *pixels.shape[2:])))
        record["frames"], record["seconds"] = len(clip), compute_clip_duration(clip)
        record["mode"], record["depth"] = category_index("RGB", IMAGE_MODES), 8
        if np.ptp(pixels, axis=(1, 2)).max() <= STILL_TOLERANCE:
            record["traits"] = ImageTrait.ONE_COLOUR
        elif len(clip) > 1 and np.ptp(pixels, axis=0).max() <= STILL_TOLERANCE:
            record["traits"] = ImageTrait.WITHOUT_MOTION

    reasons = fill_records(records, pool, samples, survey_clip)
    descriptors = compute_whole_descriptors(views.reshape(-1, VIEW_SIZE, VIEW_SIZE)).reshape(
        len(samples), DEFAULT_CLIP_FRAMES, RECORD["whole"].shape[0]
    )
    descriptors[views.std((2, 3)) < MIN_VIEW_STD] = 0  # no contrast
    records["whole"] = np.rint(127 * descriptors.mean(1))
    return records, reasons


def read_clip_views(pool: ConcatenatedSplits, samples: Sequence[int]) -> tuple[np.ndarray, ReadErrors]:
    """Read the frames of n candidate duplicates again, for larger grey views. Return (n,) records of dtype
    `CLIP_VIEWS`, and the read errors."""
    records = np.zeros(len(samples), CLIP_VIEWS)

    def read_clip(pool: ConcatenatedSplits, sample: int, record: Any) -> None:
        """Read one clip, and fill its record with grey views."""
        split, index = locate_clip(pool, sample)
        clip = split.open_clip(index)
        record["view"] = make_frame_views(
            clip.read_frames(sample_frames_evenly(len(clip), DEFAULT_CLIP_FRAMES)), LARGER_VIEW_SIZE
        )

    return records, fill_records(records, pool, samples, read_clip)


def open_clip_with_digest(split: ClipFiles | StoredClips, sample: int) -> tuple[Clip, int, np.ndarray, int]:
    """Open a clip. Return the clip, the index of its format in `FILE_FORMATS`, its digest (2,) uint64, and its number
    of bytes. A folder of frames has the digest and the bytes of all its frames. Raises DataError if the clip cannot be
    read."""
    files, name = split if isinstance(split, ClipFiles) else None, split.name(sample)
    interval = files.get_segment(sample) if files else None
    if files and os.path.isdir(path := files.path(sample)):
        clip, contents = open_clip(path, name), map(read_input_file, list_frame_images(path))
        file_format = "FRAMES"
    else:
        content = split.raw(sample)
        assert isinstance(content, bytes)
        clip, contents, file_format = (
            open_clip(content, name),
            [content],
            CONTAINER_FORMATS.get(detect_demuxer(content), "GIF"),
        )
    digests, size = [b"" if interval is None else repr(interval).encode()], 0
    for content in contents:
        digests.append(digest_content(content).tobytes())
        size += len(content)
    return (
        files.cut_segment(sample, clip) if files else clip,
        category_index(file_format, FILE_FORMATS),
        digest_content(b"".join(digests)),
        size,
    )


def make_frame_views(pixels: np.ndarray, side: int) -> np.ndarray:
    """Make grey views of frames (T, H, W, 3) uint8: (T, side, side) uint8."""
    return np.stack([make_grey_view(Image.fromarray(frame), side) for frame in pixels])


def compute_clip_duration(clip: Clip) -> float:
    """Return the duration of a clip in seconds, 0 if unknown. The last frame counts with the mean duration of the other
    frames."""
    count = len(clip)
    return float(clip.times[-1]) * count / (count - 1) if len(clip.times) and count > 1 else 0.0


def summarise_clips(subject: CheckedDataset, records: np.ndarray) -> dict[str, Any] | None:
    """Summarise the lengths of the clips in (n,) records of dtype `CLIP_RECORD`; None for data that are not clips.

    `frames`, `seconds` and `frame_rate` (frames/s) are ranges: minimum, median and maximum. `seconds` and `frame_rate`
    cover only clips with frame times, and are None if there are none. `short` lists clips with fewer frames than
    `frames_read`, the default of a run. `one_colour` and `without_motion` list clips without contrast and without
    motion.
    """
    if get_sample_noun(subject.pool.splits[0]) != "clips":
        return None
    readable = records[records["state"] == READABLE]
    timed_clips = readable[readable["seconds"] > 0]
    num_frames, durations = timed_clips["frames"].astype(np.float64), timed_clips["seconds"].astype(np.float64)
    is_short = (records["state"] == READABLE) & (records["frames"] < DEFAULT_CLIP_FRAMES)

    def describe_entries(samples: Iterable[Any]) -> list[dict[str, Any]]:
        """Describe the listed samples by split, index, name and class."""
        return [describe_sample_entry(subject, int(sample)) for sample in samples][:MAX_LISTED_GROUPS]

    return {
        "frames_read": DEFAULT_CLIP_FRAMES,
        "frames": summarise_range(readable["frames"].astype(np.float64)) if len(readable) else None,
        "seconds": summarise_range(durations) if len(timed_clips) else None,
        "frame_rate": summarise_range(num_frames / durations) if len(timed_clips) else None,
        "short": describe_entries(np.flatnonzero(is_short)),
        **{
            trait.name.lower(): describe_entries(np.flatnonzero(records["traits"] & trait))
            for trait in (ImageTrait.ONE_COLOUR, ImageTrait.WITHOUT_MOTION)
        },
    }


def find_clip_copies(
    pool: ConcatenatedSplits,
    num_references: int,
    within: bool,
    threshold: float,
    workers: int,
    progress: Callable[[str, int, int], None],
) -> tuple[list[Copy], ReadErrors]:
    """Find clips that are duplicates of an earlier clip, and return them with the read errors. The first
    `num_references` clips of the pool are references. Each later clip is compared with the references or, with
    `within`, with all earlier clips."""
    records, reasons = scan_samples(
        pool,
        range(len(pool)),
        job=survey_clips,
        workers=workers,
        progress=lambda done: progress("read clips", done, len(pool)),
        slow=True,
    )
    samples, first_index = np.arange(len(pool)), find_first_equal_rows(records["digest"])
    is_exact_copy = (
        (samples >= num_references)
        & (records["state"] == READABLE)
        & (first_index < (samples if within else num_references))
    )
    exact_copies = {int(s): Copy(int(s), int(first_index[s]), "bytes", 1.0) for s in np.flatnonzero(is_exact_copy)}
    queries, references = find_contrasting_samples(records), find_comparable_samples(records)
    queries, references = (
        queries[(queries >= num_references) & ~is_exact_copy[queries]],
        references if within else references[references < num_references],
    )
    candidates, pairs = compact_indices(search_whole_pairs(records, queries, references))
    reread_records, _ = scan_samples(
        pool,
        candidates.tolist(),
        job=read_clip_views,
        workers=workers,
        progress=lambda done: progress("compare", done, len(candidates)),
        slow=True,
    )
    pairs, scores = verify_frame_pairs(pairs, reread_records["view"], threshold)
    near_copies = [
        Copy(int(candidates[pair["sample"]]), int(candidates[pair["of"]]), "near", float(score))
        for pair, score in zip(pairs, scores, strict=True)
    ]
    return resolve_copies(exact_copies, near_copies), reasons
