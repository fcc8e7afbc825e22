"""Statistics over the records of a dataset: counts, sizes, colours, file formats, and duplicates.

Records are numpy arrays of dtype `RECORD` (`checks.record`), with one record per image.
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import combinations
from typing import Any

import numpy as np

from vitreous.apps.curation.checks.annotated import summarise_annotations
from vitreous.apps.curation.checks.record import FILE_FORMATS, IMAGE_MODES, ImageTrait
from vitreous.apps.curation.checks.subject import CheckedDataset, count_unused_files
from vitreous.apps.curation.checks.values import summarise_targets
from vitreous.apps.curation.copies.alike import CopyGroups, group_exact_copies
from vitreous.apps.curation.copies.scan import READABLE, ReadErrors
from vitreous.data.annotations.target import get_sample_noun
from vitreous.data.decoding.spectral import NO_DATA_REASON
from vitreous.errors import DataError

_NUMBER = re.compile(r"\d[\d,]*")
MIN_CLASS_IMAGES = 10  # classes with fewer images are listed in the document
VALUE_TOLERANCE = 1.0  # standard deviations by which numeric labels of near-duplicates may differ
MAX_LISTED_GROUPS = 10_000  # maximum listed groups of duplicates


def summarise_dataset(
    subject: CheckedDataset,
    records: np.ndarray,
    reasons: ReadErrors,
    near_copies: CopyGroups,
    image_size: int | None,
    groups: dict[str, Any],
) -> dict[str, Any]:
    """Summarise a dataset for the document of `data check`, from (n,) records of dtype `RECORD`, one split after the
    other.

    `reasons` has the read error of each unreadable sample, `near_copies` the groups of near-duplicates, `image_size`
    the model's input size in pixels (0 for volumes and signals, None if unknown). `groups` becomes the document's key
    of that name. Statistics of pixels and files cover only the readable images.
    """
    readable = records[records["state"] == READABLE]
    records_by_split = np.split(records, subject.pool.ends[:-1])
    unused, unused_examples = count_unused_files(subject)
    unreadable = [
        {**locate_image(subject, sample), "reason": reason}
        for sample, reason in sorted(reasons.items())
        if reason != NO_DATA_REASON
    ]
    unreadable_counts = Counter(sample["split"] for sample in unreadable)
    misnamed = np.flatnonzero(records["traits"] & ImageTrait.WRONG_EXTENSION).tolist()
    return {
        "data": subject.source,
        "sample_type": get_sample_noun(subject.pool.splits[0]),
        "layout_error": error_to_dict(subject.open_error),
        "label_error": error_to_dict(subject.unlabelled),
        "target_error": error_to_dict(subject.unlearnable),
        "classes": list(subject.classes),
        "notes": subject.notes,
        "splits": {
            name: summarise_split(subject, name, split_records, unreadable_counts[name])
            for name, split_records in zip(subject.splits, records_by_split, strict=True)
        },
        "annotations": summarise_annotations(subject),
        "pairs": subject.pairs,
        "class_balance": measure_class_balance(subject),
        "ignored_files": unused,
        "unreadable": unreadable,
        "without_valid_pixels": [
            locate_image(subject, sample) for sample, reason in sorted(reasons.items()) if reason == NO_DATA_REASON
        ],
        "wrong_extension": [
            {**locate_image(subject, sample), "format": FILE_FORMATS[records["format"][sample]]} for sample in misnamed
        ],
        "image_sizes": summarise_image_sizes(readable, image_size),
        "colour": measure_colour_statistics(readable),
        "formats": count_categories(readable["format"], FILE_FORMATS),
        "modes": count_categories(readable["mode"], IMAGE_MODES),
        "bit_depths": {str(bits): int((readable["depth"] == bits).sum()) for bits in np.unique(readable["depth"])},
        "traits": {trait.name.lower(): int((readable["traits"] & trait > 0).sum()) for trait in ImageTrait},
        "targets": summarise_targets(subject),
        "exact_duplicates": summarise_copies(subject, group_exact_copies(records)),
        "near_duplicates": summarise_copies(subject, near_copies, tolerance=VALUE_TOLERANCE),
        "examples": find_first_examples(subject, records, image_size) | unused_examples,
        "groups": groups,
    }


def find_first_examples(subject: CheckedDataset, records: np.ndarray, image_size: int | None) -> dict[str, str]:
    """Return the name of the first readable image for each finding on traits, mode, depth or size, from (n,) records of
    dtype `RECORD`."""
    short_sides = np.minimum(records["width"], records["height"]).astype(np.int64)
    masks = {trait.name.lower(): records["traits"] & trait > 0 for trait in ImageTrait}
    masks |= {"cmyk": records["mode"] == IMAGE_MODES.index("CMYK"), "sixteen_bit": records["depth"] == 16}
    if image_size:
        masks |= {"small": short_sides < image_size, "large": short_sides >= 2 * image_size}
    indices_by_finding = {
        finding: np.flatnonzero(mask & (records["state"] == READABLE)) for finding, mask in masks.items()
    }
    return {
        finding: subject.pool.name(int(positions[0]))
        for finding, positions in indices_by_finding.items()
        if len(positions)
    }


def locate_image(subject: CheckedDataset, pool_index: int) -> dict[str, str]:
    """Return the split and the name of an image, given its index in the pool of all images."""
    return {"split": subject.locate_sample(pool_index)[0], "path": subject.pool.name(pool_index)}


def error_to_dict(error: DataError | None) -> dict[str, str] | None:
    """Convert an error to a dict with its `message` and `hint`; None stays None."""
    return {"message": error.message, "hint": error.hint} if error else None


def summarise_split(subject: CheckedDataset, name: str, records: np.ndarray, num_unreadable: int) -> dict[str, Any]:
    """Return the number of images, of bytes, and of images per class of the split `name`. `records` (n,) of dtype
    `RECORD` are those of the split, of which `num_unreadable` are unreadable."""
    counts = subject.count_classes(name) if subject.classes else []
    return {
        "images": len(records),
        "unreadable": num_unreadable,
        "bytes": int(records["bytes"].sum()),
        "per_class": {label: int(count) for label, count in zip(subject.classes, counts, strict=True)},
    }


def measure_class_balance(subject: CheckedDataset) -> dict[str, Any] | None:
    """Measure the class balance of the training images (or of the first split, if there is no `train`); None without
    classes.

    `effective_classes` is the exponential of the entropy: the number of equally large classes with the same entropy.
    """
    if not subject.classes:
        return None
    reference_split = "train" if "train" in subject.splits else next(iter(subject.splits))
    counts = subject.count_classes(reference_split)
    shares = counts[counts > 0] / max(counts.sum(), 1)
    return {
        "split": reference_split,
        "max_images": int(counts.max()),
        "min_images": int(counts.min()),
        "effective_classes": float(np.exp(-(shares * np.log(shares)).sum())),
        "small_classes": {subject.classes[i]: int(counts[i]) for i in np.flatnonzero(counts < MIN_CLASS_IMAGES)},
        "missing_classes": {
            name: [subject.classes[i] for i in np.flatnonzero(split_counts == 0)]
            for name in subject.splits
            if name != reference_split and ((split_counts := subject.count_classes(name)) == 0).any()
        },
    }


def summarise_image_sizes(records: np.ndarray, image_size: int | None) -> dict[str, Any] | None:
    """Summarise widths, heights and aspect ratios of (n,) records of dtype `RECORD`, also relative to the model's input
    size. None for n = 0 or an unknown input size.

    `histogram` counts the shorter sides. Volumes also have `slices`; their `image_size` is 0, so values relative to the
    input size are 0.
    """
    if not len(records) or image_size is None:
        return None
    width, height = records["width"].astype(np.float64), records["height"].astype(np.float64)
    short_sides = np.minimum(width, height)
    edges = 2.0 ** np.arange(3, 13)
    return {
        "model_input": image_size,
        **({"slices": summarise_range(records["slices"].astype(np.float64))} if records["slices"].any() else {}),
        "width": summarise_range(width),
        "height": summarise_range(height),
        "aspect_ratio": summarise_range(width / height),
        "fraction_smaller": float((short_sides < image_size).mean()),
        "fraction_twice_as_large": float((short_sides >= 2 * image_size).mean()) if image_size else 0.0,
        "all_equal": len(np.unique(width * 2**32 + height)) == 1,
        "histogram": {
            "edges": [int(edge) for edge in edges],
            "images": np.bincount(np.searchsorted(edges, short_sides, "right"), minlength=11).tolist(),
        },
    }


def summarise_range(values: np.ndarray) -> dict[str, float]:
    """Return the minimum, median and maximum of (n,) values."""
    return {"min": float(values.min()), "median": float(np.median(values)), "max": float(values.max())}


def measure_colour_statistics(records: np.ndarray) -> dict[str, list[float]] | None:
    """Return the mean and standard deviation of red, green and blue over (n,) records of dtype `RECORD`, 0 to 1. Every
    image has the same weight."""
    if not len(records):
        return None
    mean, std = records["mean"].astype(np.float64) / 255, records["std"].astype(np.float64) / 255
    total_std = np.sqrt(((std**2 + mean**2).mean(0) - mean.mean(0) ** 2).clip(0))
    return {"mean": mean.mean(0).round(6).tolist(), "std": total_std.round(6).tolist()}


def count_categories(indices: np.ndarray, names: tuple[str, ...]) -> dict[str, int]:
    """Count how often each of `names` occurs in (n,) indices into it; names that do not occur are omitted."""
    counts = np.bincount(indices, minlength=len(names))
    return {names[i]: int(counts[i]) for i in np.flatnonzero(counts)}


def summarise_copies(subject: CheckedDataset, groups: CopyGroups, tolerance: float = 0.0) -> dict[str, Any]:
    """Summarise groups of duplicates: the numbers of groups, of surplus images (all but one per group), of images in
    several splits, and of groups with conflicting labels.

    Numeric labels conflict if they are more than `tolerance` standard deviations apart. `across_splits` counts, for
    each pair of splits, the images of the second split that are also in the first. `listed_groups` are at most
    `MAX_LISTED_GROUPS`: first groups in several splits, then groups with conflicting labels, then others.
    """
    across_splits: Counter[str] = Counter()
    ranked_groups: list[tuple[bool, bool, int]] = []
    for group_index, group in enumerate(groups):
        locations = [subject.locate_sample(int(pool_index)) for pool_index in group]
        split_counts = Counter(split for split, _ in locations)  # in the order of the splits
        across_splits.update(
            {
                f"{first_split}/{second_split}": split_counts[second_split]
                for first_split, second_split in combinations(split_counts, 2)
            }
        )
        ranked_groups.append((len(split_counts) < 2, not subject.labels_differ(locations, tolerance), group_index))
    return {
        "groups": len(groups),
        "surplus": sum(map(len, groups)) - len(groups),
        "across_splits": dict(across_splits),
        "conflicting_labels": sum(not has_one_label for _, has_one_label, _ in ranked_groups),
        "listed_groups": [
            [describe_sample_entry(subject, int(pool_index)) for pool_index in groups[group_index]]
            for *_, group_index in sorted(ranked_groups)[:MAX_LISTED_GROUPS]
        ],
    }


def describe_sample_entry(subject: CheckedDataset, pool_index: int) -> dict[str, Any]:
    """Return the entry of an image in the document: split, index in the split, name and class."""
    split, sample = subject.locate_sample(pool_index)
    path = subject.pool.name(pool_index)
    return {"split": split, "index": sample, "path": path, "class": subject.describe_label(split, sample)}


def group_by_reason(unreadable: list[dict[str, str]]) -> list[tuple[str, list[dict[str, str]]]]:
    """Group the entries of unreadable images by reason, the most frequent reason first. Reasons that differ only in
    numbers are one group."""
    entries_by_reason: dict[str, list[dict[str, str]]] = {}
    for entry in unreadable:
        entries_by_reason.setdefault(_NUMBER.sub("N", entry["reason"]), []).append(entry)
    groups = [
        (merge_reasons([entry["reason"] for entry in entries]), entries) for entries in entries_by_reason.values()
    ]
    return sorted(groups, key=lambda pair: (-len(pair[1]), pair[0]))


def merge_reasons(reasons: list[str]) -> str:
    """Merge reasons that differ only in numbers into one: a number that differs becomes N."""
    text_columns = zip(*(_NUMBER.split(reason) for reason in sorted(set(reasons))), strict=True)
    number_columns = zip(*(_NUMBER.findall(reason) for reason in sorted(set(reasons))), strict=True)
    shared = [variants[0] if len(set(variants)) == 1 else "N" for variants in number_columns]
    return "".join(f"{texts[0]}{number}" for texts, number in zip(text_columns, [*shared, ""], strict=True))
