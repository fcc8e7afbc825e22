"""The verb `data dedup`: find the images of a data set that are in others too, or twice in itself.

First those of the same bytes or pixels; then near copies, which may be cut, scaled, shifted, mirrored, framed and
changed in colour: they are searched for among all images, and each is verified. Clips are compared as
`copies.clip_copies` has it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from vitreous.apps.curation.copies.clips import clip_copies
from vitreous.apps.curation.copies.listing import Copy, settle_copies
from vitreous.apps.curation.copies.scan import READABLE, Joined, Reasons, digest, fill, read_views, scan, scan_parts
from vitreous.apps.curation.copies.search import candidates, first_equal, like_features
from vitreous.apps.curation.copies.verification import PROMISING, THRESHOLD, fit_pairs, renumbered, score_pairs
from vitreous.apps.curation.copies.windows import SIDE, comparable, describe, describe_whole, view
from vitreous.data.annotations.target import kind_of, require_pictures
from vitreous.data.decoding.decode import decode
from vitreous.data.modalities.base import Preprocess
from vitreous.data.split import Split
from vitreous.errors import DataError, UsageError
from vitreous.system.cores import default_workers

READ = 32_768  # pairs whose larger views are held at a time
#: digests of the stored bytes or pixels and of the decoded ones, and the view that images are searched by
FIELDS = {"content": ("<u8", 2), "pixels": ("<u8", 2), "view": ("u1", (SIDE, SIDE)), "state": ("u1", ())}
PRINT = np.dtype([(name, *form) for name, form in FIELDS.items()])

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class ImageEmbedder:
    """A model whose features are compared too: its preprocessing, and (B, C, *image) uint8 -> (B, D) float32."""

    preprocess: Preprocess
    embed: Callable[[np.ndarray], np.ndarray]


def dedup(
    data: Sequence[Split],
    against: Sequence[Split],
    within: bool = False,
    threshold: float = THRESHOLD,
    workers: int | None = None,
    embedder: ImageEmbedder | None = None,
    progress: Progress = lambda label, done, total: None,
) -> dict[str, Any]:
    """List every sample of `data` that is a copy of one in `against`, or, `within`, of an earlier one in `data`; all
    are pictures, or all clips.

    Each copy is listed once, with an image that stays: `copies` has its `path`, `copy_of`, `reason` (bytes, pixels,
    near) and `score`. Images that cannot be read are in `unreadable`, by name and reason, and stay.
    Raises UsageError where there is nothing to compare with, and for pictures beside clips; DataError where no image
    can be read.
    """
    if not against and not within:
        raise UsageError("nothing to look for copies in", "name other data with --against, or use --within")
    if not 0 < threshold <= 1:
        raise UsageError(f"--threshold must be above 0 and at most 1, not {threshold}")
    kinds = {kind_of(split) for split in [*against, *data]}
    if kinds != {"clips"}:
        require_pictures([*against, *data], "copies are found among pictures, or among clips")
    pool, others = Joined([*against, *data]), sum(map(len, against))
    processes = default_workers() if workers is None else workers
    if kinds == {"clips"}:
        if embedder is not None:
            raise UsageError("--model compares the features of pictures, and the data are clips", "leave it out")
        copies, reasons = clip_copies(
            pool, others, within=within, threshold=threshold, workers=processes, progress=progress
        )
    else:
        prints, reasons, features = look(pool, processes, progress, embedder)
        require_readable(pool, reasons)
        equal = equal_copies(prints, others, within)
        pairs = near_pairs(
            prints, features, others=others, within=within, equal=np.array(list(equal), np.int64), progress=progress
        )
        copies = settle_copies(
            equal,
            verified(pool, prints["view"], pairs=pairs, threshold=threshold, workers=processes, progress=progress),
        )
    require_readable(pool, reasons)
    unreadable = [f"{pool.name(sample)}: {reason}" for sample, reason in sorted(reasons.items())]
    return {
        "images": len(pool) - others,
        "against": others,
        "within": within,
        "threshold": threshold,
        "unreadable": unreadable,
        "counts": dict(sorted(Counter(copy.reason for copy in copies).items())),
        "copies": [
            {"path": pool.name(sample), "copy_of": pool.name(of), "reason": reason, "score": round(score, 4)}
            for sample, of, reason, score in copies
        ],
    }


def require_readable(pool: Joined, reasons: Reasons) -> None:
    """Raise DataError where no image can be read, with the first of the reasons."""
    if len(reasons) == len(pool):
        first = "".join(f"; {pool.name(sample)}: {reasons[sample]}" for sample in sorted(reasons)[:1])
        raise DataError(f"none of {len(pool)} images can be read{first}")


def fingerprint(pool: Joined, samples: Sequence[int], preprocess: Preprocess | None) -> tuple[np.ndarray, Reasons]:
    """Digests and views of n samples, (n,) PRINT with a field `fed` for a model's (C, *image), and why some are unread.

    Samples that cannot be read have a reason instead.
    """
    fields = PRINT.descr
    if preprocess is not None:
        fields = [*fields, ("fed", preprocess.array_dtype.str, (preprocess.channels, *preprocess.image))]
    records = np.zeros(len(samples), fields)

    def read(pool: Joined, sample: int, record: Any) -> None:
        raw, name = pool.raw(sample), pool.name(sample)
        picture = decode(raw, 3, name)
        if preprocess is not None:
            record["fed"] = preprocess.to_array(picture if preprocess.channels == 3 else preprocess.decode(raw, name))
        record["content"], record["pixels"] = digest(raw), digest(np.asarray(picture))
        record["view"] = view(picture, SIDE)

    return records, fill(records, pool, samples, read)


def look(
    pool: Joined,
    workers: int,
    progress: Progress = lambda label, done, total: None,
    embedder: ImageEmbedder | None = None,
) -> tuple[np.ndarray, Reasons, np.ndarray | None]:
    """Read every image once: (n,) PRINT, why some cannot be read, and any model's features, (n, D) float16 of length 1.

    Raises ResourceError where no worker process survives its start.
    """
    prints, reasons, done = np.zeros(len(pool), PRINT), {}, 0
    features: np.ndarray | None = None
    job = partial(fingerprint, preprocess=embedder and embedder.preprocess)
    with closing(scan_parts(pool, range(len(pool)), job, workers)) as parts:
        for span, records, why in parts:
            for field in FIELDS:
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


def equal_copies(prints: np.ndarray, others: int, within: bool) -> dict[int, Copy]:
    """Find in (n,) PRINT the samples from `others` on of the same bytes or, failing that, pixels as an earlier one."""
    copies: dict[int, Copy] = {}
    samples = np.arange(len(prints))
    for reason, field in (("pixels", "pixels"), ("bytes", "content")):  # bytes replace pixels
        first = first_equal(prints[field])
        copied = (samples >= others) & (prints["state"] == READABLE) & (first < (samples if within else others))
        copies |= {int(s): Copy(int(s), int(first[s]), reason, 1.0) for s in np.flatnonzero(copied)}
    return copies


def near_pairs(
    prints: np.ndarray, features: np.ndarray | None, others: int, within: bool, equal: np.ndarray, progress: Progress
) -> np.ndarray:
    """Find what the samples from `others` on, but for (m,) `equal` ones, may be near copies of: (p,) CANDIDATE.

    (n,) PRINT are searched by their views, and by (n, D) features where there are any.
    """
    views, samples = prints["view"], np.arange(len(prints))
    shown = comparable(views) & (prints["state"] == READABLE)
    known = np.flatnonzero(shown & (first_equal(prints["pixels"]) == samples) & (within | (samples < others)))
    asked = np.flatnonzero(shown & (samples >= others) & ~np.isin(samples, equal))
    wholes = np.concatenate([describe_whole(views[low : low + 4096]) for low in range(0, len(views), 4096)])
    pairs = candidates(wholes, lambda n: describe(views[n]), asked, known, progress=partial(progress, "search"))
    return pairs if features is None else np.concatenate([pairs, like_features(features, asked, known)])


def verified(
    pool: Joined, views: np.ndarray, pairs: np.ndarray, threshold: float, workers: int, progress: Progress
) -> list[Copy]:
    """Compare (p,) CANDIDATE in (n, SIDE, SIDE) small views, and the most alike, read again, in larger ones."""
    alike, boxes = fit_pairs(views, pairs, partial(progress, "compare"))
    pairs, boxes = pairs[alike >= PROMISING], boxes[alike >= PROMISING]
    copies: list[Copy] = []
    for low in range(0, len(pairs), READ):
        part = pairs[low : low + READ]
        samples, places = renumbered(part)
        records, _ = scan(pool, samples.tolist(), larger_views, workers)
        good = records["state"] == READABLE
        readable = good[places["sample"]] & good[places["of"]]
        scores = score_pairs(records["view"], places[readable], boxes[low : low + READ][readable])
        copies += [
            Copy(int(pair["sample"]), int(pair["of"]), "near", float(score))
            for pair, score in zip(part[readable], scores, strict=True)
            if score >= threshold
        ]
        progress("verify", min(low + READ, len(pairs)), len(pairs))
    return copies


def larger_views(pool: Joined, samples: Sequence[int]) -> tuple[np.ndarray, Reasons]:
    """Larger grey views of n samples: (n,) VIEW, and why some cannot be read."""
    return read_views(pool, samples, lambda pool, sample: decode(pool.raw(sample), 3, pool.name(sample)))
