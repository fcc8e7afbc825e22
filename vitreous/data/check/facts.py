"""What the records of a data set add up to: counts, sizes, colours, kinds of files, and images that are alike."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from vitreous.data.check.alike import Groups, exact
from vitreous.data.check.record import KINDS, MODES, READABLE, Trait
from vitreous.data.check.scan import ScanResult
from vitreous.data.check.subject import Subject, left_out
from vitreous.errors import DataError

_NUMBER = re.compile(r"\d[\d,]*")
FEW = 10  # images below which a class is named
LISTED = 10_000  # groups of copies that a document lists


def facts(
    subject: Subject, seen: dict[str, ScanResult], near: Groups, image_size: int | None, groups: dict[str, Any]
) -> dict[str, Any]:
    """Everything that is told, before anything is made of it. Every figure but `unreadable` is of the images that can
    be read."""
    records = np.concatenate([part.records for part in seen.values()])
    readable = records[records["state"] == READABLE]
    return {
        "data": subject.source,
        "refused": as_dict(subject.refused),
        "unlabelled": as_dict(subject.unlabelled),
        "classes": list(subject.classes),
        "notes": subject.notes,
        "splits": {name: split_facts(subject, name, part) for name, part in seen.items()},
        "balance": balance(subject),
        "left_out": left_out(subject),
        "unreadable": [
            {"split": name, "path": subject.splits[name].name(sample), "reason": reason}
            for name, part in seen.items()
            for sample, reason in sorted(part.reasons.items())
        ],
        "misnamed": [
            {"split": split, "path": subject.splits[split].name(sample), "format": KINDS[records["format"][row]]}
            for row in np.flatnonzero(records["traits"] & Trait.MISNAMED)
            for split, sample in [subject.place(int(row))]
        ],
        "sizes": sizes(readable, image_size),
        "colour": colour(readable),
        "formats": counted(readable["format"], KINDS),
        "modes": counted(readable["mode"], MODES),
        "depths": {str(bits): int((readable["depth"] == bits).sum()) for bits in np.unique(readable["depth"])},
        "traits": {trait.name.lower(): int((readable["traits"] & trait > 0).sum()) for trait in Trait if trait.name},
        "copies": copies(subject, exact(records)),
        "near_copies": copies(subject, near),
        "groups": groups,
    }


def as_dict(error: DataError | None) -> dict[str, str] | None:
    """An error as `message` and `hint`."""
    return {"message": error.message, "hint": error.hint} if error else None


def split_facts(subject: Subject, name: str, seen: ScanResult) -> dict[str, Any]:
    """Images, bytes and classes of a split."""
    figures = {"images": len(seen.records), "unreadable": len(seen.reasons), "bytes": int(seen.records["bytes"].sum())}
    counts = subject.counts(name) if subject.classes else []
    return figures | {"per_class": {label: int(count) for label, count in zip(subject.classes, counts, strict=True)}}


def balance(subject: Subject) -> dict[str, Any] | None:
    """How evenly the training images (or those of the only split) spread over the classes; None without classes.

    `effective` is the number of even classes that would be as hard to foretell: the exponential of the entropy.
    """
    if not subject.classes:
        return None
    first = "train" if "train" in subject.splits else next(iter(subject.splits))
    counts = subject.counts(first)
    shares = counts[counts > 0] / max(counts.sum(), 1)
    return {
        "split": first,
        "largest": int(counts.max()),
        "smallest": int(counts.min()),
        "effective": float(np.exp(-(shares * np.log(shares)).sum())),
        "few": {subject.classes[i]: int(counts[i]) for i in np.flatnonzero(counts < FEW)},
        "missing": {
            name: [subject.classes[i] for i in np.flatnonzero(own == 0)]
            for name in subject.splits
            if name != first and ((own := subject.counts(name)) == 0).any()
        },
    }


def sizes(records: np.ndarray, image_size: int | None) -> dict[str, Any] | None:
    """Widths, heights and proportions, and how they stand to the side of the model's input; None without images.

    `histogram` counts short sides.
    """
    if not len(records) or image_size is None:
        return None
    width, height = records["width"].astype(np.float64), records["height"].astype(np.float64)
    short = np.minimum(width, height)
    edges = 2.0 ** np.arange(3, 13)
    return {
        "input": image_size,
        "width": span(width),
        "height": span(height),
        "proportion": span(width / height),
        "smaller": float((short < image_size).mean()),
        "twice": float((short >= 2 * image_size).mean()),
        "one_size": len(np.unique(width * 2**32 + height)) == 1,
        "histogram": {
            "edges": [int(e) for e in edges],
            "images": np.bincount(np.searchsorted(edges, short, "right"), minlength=11).tolist(),
        },
    }


def span(values: np.ndarray) -> dict[str, float]:
    """The least, the middle and the greatest."""
    return {"min": float(values.min()), "median": float(np.median(values)), "max": float(values.max())}


def colour(records: np.ndarray) -> dict[str, list[float]] | None:
    """Mean and standard deviation of red, green and blue, 0 to 1, over all pixels, every image weighing the same."""
    if not len(records):
        return None
    mean, std = records["mean"].astype(np.float64) / 255, records["std"].astype(np.float64) / 255
    over = np.sqrt(((std**2 + mean**2).mean(0) - mean.mean(0) ** 2).clip(0))
    return {"mean": mean.mean(0).round(6).tolist(), "std": over.round(6).tolist()}


def counted(places: np.ndarray, words: tuple[str, ...]) -> dict[str, int]:
    """How often each word is meant."""
    counts = np.bincount(places, minlength=len(words))
    return {words[i]: int(counts[i]) for i in np.flatnonzero(counts)}


def copies(subject: Subject, groups: Groups) -> dict[str, Any]:
    """Groups of images that are alike: how many, how many images too many, how many in two splits, how many under two
    labels.

    `across` counts, for each pair of splits, the images of the second that are in the first. The groups listed are the
    first LISTED of those across splits, then of those with two labels, then of the others.
    """
    across: dict[str, int] = {}
    contrary = 0
    ranked: list[tuple[bool, bool, int]] = []
    names = list(subject.splits)
    for number, group in enumerate(groups):
        places = [subject.place(int(row)) for row in group]
        homes = [name for name in names if any(split == name for split, _ in places)]
        for at, other in enumerate(homes):
            for one in homes[:at]:
                across[f"{one}/{other}"] = across.get(f"{one}/{other}", 0) + sum(split == other for split, _ in places)
        labels = {subject.class_of(*spot) for spot in places}
        contrary += len(labels) > 1
        ranked.append((len(homes) < 2, len(labels) < 2, number))
    listed = [[subject.place(int(row)) for row in groups[number]] for _, _, number in sorted(ranked)[:LISTED]]
    return {
        "groups": len(groups),
        "extra": sum(map(len, groups)) - len(groups),
        "across": across,
        "contrary": contrary,
        "listed": [[named(subject, *spot) for spot in spots] for spots in listed],
    }


def named(subject: Subject, split: str, sample: int) -> dict[str, Any]:
    """An image by its split, its number there, its name and its class."""
    return {
        "split": split,
        "number": sample,
        "path": subject.splits[split].name(sample),
        "class": subject.class_of(split, sample),
    }


def by_reason(unreadable: list[dict[str, str]]) -> list[tuple[str, list[dict[str, str]]]]:
    """Unreadable images by reason, the most frequent first; reasons that differ in numbers alone are one, with N for
    those numbers."""
    rows_of: dict[str, list[dict[str, str]]] = {}
    for row in unreadable:
        rows_of.setdefault(_NUMBER.sub("N", row["reason"]), []).append(row)
    named = [(common([row["reason"] for row in rows]), rows) for rows in rows_of.values()]
    return sorted(named, key=lambda pair: (-len(pair[1]), pair[0]))


def common(reasons: list[str]) -> str:
    """One reason for those that differ in numbers alone."""
    parts = zip(*(_NUMBER.split(reason) for reason in sorted(set(reasons))), strict=True)
    numbers = zip(*(_NUMBER.findall(reason) for reason in sorted(set(reasons))), strict=True)
    shared = [words[0] if len(set(words)) == 1 else "N" for words in numbers]
    return "".join(f"{part[0]}{number}" for part, number in zip(parts, [*shared, ""], strict=True))
