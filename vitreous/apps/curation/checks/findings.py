"""Findings of `data check`: each has a level, a sentence, and a hint, such as the command that fixes the problem."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from vitreous.apps.curation.checks.pairs import report_repeated_captions
from vitreous.data.decoding.video import MISSING_PYAV
from vitreous.errors import format_first_names, install_hint

COPIES_HINT = "see --out REPORT.html or --json; keep one of each"
MAX_LISTED_NAMES = 20  # maximum names in a sentence
SMALL_IMAGE_RATIO = (
    0.75  # ratio of image to model input up to which a smaller input is suggested; 28 / 32 is only rounding
)
SAME_FRAME_RATE_RATIO = 1.05  # frame rates with at most this ratio count as equal
IMBALANCE_RATIO = 10.0  # reported ratio of the largest class to the smallest, at least
FAIL_LEVEL, WARN_LEVEL, INFO_LEVEL = "error", "warning", "info"

Finding = dict[str, str]
FindingRow = tuple[str, str, str, str]  # level, code, message, hint


def derive_findings(document: dict[str, Any]) -> list[Finding]:
    """Derive the findings from the document of a check: errors first, then warnings, then information on the loader.

    Errors are problems that stop training or falsify its metrics: an unknown layout, unreadable images, duplicates
    across splits or with conflicting labels, and groups across splits.
    """
    source = shlex.quote(document["data"])
    finding_rows = [
        *report_failures(document, source),
        *report_annotations(document["annotations"]),
        *report_copies(document, source),
    ]
    finding_rows += [
        *report_class_balance(document, source),
        *report_repeated_captions(document),
        *report_target_values(document, source),
        *report_clips(document),
        *report_image_properties(document, source),
    ]
    finding_rows = [
        finding_row
        for level in (FAIL_LEVEL, WARN_LEVEL, INFO_LEVEL)
        for finding_row in finding_rows
        if finding_row[0] == level
    ]
    return [dict(zip(("level", "code", "message", "hint"), finding_row, strict=True)) for finding_row in finding_rows]


def format_image_count(count: int, noun: str = "images") -> str:
    """Format a number of images, or of clips: `1 image`, `1,234 clips`."""
    return f"{count:,} {singular_noun(noun)}" + ("" if count == 1 else "s")


def singular_noun(noun: str) -> str:
    """Return the noun for one sample: `clip`, `volume`, `signal` or `image`."""
    return noun.removesuffix("s")


def format_dedup_command(source: str, split: str) -> str:
    """Format the command that lists duplicates between `split` and the other splits of `source`."""
    return f"vitreous data dedup {source} --against {source} --against-split {split} --out copies.csv"


def report_failures(document: dict[str, Any], source: str) -> Iterator[FindingRow]:
    """Yield problems that stop training or falsify its metrics, such as unreadable images and leaks between splits."""
    for level, code in ((FAIL_LEVEL, "layout_error"), (FAIL_LEVEL, "target_error"), (WARN_LEVEL, "label_error")):
        if error := document[code]:
            yield level, code, error["message"], error["hint"]
    noun = document["sample_type"]
    if num_unreadable := len(document["unreadable"]):
        total = sum(split["images"] for split in document["splits"].values())
        hint = f"fix or delete these files, or `vitreous train {source} --bad-images skip`"
        if any(MISSING_PYAV in image["reason"] for image in document["unreadable"]):
            hint = install_hint("video")
        text = (
            f"{num_unreadable:,} of {format_image_count(total, noun)} cannot be read; "
            f"the first: {document['unreadable'][0]['path']}"
        )
        yield FAIL_LEVEL, "unreadable", text, hint
    if empty_images := document["without_valid_pixels"]:
        text = (
            f"{format_image_count(len(empty_images), noun)} without valid pixels; the first: {empty_images[0]['path']}"
        )
        yield WARN_LEVEL, "without_valid_pixels", text, "training skips them"
    for pair, count in document["exact_duplicates"]["across_splits"].items():
        first_split, second_split = pair.split("/")
        example = format_cross_split_pair(document["exact_duplicates"], first_split, second_split)
        verb = "is an exact duplicate" if count == 1 else "are exact duplicates"
        text = (
            f"{format_image_count(count, noun)} of {second_split} {verb} of "
            f"{first_split} {singular_noun(noun)}s{example}"
        )
        yield (
            FAIL_LEVEL,
            "leak",
            text,
            COPIES_HINT if noun == "clips" else f"`{format_dedup_command(source, second_split)}` lists them",
        )
    if count := document["exact_duplicates"]["conflicting_labels"]:
        conflict = format_label_conflict(document["exact_duplicates"])
        if document["annotations"] or document["targets"]:
            label_noun = "values" if document["targets"] else "classes"
            yield (
                FAIL_LEVEL,
                "conflicting_labels",
                f"{format_image_count(count, noun)} found with different {label_noun}{conflict}",
                "keep one of them",
            )
        else:
            hint = f"keep one of them, or one {singular_noun(noun)} with both labels in a table"
            message = f"{format_image_count(count, noun)} found under two labels{conflict}"
            yield FAIL_LEVEL, "conflicting_labels", message, hint
    for group_leak in document["groups"]["across_splits"]:
        split_names = " and ".join(group_leak["splits"]) or "more than one split"
        names = (
            f" ({', '.join(group_leak['names'][:5])}{', …' if len(group_leak['names']) > 5 else ''})"
            if group_leak["names"]
            else ""
        )
        level = FAIL_LEVEL if document["groups"]["group_by"] else WARN_LEVEL
        yield (
            level,
            "groups",
            f"{group_leak['groups']:,} groups are in {split_names}{names}",
            "move each group to one split",
        )


def report_annotations(annotations: dict[str, Any] | None) -> Iterator[FindingRow]:
    """Yield problems and statistics of the `annotations` of the document; nothing for data without annotations."""
    if annotations is None:
        return
    if unreadable := annotations["unreadable"]:
        text = (
            f"the annotations of {format_image_count(len(unreadable))} cannot be read; the "
            f"first: {unreadable[0]['path']}: {unreadable[0]['reason']}"
        )
        yield FAIL_LEVEL, "annotations", text, "fix or delete these annotations"
    for key, text, hint in (
        ("duplicates", "duplicated: two boxes of one class that are nearly identical", "remove one of each pair"),
        (
            "out_of_bounds",
            "partly or fully outside the image",
            "they are clipped; check that the image is the right one",
        ),
    ):
        if entries := annotations[key]:
            count = f"{len(entries):,} object" + ("" if len(entries) == 1 else "s")
            yield WARN_LEVEL, key, f"{count} {text}; the first in {entries[0]['path']}", hint
    if annotations["unused_classes"]:
        yield (
            WARN_LEVEL,
            "unused_classes",
            f"no annotations for the classes {format_first_names(annotations['unused_classes'], MAX_LISTED_NAMES)}",
            "remove these classes",
        )
    if annotations["classes_missing_in_train"]:
        names = format_first_names(annotations["classes_missing_in_train"], MAX_LISTED_NAMES)
        text = f"no training images for the classes {names}"
        yield WARN_LEVEL, "classes_missing_in_train", text, "these classes cannot be learned: move images to train"
    if total := sum(annotations["objects"].values()):
        sizes = ", ".join(f"{count:,} {key}" for key, count in annotations["object_sizes"].items() if count)
        text = f"{total:,} objects: {sizes} (below 32 x 32, below 96 x 96 pixels, larger)"
        text += f"; {annotations['crowd_regions']:,} are crowd regions" if annotations["crowd_regions"] else ""
        yield INFO_LEVEL, "objects", text, ""
    if annotations["without_objects"]:
        yield (
            INFO_LEVEL,
            "without_objects",
            f"{format_image_count(annotations['without_objects'])} without an object",
            "",
        )
    if total := sum(annotations["pixels"].values()):
        entries = sorted(annotations["pixels"].items(), key=lambda entry: -entry[1])
        shares = ", ".join(f"{name} {count / total:.2%}" for name, count in entries[:MAX_LISTED_NAMES] if count)
        unknown = annotations["ignored_pixels"] / (total + annotations["ignored_pixels"])
        text = f"pixels by class: {shares}" + (f"; {unknown:.2%} without a class" if unknown else "")
        yield INFO_LEVEL, "pixels", text, ""


def report_copies(document: dict[str, Any], source: str) -> Iterator[FindingRow]:
    """Yield findings on duplicates that do not fail the check: near-duplicates, and duplicates within a split."""
    near_copies, noun = document["near_duplicates"], document["sample_type"]
    for pair, count in near_copies["across_splits"].items():
        first_split, second_split = pair.split("/")
        hint = f"list them, including cropped duplicates: `{format_dedup_command(source, second_split)}`"
        hint = f"compare them; {COPIES_HINT}" if noun == "clips" else hint
        verb = "is a near-duplicate" if count == 1 else "are near-duplicates"
        text = (
            f"{format_image_count(count, noun)} of {second_split} {verb} of {first_split} "
            f"{singular_noun(noun)}s{format_cross_split_pair(near_copies, first_split, second_split)}"
        )
        yield WARN_LEVEL, "near_leak", text, hint
    if count := near_copies["conflicting_labels"]:
        conflict_text = "different classes" if document["annotations"] else "two labels"
        conflict_text = "values more than a standard deviation apart" if document["targets"] else conflict_text
        text = (
            f"{count:,} groups of near-duplicate {singular_noun(noun)}s have "
            f"{conflict_text}{format_label_conflict(near_copies)}"
        )
        yield WARN_LEVEL, "near_duplicate_conflicts", text, "check their labels"
    surplus_counts = {
        "exact duplicate": document["exact_duplicates"]["surplus"],
        "near-duplicate": near_copies["surplus"],
    }
    if any(surplus_counts.values()):
        command = f"vitreous data dedup {source} --within --out copies.csv"
        text = " and ".join(f"{count:,} {name}{'s' * (count != 1)}" for name, count in surplus_counts.items() if count)
        text += f" of other {singular_noun(noun)}s"
        first_groups = (document["exact_duplicates"]["listed_groups"] or near_copies["listed_groups"])[:1]
        text += "".join(format_first_pair(group) for group in first_groups)
        if noun == "clips":
            yield INFO_LEVEL, "duplicates", text, "remove them, or keep them in one split with --group-by"
            return
        yield INFO_LEVEL, "duplicates", text, f"list them: `{command}`; keep frames of a scene together with --group-by"


def format_first_pair(group: Sequence[dict[str, Any]]) -> str:
    """Format the names of the first two images of a group of duplicates as the end of a sentence."""
    return f"; the first: {group[0]['path']} and {group[1]['path']}"


def format_cross_split_pair(copies: dict[str, Any], first_split: str, second_split: str) -> str:
    """Format the names of the first listed duplicates in these two splits as the end of a sentence; an empty string if
    none is listed."""
    for group in copies["listed_groups"]:
        pair = [
            next((image for image in group if image["split"] == split), None) for split in (first_split, second_split)
        ]
        if pair[0] and pair[1]:
            return format_first_pair([pair[0], pair[1]])
    return ""


def format_label_conflict(copies: dict[str, Any]) -> str:
    """Format the names of the first listed duplicates with different classes as the end of a sentence; an empty string
    if none is listed."""
    for group in copies["listed_groups"]:
        if conflicting := next((image for image in group if image["class"] != group[0]["class"]), None):
            return format_first_pair([group[0], conflicting])
    return ""


def report_class_balance(document: dict[str, Any], source: str) -> Iterator[FindingRow]:
    """Yield findings on class balance: imbalance, small classes, and classes without images in a split."""
    balance = document["class_balance"]
    if balance is None:
        return
    if balance["max_images"] >= IMBALANCE_RATIO * max(balance["min_images"], 1):
        text = (
            f"imbalanced: the largest class has {format_image_count(balance['max_images'], document['sample_type'])}, "
            f"the smallest {balance['min_images']:,}; "
            f"effective number of classes {balance['effective_classes']:.1f} of {len(document['classes'])}"
        )
        hint = f"`vitreous train {source} --sampling balanced`, or --class-weights balanced"
        if document["annotations"]:
            hint = f"`vitreous train {source} --sampling repeat-factor`"
        yield WARN_LEVEL, "imbalance", text, hint
    if few := balance["small_classes"]:
        text = (
            f"{len(few):,} classes have fewer than {format_image_count(10, document['sample_type'])}: "
            f"{format_first_names(few, MAX_LISTED_NAMES)}"
        )
        yield WARN_LEVEL, "small_classes", text, "add more, or merge classes"
    for name, missing in balance["missing_classes"].items():
        text = (
            f"{name} has no {singular_noun(document['sample_type'])}s of {len(missing):,} classes: "
            f"{format_first_names(missing, MAX_LISTED_NAMES)}"
        )
        yield WARN_LEVEL, "missing_classes", text, "their metrics are undefined"


def report_target_values(document: dict[str, Any], source: str) -> Iterator[FindingRow]:
    """Yield findings on the values of each numeric target: missing, constant, outlying, or outside the training
    range."""
    for target in document["targets"]:
        name, split_summary = target["target"], target["splits"][target["split"]]
        if not split_summary["values"]:
            yield FAIL_LEVEL, "no_values", f"no image of {target['split']} has a value of {name}", "remove the target"
            continue
        if split_summary["min"] == split_summary["max"]:
            text = f"all values of {name} in {target['split']} are the same, {split_summary['min']:g}"
            yield FAIL_LEVEL, "constant", text, "remove the target: it is constant"
        if outliers := target["outliers"]:
            low, high = target["fences"]
            first_outlier = f"{outliers[0]['value']:g} of {outliers[0]['path']}"
            text = f"{format_image_count(len(outliers))} with an outlier value of {name}, below {low:.4g} or above"
            text += f" {high:.4g}; the first: {first_outlier}"
            hint = f"check them; if they are correct, `vitreous train {source} --loss huber` is less sensitive to them"
            yield WARN_LEVEL, "outliers", text, hint
        if out_of_range := target["out_of_range"]:
            text = (
                f"{format_image_count(len(out_of_range))} with a value of {name} outside "
                f"the range of {target['split']}, {split_summary['min']:g} to"
            )
            text += f" {split_summary['max']:g}; the first: {out_of_range[0]['value']:g} of {out_of_range[0]['path']}"
            yield WARN_LEVEL, "out_of_range", text, "predictions are less reliable outside the training range"
        total, num_values = (sum(summary[key] for summary in target["splits"].values()) for key in ("images", "values"))
        if num_values < total:
            yield (
                INFO_LEVEL,
                "missing_values",
                f"{total - num_values:,} of {format_image_count(total)} have no value of {name}",
                "",
            )
        text = (
            f"{name} in {target['split']}: {split_summary['min']:g} to {split_summary['max']:g}, "
            f"median {split_summary['median']:.4g}, mean"
        )
        yield (
            INFO_LEVEL,
            "values",
            f"{text} {split_summary['mean']:.4g}, standard deviation {split_summary['std']:.4g}",
            "",
        )


def report_clips(document: dict[str, Any]) -> Iterator[FindingRow]:
    """Yield findings on clips: without motion, short, or with different frame rates."""
    if not (clips := document["clips"]):
        return
    if entries := clips["without_motion"]:
        text = f"{format_image_count(len(entries), 'clips')} without motion; the first: {entries[0]['path']}"
        yield WARN_LEVEL, "without_motion", text, "check whether these are stills or failed recordings"
    if entries := clips["short"]:
        text = (
            f"{format_image_count(len(entries), 'clips')} with fewer than the "
            f"{clips['frames_read']} frames that a run reads by default"
        )
        text += f"; some frames are repeated; the first: {entries[0]['path']}"
        yield WARN_LEVEL, "short_clips", text, "read fewer frames: `vitreous train --frames N`"
    if (frame_rate := clips["frame_rate"]) and frame_rate["max"] > SAME_FRAME_RATE_RATIO * frame_rate["min"]:
        text = f"from {frame_rate['min']:.3g} to {frame_rate['max']:.3g} frames/s, median"
        text += f" {frame_rate['median']:.3g}: with --stride, equal numbers of frames span different times"
        yield INFO_LEVEL, "frame_rates", text, "without --stride, frames are spread over the full clip"


def report_image_properties(document: dict[str, Any], source: str) -> Iterator[FindingRow]:
    """Yield properties of the images and files, and how the loader handles them."""
    traits, size, ignored_counts, noun = (
        document["traits"],
        document["image_sizes"],
        document["ignored_files"],
        document["sample_type"],
    )
    first_examples = {name: f"; the first: {path}" for name, path in document["examples"].items()}
    if count := traits["one_colour"]:
        text = f"{format_image_count(count, noun)} of one colour{first_examples['one_colour']}"
        yield WARN_LEVEL, "one_colour", text, "check whether they are damaged or placeholders"
    if num_outside := ignored_counts.get("images", 0):
        text = (
            f"{format_image_count(num_outside, noun)} in the folder belong to no split "
            f"or class and are ignored{first_examples['ignored_images']}"
        )
        yield WARN_LEVEL, "ignored_images", text, "move them into a split or class folder"
    for trait, count, text in (
        (
            "wrong_extension",
            traits["wrong_extension"],
            "with the wrong file extension; the format is detected from the content",
        ),
        ("exif_rotated", traits["exif_rotated"], "rotated by EXIF; they are loaded upright"),
        ("alpha", traits["alpha"], "with transparency; they are composited on white"),
        ("animated", traits["animated"], "with several frames; only the first is used"),
        ("cmyk", document["modes"].get("CMYK", 0), "in CMYK; they are converted to RGB"),
        (
            "sixteen_bit",
            0 if document["channels"] else document["bit_depths"].get("16", 0),
            "with 16 bits per channel; they are converted to 8 bits",
        ),
    ):
        if count:
            yield INFO_LEVEL, trait, f"{format_image_count(count, noun)} {text}{first_examples[trait]}", ""
    ignored_files = {name: count for name, count in ignored_counts.items() if name != "images"}
    if ignored_files:
        suffixes = format_first_names(ignored_files, MAX_LISTED_NAMES)
        text = (
            f"{sum(ignored_files.values()):,} files without {singular_noun(noun)} "
            f"file extensions are ignored: {suffixes}"
        )
        text += first_examples["ignored_files"]
        yield INFO_LEVEL, "ignored_files", text, ""
    if size is None:
        return
    median = min(size["width"]["median"], size["height"]["median"])
    input_size = size["model_input"]
    if size["fraction_smaller"] > 0.5 and median <= SMALL_IMAGE_RATIO * input_size:
        text = f"{size['fraction_smaller']:.0%} of the {singular_noun(noun)}s are smaller than the model input "
        text += f"({input_size} pixels) and are upscaled{first_examples['small']}"
        yield INFO_LEVEL, "small", text, "a smaller --image-size is faster and loses no detail"
    if size["fraction_twice_as_large"] > 0.5:
        share = f"{size['fraction_twice_as_large']:.0%} of the {singular_noun(noun)}s"
        text = (
            f"{share} are at least twice as large as the model input ({input_size} pixels), which wastes decoding time"
        )
        text += first_examples["large"]
        hint = f"`vitreous data pack {source} --out PACKED` once, then train on the pack"
        hint = "downscale them once" if noun == "clips" else hint
        if document["annotations"]:
            hint = (
                "packs do not store annotations: if decoding limits training, downscale images and annotations together"
            )
        yield INFO_LEVEL, "large", text, "" if document["layout_error"] else hint
