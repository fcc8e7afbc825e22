"""The verb `data dedup`: find images of a dataset that other datasets contain too, or duplicates within it.

Images with the same bytes or pixels come first. Then near-duplicates, which may be cropped, scaled, shifted, mirrored,
framed and changed in colour, are searched for among all images, and each is verified. Clips are compared as in
`copies.clips`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from vitreous.apps.curation.copies.clips import find_clip_copies
from vitreous.apps.curation.copies.listing import Copy, resolve_copies
from vitreous.apps.curation.copies.scan import (
    READABLE,
    ConcatenatedSplits,
    ReadErrors,
    digest_content,
    fill_records,
    read_views,
    scan_in_chunks,
    scan_samples,
)
from vitreous.apps.curation.copies.search import find_first_equal, search_by_features, search_candidates
from vitreous.apps.curation.copies.verification import (
    COPY_THRESHOLD,
    MIN_SMALL_VIEW_COSINE,
    align_pairs,
    compact_indices,
    score_pairs,
)
from vitreous.apps.curation.copies.windows import (
    VIEW_SIZE,
    compute_descriptors,
    compute_whole_descriptors,
    is_distinctive,
    make_grey_view,
)
from vitreous.data.annotations.target import check_image_samples, get_sample_noun
from vitreous.data.decoding.decode import decode_to_pillow
from vitreous.data.modalities.base import Preprocess
from vitreous.data.split import Split
from vitreous.errors import DataError, UsageError
from vitreous.system.cores import default_worker_count

MAX_HELD_PAIRS = 32_768  # pairs whose larger views are in memory at a time
#: digests of the stored bytes or pixels and of the decoded pixels, and the view for the search
FINGERPRINT_FIELDS = {
    "content": ("<u8", 2),
    "pixels": ("<u8", 2),
    "view": ("u1", (VIEW_SIZE, VIEW_SIZE)),
    "state": ("u1", ()),
}
FINGERPRINT = np.dtype([(name, *form) for name, form in FINGERPRINT_FIELDS.items()])

DedupProgress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class ImageEmbedder:
    """A model for an additional search by features: its preprocessing, and (B, C, *image) uint8 -> (B, D) float32."""

    preprocess: Preprocess
    embed: Callable[[np.ndarray], np.ndarray]


def find_copies(
    data: Sequence[Split],
    against: Sequence[Split],
    within: bool = False,
    threshold: float = COPY_THRESHOLD,
    workers: int | None = None,
    embedder: ImageEmbedder | None = None,
    progress: DedupProgress = lambda label, done, total: None,
) -> dict[str, Any]:
    """List every sample of `data` that is a copy of one in `against` or, with `within`, of an earlier one in
    `data`; all must be images, or all clips.

    Each copy is listed once, with an image that is kept: `duplicates` has its `path`, `duplicate_of`, `reason` (bytes,
    pixels, near) and `score`. Unreadable images are in `unreadable`, by name and reason, and are kept. Raises
    UsageError if there is nothing to compare with, and for a mixture of images and clips; DataError if no image can be
    read.
    """
    if not against and not within:
        raise UsageError("no dataset to compare with", "add --against DATA, or --within")
    if not 0 < threshold <= 1:
        raise UsageError(f"--threshold must be above 0 and at most 1, not {threshold}")
    kinds = {get_sample_noun(split) for split in [*against, *data]}
    if kinds != {"clips"}:
        check_image_samples([*against, *data], "copies are found among images, or among clips")
    pool, others = ConcatenatedSplits([*against, *data]), sum(map(len, against))
    processes = default_worker_count() if workers is None else workers
    if kinds == {"clips"}:
        if embedder is not None:
            raise UsageError("--model compares features of images, and the data are clips", "remove --model")
        copies, reasons = find_clip_copies(
            pool, others, within=within, threshold=threshold, workers=processes, progress=progress
        )
    else:
        prints, reasons, features = read_fingerprints(pool, processes, progress, embedder)
        require_readable(pool, reasons)
        equal = find_equal_copies(prints, others, within)
        pairs = search_near_pairs(
            prints, features, others=others, within=within, equal=np.array(list(equal), np.int64), progress=progress
        )
        copies = resolve_copies(
            equal,
            verify_near_copies(
                pool, prints["view"], pairs=pairs, threshold=threshold, workers=processes, progress=progress
            ),
        )
    require_readable(pool, reasons)
    unreadable = [f"{pool.name(sample)}: {reason}" for sample, reason in sorted(reasons.items())]
    return {
        "images": len(pool) - others,
        "against_images": others,
        "within": within,
        "threshold": threshold,
        "unreadable": unreadable,
        "counts": dict(sorted(Counter(copy.reason for copy in copies).items())),
        "duplicates": [
            {"path": pool.name(sample), "duplicate_of": pool.name(of), "reason": reason, "score": round(score, 4)}
            for sample, of, reason, score in copies
        ],
    }


def require_readable(pool: ConcatenatedSplits, reasons: ReadErrors) -> None:
    """Raise DataError with the first error if no image can be read."""
    if len(reasons) == len(pool):
        first = "".join(f"; {pool.name(sample)}: {reasons[sample]}" for sample in sorted(reasons)[:1])
        raise DataError(f"none of {len(pool)} images can be read{first}")


def fingerprint_images(
    pool: ConcatenatedSplits, samples: Sequence[int], preprocess: Preprocess | None
) -> tuple[np.ndarray, ReadErrors]:
    """Compute digests and views of n samples, (n,) PRINT with a field `fed` for a model's (C, *image), and read errors.

    Unreadable samples have an error instead.
    """
    fields = FINGERPRINT.descr
    if preprocess is not None:
        fields = [*fields, ("fed", preprocess.array_dtype.str, (preprocess.channels, *preprocess.image))]
    records = np.zeros(len(samples), fields)

    def read(pool: ConcatenatedSplits, sample: int, record: Any) -> None:
        raw, name = pool.raw(sample), pool.name(sample)
        picture = decode_to_pillow(raw, 3, name)
        if preprocess is not None:
            record["fed"] = preprocess.to_array(picture if preprocess.channels == 3 else preprocess.decode(raw, name))
        record["content"], record["pixels"] = digest_content(raw), digest_content(np.asarray(picture))
        record["view"] = make_grey_view(picture, VIEW_SIZE)

    return records, fill_records(records, pool, samples, read)


def read_fingerprints(
    pool: ConcatenatedSplits,
    workers: int,
    progress: DedupProgress = lambda label, done, total: None,
    embedder: ImageEmbedder | None = None,
) -> tuple[np.ndarray, ReadErrors, np.ndarray | None]:
    """Read every image once: (n,) PRINT, read errors, and features if a model is set, (n, D) float16 of length 1.

    Raises ResourceError if no worker process survives its start.
    """
    prints, reasons, done = np.zeros(len(pool), FINGERPRINT), {}, 0
    features: np.ndarray | None = None
    job = partial(fingerprint_images, preprocess=embedder and embedder.preprocess)
    with closing(scan_in_chunks(pool, range(len(pool)), job, workers)) as parts:
        for span, records, why in parts:
            for field in FINGERPRINT_FIELDS:
                prints[field][span.start : span.stop] = records[field]
            reasons |= why
            good = records["state"] == READABLE
            if embedder is not None and good.any():
                rows = embedder.embed(records["fed"][good]).astype(np.float32)
                features = np.zeros((len(pool), rows.shape[1]), np.float16) if features is None else features
                lengths = np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
                features[span.start : span.stop][good] = rows / lengths
            done += len(span)
            progress("look at images", done, len(pool))
    return prints, reasons, features


def find_equal_copies(prints: np.ndarray, others: int, within: bool) -> dict[int, Copy]:
    """Find samples from `others` on in (n,) PRINT with the same bytes or, failing that, pixels as an earlier one."""
    copies: dict[int, Copy] = {}
    samples = np.arange(len(prints))
    for reason, field in (("pixels", "pixels"), ("bytes", "content")):  # bytes take precedence over pixels
        first = find_first_equal(prints[field])
        copied = (samples >= others) & (prints["state"] == READABLE) & (first < (samples if within else others))
        copies |= {int(s): Copy(int(s), int(first[s]), reason, 1.0) for s in np.flatnonzero(copied)}
    return copies


def search_near_pairs(
    prints: np.ndarray,
    features: np.ndarray | None,
    others: int,
    within: bool,
    equal: np.ndarray,
    progress: DedupProgress,
) -> np.ndarray:
    """Find candidate originals of the samples from `others` on, except (m,) `equal` ones: (p,) CANDIDATE.

    (n,) PRINT are searched by their views, and by (n, D) features if not None.
    """
    views, samples = prints["view"], np.arange(len(prints))
    shown = is_distinctive(views) & (prints["state"] == READABLE)
    known = np.flatnonzero(shown & (find_first_equal(prints["pixels"]) == samples) & (within | (samples < others)))
    asked = np.flatnonzero(shown & (samples >= others) & ~np.isin(samples, equal))
    wholes = np.concatenate([compute_whole_descriptors(views[low : low + 4096]) for low in range(0, len(views), 4096)])
    pairs = search_candidates(
        wholes, lambda n: compute_descriptors(views[n]), asked, known, progress=partial(progress, "search")
    )
    return pairs if features is None else np.concatenate([pairs, search_by_features(features, asked, known)])


def verify_near_copies(
    pool: ConcatenatedSplits,
    views: np.ndarray,
    pairs: np.ndarray,
    threshold: float,
    workers: int,
    progress: DedupProgress,
) -> list[Copy]:
    """Compare (p,) CANDIDATE in (n, side, side) small views, and the most similar in larger views, read again."""
    alike, boxes = align_pairs(views, pairs, partial(progress, "compare"))
    pairs, boxes = pairs[alike >= MIN_SMALL_VIEW_COSINE], boxes[alike >= MIN_SMALL_VIEW_COSINE]
    copies: list[Copy] = []
    for low in range(0, len(pairs), MAX_HELD_PAIRS):
        part = pairs[low : low + MAX_HELD_PAIRS]
        samples, places = compact_indices(part)
        records, _ = scan_samples(pool, samples.tolist(), read_larger_views, workers)
        good = records["state"] == READABLE
        readable = good[places["sample"]] & good[places["of"]]
        scores = score_pairs(records["view"], places[readable], boxes[low : low + MAX_HELD_PAIRS][readable])
        copies += [
            Copy(int(pair["sample"]), int(pair["of"]), "near", float(score))
            for pair, score in zip(part[readable], scores, strict=True)
            if score >= threshold
        ]
        progress("verify", min(low + MAX_HELD_PAIRS, len(pairs)), len(pairs))
    return copies


def read_larger_views(pool: ConcatenatedSplits, samples: Sequence[int]) -> tuple[np.ndarray, ReadErrors]:
    """Read larger grey views of n samples: (n,) VIEW, and read errors."""
    return read_views(pool, samples, lambda pool, sample: decode_to_pillow(pool.raw(sample), 3, pool.name(sample)))
