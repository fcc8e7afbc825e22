"""The verb `data dedup`: find images of a dataset that are also in other datasets, or more than once in it.

Images with the same bytes or pixels are found first. Near-duplicates may be cropped, scaled, shifted, mirrored, framed
and changed in colour. They are searched for among all images, and each is verified. Clips are compared as in
`copies.clips`.

All datasets form one pool of samples, references first. Pairs of samples have the dtype `CANDIDATE` (`copies.search`),
larger views the dtype `VIEW` (`copies.scan`).
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
    make_grey_views,
    scan_in_chunks,
    scan_samples,
)
from vitreous.apps.curation.copies.search import find_first_equal_rows, search_by_features, search_candidates
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
#: digests of the stored content and of the decoded pixels, small grey view for the search, and state of the sample
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
    """A model for an additional search by features. `embed` maps (B, C, *image) uint8 of its preprocessing to (B, D)
    float32."""

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
    """List every sample of `data` that is a copy of a sample in `against` or, with `within`, of an earlier sample in
    `data`. All samples must be images, or all clips.

    Each copy is listed once, with an original that is kept: `duplicates` has its `path`, `duplicate_of`, `reason`
    (bytes, pixels, near) and `score`. Unreadable images are listed in `unreadable` by name and reason, and are kept.
    Raises UsageError if there is no dataset to compare with, and for a mixture of images and clips; DataError if no
    image can be read.
    """
    if not against and not within:
        raise UsageError("no dataset to compare with", "add --against DATA, or --within")
    if not 0 < threshold <= 1:
        raise UsageError(f"--threshold must be above 0 and at most 1, not {threshold}")
    nouns = {get_sample_noun(split) for split in [*against, *data]}
    if nouns != {"clips"}:
        check_image_samples([*against, *data], "copies are found among images, or among clips, not across both")
    pool, num_references = ConcatenatedSplits([*against, *data]), sum(map(len, against))
    processes = default_worker_count() if workers is None else workers
    if nouns == {"clips"}:
        if embedder is not None:
            raise UsageError("--model compares features of images, and the data are clips", "remove --model")
        copies, reasons = find_clip_copies(
            pool, num_references, within=within, threshold=threshold, workers=processes, progress=progress
        )
    else:
        fingerprints, reasons, features = read_fingerprints(pool, processes, progress, embedder)
        require_readable(pool, reasons)
        exact_copies = find_equal_copies(fingerprints, num_references, within)
        pairs = search_near_pairs(
            fingerprints,
            features,
            num_references=num_references,
            within=within,
            exact_samples=np.array(list(exact_copies), np.int64),
            progress=progress,
        )
        copies = resolve_copies(
            exact_copies,
            verify_near_copies(
                pool, fingerprints["view"], pairs=pairs, threshold=threshold, workers=processes, progress=progress
            ),
        )
    require_readable(pool, reasons)
    unreadable = [f"{pool.name(sample)}: {reason}" for sample, reason in sorted(reasons.items())]
    return {
        "images": len(pool) - num_references,
        "against_images": num_references,
        "within": within,
        "threshold": threshold,
        "unreadable": unreadable,
        "counts": dict(sorted(Counter(copy.reason for copy in copies).items())),
        "duplicates": [
            {"path": pool.name(sample), "duplicate_of": pool.name(original), "reason": reason, "score": round(score, 4)}
            for sample, original, reason, score in copies
        ],
    }


def require_readable(pool: ConcatenatedSplits, reasons: ReadErrors) -> None:
    """Raise DataError with the first read error if no image of the pool can be read."""
    if len(reasons) == len(pool):
        first_error = "".join(f"; {pool.name(sample)}: {reasons[sample]}" for sample in sorted(reasons)[:1])
        raise DataError(f"none of {len(pool)} images can be read{first_error}")


def fingerprint_images(
    pool: ConcatenatedSplits, samples: Sequence[int], preprocess: Preprocess | None
) -> tuple[np.ndarray, ReadErrors]:
    """Compute digests and small views of n samples. Return (n,) records of dtype `FINGERPRINT`, and the read errors.
    With `preprocess`, records also have `fed`, the input (C, *image) of a model."""
    fields = FINGERPRINT.descr
    if preprocess is not None:
        fields = [*fields, ("fed", preprocess.array_dtype.str, (preprocess.channels, *preprocess.image))]
    records = np.zeros(len(samples), fields)

    def fingerprint_image(pool: ConcatenatedSplits, sample: int, record: Any) -> None:
        """Read one image, and fill its record."""
        raw, name = pool.raw(sample), pool.name(sample)
        image = decode_to_pillow(raw, 3, name)
        if preprocess is not None:
            record["fed"] = preprocess.to_array(image if preprocess.channels == 3 else preprocess.decode(raw, name))
        record["content"], record["pixels"] = digest_content(raw), digest_content(np.asarray(image))
        record["view"] = make_grey_view(image, VIEW_SIZE)

    return records, fill_records(records, pool, samples, fingerprint_image)


def read_fingerprints(
    pool: ConcatenatedSplits,
    workers: int,
    progress: DedupProgress = lambda label, done, total: None,
    embedder: ImageEmbedder | None = None,
) -> tuple[np.ndarray, ReadErrors, np.ndarray | None]:
    """Read every image of the pool once. Return (n,) records of dtype `FINGERPRINT`, the read errors, and, with an
    `embedder`, features (n, D) float16 of length 1.

    Raises ResourceError if worker processes end before they read a sample.
    """
    fingerprints, reasons, done = np.zeros(len(pool), FINGERPRINT), {}, 0
    features: np.ndarray | None = None
    job = partial(fingerprint_images, preprocess=embedder and embedder.preprocess)
    with closing(scan_in_chunks(pool, range(len(pool)), job, workers)) as chunks:
        for span, records, errors in chunks:
            for field in FINGERPRINT_FIELDS:
                fingerprints[field][span.start : span.stop] = records[field]
            reasons |= errors
            is_readable = records["state"] == READABLE
            if embedder is not None and is_readable.any():
                chunk_features = embedder.embed(records["fed"][is_readable]).astype(np.float32)
                features = np.zeros((len(pool), chunk_features.shape[1]), np.float16) if features is None else features
                lengths = np.maximum(np.linalg.norm(chunk_features, axis=1, keepdims=True), 1e-12)
                features[span.start : span.stop][is_readable] = chunk_features / lengths
            done += len(span)
            progress("read images", done, len(pool))
    return fingerprints, reasons, features


def find_equal_copies(fingerprints: np.ndarray, num_references: int, within: bool) -> dict[int, Copy]:
    """Find samples with the same bytes or pixels as an earlier sample in (n,) records of dtype `FINGERPRINT`. The first
    `num_references` samples are references; later samples are compared with them or, with `within`, with all earlier
    samples."""
    copies: dict[int, Copy] = {}
    samples = np.arange(len(fingerprints))
    for reason, field in (("pixels", "pixels"), ("bytes", "content")):  # bytes take precedence over pixels
        first_index = find_first_equal_rows(fingerprints[field])
        is_copy = (
            (samples >= num_references)
            & (fingerprints["state"] == READABLE)
            & (first_index < (samples if within else num_references))
        )
        copies |= {int(s): Copy(int(s), int(first_index[s]), reason, 1.0) for s in np.flatnonzero(is_copy)}
    return copies


def search_near_pairs(
    fingerprints: np.ndarray,
    features: np.ndarray | None,
    num_references: int,
    within: bool,
    exact_samples: np.ndarray,
    progress: DedupProgress,
) -> np.ndarray:
    """Find candidate originals of the samples from index `num_references` on: (p,) of dtype `CANDIDATE`. The (m,)
    `exact_samples` are left out, since their originals are known.

    (n,) records of dtype `FINGERPRINT` are searched by their small views, and by (n, D) `features` if not None.
    """
    views, samples = fingerprints["view"], np.arange(len(fingerprints))
    is_comparable = is_distinctive(views) & (fingerprints["state"] == READABLE)
    references = np.flatnonzero(
        is_comparable
        & (find_first_equal_rows(fingerprints["pixels"]) == samples)
        & (within | (samples < num_references))
    )
    queries = np.flatnonzero(is_comparable & (samples >= num_references) & ~np.isin(samples, exact_samples))
    wholes = np.concatenate([compute_whole_descriptors(views[low : low + 4096]) for low in range(0, len(views), 4096)])
    pairs = search_candidates(
        wholes,
        lambda indices: compute_descriptors(views[indices]),
        queries,
        references,
        progress=partial(progress, "search"),
    )
    return pairs if features is None else np.concatenate([pairs, search_by_features(features, queries, references)])


def verify_near_copies(
    pool: ConcatenatedSplits,
    views: np.ndarray,
    pairs: np.ndarray,
    threshold: float,
    workers: int,
    progress: DedupProgress,
) -> list[Copy]:
    """Return the verified copies among (p,) pairs of dtype `CANDIDATE`. All pairs are compared in (n, side, side) small
    views. The most similar are compared in larger views, for which the images are read again."""
    cosines, boxes = align_pairs(views, pairs, partial(progress, "compare"))
    pairs, boxes = pairs[cosines >= MIN_SMALL_VIEW_COSINE], boxes[cosines >= MIN_SMALL_VIEW_COSINE]
    copies: list[Copy] = []
    for low in range(0, len(pairs), MAX_HELD_PAIRS):
        pair_block = pairs[low : low + MAX_HELD_PAIRS]
        samples, block_pairs = compact_indices(pair_block)
        records, _ = scan_samples(pool, samples.tolist(), read_larger_views, workers)
        is_readable = records["state"] == READABLE
        readable = is_readable[block_pairs["sample"]] & is_readable[block_pairs["of"]]
        scores = score_pairs(records["view"], block_pairs[readable], boxes[low : low + MAX_HELD_PAIRS][readable])
        copies += [
            Copy(int(pair["sample"]), int(pair["of"]), "near", float(score))
            for pair, score in zip(pair_block[readable], scores, strict=True)
            if score >= threshold
        ]
        progress("verify", min(low + MAX_HELD_PAIRS, len(pairs)), len(pairs))
    return copies


def read_larger_views(pool: ConcatenatedSplits, samples: Sequence[int]) -> tuple[np.ndarray, ReadErrors]:
    """Read larger grey views of n samples. Return (n,) records of dtype `VIEW`, and the read errors."""
    return make_grey_views(pool, samples, lambda pool, sample: decode_to_pillow(pool.raw(sample), 3, pool.name(sample)))
