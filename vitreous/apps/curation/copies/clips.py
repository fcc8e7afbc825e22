"""Records of clips: how long they are, at what rate, whether they show or move anything, and what they are compared by.

Each file is opened as training opens it, decoded to its end, so that both refuse the same files. Of its frames those
are looked at that a run reads by default in evaluation, FRAMES evenly spread ones. One clip is in memory at a time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from PIL import Image

from vitreous.apps.curation.checks.facts import LISTED, described, span
from vitreous.apps.curation.checks.record import KINDS, MODES, RECORD, Trait, moments, place
from vitreous.apps.curation.checks.subject import Subject
from vitreous.apps.curation.copies.alike import alike_pairs, comparable_rows, shown_rows, verified
from vitreous.apps.curation.copies.listing import Copy, settle_copies
from vitreous.apps.curation.copies.scan import READABLE, Joined, Reasons, digest, fill, scan
from vitreous.apps.curation.copies.search import first_equal
from vitreous.apps.curation.copies.verification import renumbered
from vitreous.apps.curation.copies.windows import LARGER, PLAIN, SIDE, describe_whole, view
from vitreous.data.annotations.target import kind_of
from vitreous.data.decoding.clip import FRAMES, Clip, evenly
from vitreous.data.decoding.clips import open_clip, pictures_in
from vitreous.data.decoding.decode import read_regular
from vitreous.data.decoding.video import demuxer_of
from vitreous.data.layouts.video import ClipFiles, StoredClips

#: a RECORD of the frames looked at (`whole`: the mean of their descriptors), and the clip's length; 0 seconds: unknown
CLIP = np.dtype([*RECORD.descr, ("frames", "<u4"), ("seconds", "<f4")])
VIEWS = np.dtype([("view", "u1", (FRAMES, LARGER, LARGER)), ("state", "u1")])
STEADY = 8  # levels of 0..255 by which compression changes what is of one colour, or stands still
CONTAINERS = {"mov": "MOV", "avi": "AVI", "matroska": "MATROSKA", "mpeg": "MPEG", "mpegvideo": "MPEG"}


def clip_of(pool: Joined, sample: int) -> tuple[ClipFiles | StoredClips, int]:
    """The split that a clip is in, and its number there."""
    split, number = pool.home(sample)
    assert isinstance(split, ClipFiles | StoredClips)
    return split, number


def survey_clips(pool: Joined, samples: Sequence[int]) -> tuple[np.ndarray, Reasons]:
    """Read and decode n clips once: (n,) CLIP, and why some cannot be read."""
    records, views = np.zeros(len(samples), CLIP), np.zeros((len(samples), FRAMES, SIDE, SIDE), np.uint8)
    rows = {sample: row for row, sample in enumerate(samples)}

    def read(pool: Joined, sample: int, record: Any) -> None:
        split, number = clip_of(pool, sample)
        clip, record["format"], record["digest"], record["bytes"] = opened(split, number)
        pixels = clip.read(evenly(len(clip), FRAMES))
        views[rows[sample]] = frame_views(pixels, SIDE)
        record["height"], record["width"] = clip.size
        record["mean"], record["std"] = moments(Image.fromarray(pixels.reshape(-1, *pixels.shape[2:])))
        record["frames"], record["seconds"] = len(clip), seconds(clip)
        record["mode"], record["depth"] = place("RGB", MODES), 8
        if np.ptp(pixels, axis=(1, 2)).max() <= STEADY:
            record["traits"] = Trait.ONE_COLOUR
        elif len(clip) > 1 and np.ptp(pixels, axis=0).max() <= STEADY:
            record["traits"] = Trait.FROZEN

    reasons = fill(records, pool, samples, read)
    descriptors = describe_whole(views.reshape(-1, SIDE, SIDE)).reshape(len(samples), FRAMES, RECORD["whole"].shape[0])
    descriptors[views.std((2, 3)) < PLAIN] = 0  # shows nothing
    records["whole"] = np.rint(127 * descriptors.mean(1))
    return records, reasons


def review_clips(pool: Joined, samples: Sequence[int]) -> tuple[np.ndarray, Reasons]:
    """Larger grey views of the frames of n clips, which may be copies: (n,) VIEWS, and why some cannot be read."""
    records = np.zeros(len(samples), VIEWS)

    def read(pool: Joined, sample: int, record: Any) -> None:
        split, number = clip_of(pool, sample)
        clip = split.clip(number)
        record["view"] = frame_views(clip.read(evenly(len(clip), FRAMES)), LARGER)

    return records, fill(records, pool, samples, read)


def opened(split: ClipFiles | StoredClips, sample: int) -> tuple[Clip, int, np.ndarray, int]:
    """A clip, the position of its format, its digest (2,) uint64 and the bytes of its file; of a folder those of its
    pictures. Raises DataError."""
    files, name = split if isinstance(split, ClipFiles) else None, split.name(sample)
    part = files.part(sample) if files else None
    if files and os.path.isdir(path := files.path(sample)):
        clip, contents = open_clip(path, name), map(read_regular, pictures_in(path))
        kind = "FRAMES"
    else:
        content = split.raw(sample)
        assert isinstance(content, bytes)
        clip, contents, kind = open_clip(content, name), [content], CONTAINERS.get(demuxer_of(content), "GIF")
    parts, size = [b"" if part is None else repr(part).encode()], 0
    for content in contents:
        parts.append(digest(content).tobytes())
        size += len(content)
    return files.cut(sample, clip) if files else clip, place(kind, KINDS), digest(b"".join(parts)), size


def frame_views(pixels: np.ndarray, side: int) -> np.ndarray:
    """Grey views of frames (T, H, W, 3) uint8: (T, side, side) uint8."""
    return np.stack([view(Image.fromarray(frame), side) for frame in pixels])


def seconds(clip: Clip) -> float:
    """How long a clip is shown, its last frame as long as the mean of the others; 0 where nothing says so."""
    count = len(clip)
    return float(clip.times[-1]) * count / (count - 1) if len(clip.times) and count > 1 else 0.0


def clip_facts(subject: Subject, records: np.ndarray) -> dict[str, Any] | None:
    """What is reported of the lengths of clips, (n,) CLIP, before it is judged; None for anything else.

    `frames`, `seconds` and `rate` (frames a second) have a minimum, median and maximum, the latter two of clips that
    say when their frames are shown (None: no clip does). `short` lists clips with fewer frames than `read`, those that
    a run reads by default; `one_colour` and `frozen` those that show nothing and those that stand still.
    """
    if kind_of(subject.pool.splits[0]) != "clips":
        return None
    readable = records[records["state"] == READABLE]
    timed = readable[readable["seconds"] > 0]
    lengths, times = timed["frames"].astype(np.float64), timed["seconds"].astype(np.float64)
    short = (records["state"] == READABLE) & (records["frames"] < FRAMES)

    def listed(rows: Iterable[Any]) -> list[dict[str, Any]]:
        return [described(subject, int(row)) for row in rows][:LISTED]

    return {
        "read": FRAMES,
        "frames": span(readable["frames"].astype(np.float64)) if len(readable) else None,
        "seconds": span(times) if len(timed) else None,
        "rate": span(lengths / times) if len(timed) else None,
        "short": listed(np.flatnonzero(short)),
        **{
            trait.name.lower(): listed(np.flatnonzero(records["traits"] & trait))
            for trait in (Trait.ONE_COLOUR, Trait.FROZEN)
        },
    }


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
    return settle_copies(equal, alike), reasons
