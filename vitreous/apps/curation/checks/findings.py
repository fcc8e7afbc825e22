"""Findings for training: sentences, each with a command that fixes the problem."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from vitreous.errors import format_first_names

COPIES_HINT = "see --out REPORT.html or --json; keep one of each"
MAX_LISTED_NAMES = 20  # names in a sentence
SMALL_IMAGE_RATIO = (
    0.75  # fraction of the model's input below which a smaller input pays off; 28 of 32 pixels is rounding
)
SAME_FRAME_RATE_RATIO = 1.05  # ratio of two frame rates up to which they count as equal
IMBALANCE_RATIO = 10.0  # minimum reported ratio of the largest class to the smallest
FAIL_LEVEL, WARN_LEVEL, INFO_LEVEL = "error", "warning", "info"

Finding = dict[str, str]
FindingRow = tuple[str, str, str, str]  # level, identifier, sentence, hint


def derive_findings(facts: dict[str, Any]) -> list[Finding]:
    """Derive findings: failures first, then warnings, then information on the loader.

    The check fails for problems that stop training or falsify its metrics: an unknown layout, unreadable images, the
    same image in two splits or with two labels, groups in two splits.
    """
    source = shlex.quote(facts["data"])
    rows = [*report_failures(facts, source), *report_annotations(facts["annotations"]), *report_copies(facts, source)]
    rows += [
        *report_class_balance(facts, source),
        *report_target_values(facts, source),
        *report_clips(facts),
        *report_image_properties(facts, source),
    ]
    rows = [row for level in (FAIL_LEVEL, WARN_LEVEL, INFO_LEVEL) for row in rows if row[0] == level]
    return [dict(zip(("level", "code", "message", "hint"), row, strict=True)) for row in rows]


def format_image_count(count: int, kind: str = "images") -> str:
    """Format a number of images, or of clips: `1 image`, `1,234 clips`."""
    return f"{count:,} {singular_noun(kind)}" + ("" if count == 1 else "s")


def singular_noun(kind: str) -> str:
    """Return the noun of one sample: `clip`, `volume`, `signal` or `image`."""
    return kind.removesuffix("s")


def format_dedup_command(source: str, split: str) -> str:
    """Format the command that lists duplicates between a split and the others."""
    return f"vitreous data dedup {source} --against {source} --against-split {split} --out copies.csv"


def report_failures(facts: dict[str, Any], source: str) -> Iterator[FindingRow]:
    """Yield problems that impair training."""
    for level, kind in ((FAIL_LEVEL, "layout_error"), (FAIL_LEVEL, "target_error"), (WARN_LEVEL, "label_error")):
        if error := facts[kind]:
            yield level, kind, error["message"], error["hint"]
    kind = facts["sample_type"]
    if bad := len(facts["unreadable"]):
        total = sum(split["images"] for split in facts["splits"].values())
        hint = f"fix or delete these files, or `vitreous train {source} --bad-images skip`"
        text = (
            f"{bad:,} of {format_image_count(total, kind)} cannot be read; the first: {facts['unreadable'][0]['path']}"
        )
        yield FAIL_LEVEL, "unreadable", text, hint
    if empty := facts["without_valid_pixels"]:
        text = f"{format_image_count(len(empty), kind)} without valid pixels; the first: {empty[0]['path']}"
        yield WARN_LEVEL, "without_valid_pixels", text, "training skips them"
    for pair, count in facts["exact_duplicates"]["across_splits"].items():
        one, other = pair.split("/")
        text = (
            f"{format_image_count(count, kind)} of {other} are in {one} too, byte for "
            f"byte{format_cross_split_pair(facts['exact_duplicates'], one, other)}"
        )
        yield (
            FAIL_LEVEL,
            "leak",
            text,
            COPIES_HINT if kind == "clips" else f"`{format_dedup_command(source, other)}` lists them",
        )
    if count := facts["exact_duplicates"]["conflicting_labels"]:
        place = format_label_conflict(facts["exact_duplicates"])
        if facts["annotations"] or facts["targets"]:
            differ = "values" if facts["targets"] else "classes"
            yield (
                FAIL_LEVEL,
                "conflicting_labels",
                f"{format_image_count(count, kind)} found with different {differ}{place}",
                "keep one of them",
            )
        else:
            hint = f"keep one of them, or one {singular_noun(kind)} with both labels in a table"
            yield (
                FAIL_LEVEL,
                "conflicting_labels",
                f"{format_image_count(count, kind)} found under two labels{place}",
                hint,
            )
    for row in facts["groups"]["across_splits"]:
        where = " and in ".join(row["splits"]) or "more than one split"
        names = f" ({', '.join(row['names'][:5])}{', …' if len(row['names']) > 5 else ''})" if row["names"] else ""
        level = FAIL_LEVEL if facts["groups"]["group_by"] else WARN_LEVEL
        yield level, "groups", f"{row['groups']:,} groups are in {where}{names}", "move each group to one split"


def report_annotations(facts: dict[str, Any] | None) -> Iterator[FindingRow]:
    """Yield problems and statistics of annotations."""
    if facts is None:
        return
    if bad := facts["unreadable"]:
        text = (
            f"the annotations of {format_image_count(len(bad))} cannot be read; the "
            f"first: {bad[0]['path']}: {bad[0]['reason']}"
        )
        yield FAIL_LEVEL, "annotations", text, "fix or delete them"
    for kind, text, hint in (
        ("duplicates", "duplicated: two boxes of one class that are nearly identical", "remove one of each pair"),
        ("out_of_bounds", "exceeding their image", "they are clipped; check that the image is the right one"),
    ):
        if rows := facts[kind]:
            count = f"{len(rows):,} object" + ("" if len(rows) == 1 else "s")
            yield WARN_LEVEL, kind, f"{count} {text}; the first in {rows[0]['path']}", hint
    if facts["unused_classes"]:
        yield (
            WARN_LEVEL,
            "unused_classes",
            f"no annotations for the classes {format_first_names(facts['unused_classes'], MAX_LISTED_NAMES)}",
            "remove these classes",
        )
    if facts["classes_missing_in_train"]:
        names = format_first_names(facts["classes_missing_in_train"], MAX_LISTED_NAMES)
        text = f"no training images for the classes {names}"
        yield WARN_LEVEL, "classes_missing_in_train", text, "these classes cannot be learned: move images to train"
    if total := sum(facts["objects"].values()):
        sizes = ", ".join(f"{count:,} {kind}" for kind, count in facts["object_sizes"].items() if count)
        text = f"{total:,} objects: {sizes} (below 32 x 32, below 96 x 96 pixels, larger)"
        text += f"; {facts['crowd_regions']:,} are crowd regions" if facts["crowd_regions"] else ""
        yield INFO_LEVEL, "objects", text, ""
    if facts["without_objects"]:
        yield INFO_LEVEL, "without_objects", f"{format_image_count(facts['without_objects'])} without an object", ""
    if total := sum(facts["pixels"].values()):
        rows = sorted(facts["pixels"].items(), key=lambda row: -row[1])
        shares = ", ".join(f"{name} {count / total:.2%}" for name, count in rows[:MAX_LISTED_NAMES] if count)
        unknown = facts["ignored_pixels"] / (total + facts["ignored_pixels"])
        text = f"pixels by class: {shares}" + (f"; {unknown:.2%} without a class" if unknown else "")
        yield INFO_LEVEL, "pixels", text, ""


def report_copies(facts: dict[str, Any], source: str) -> Iterator[FindingRow]:
    """Yield duplicates that do not fail the check: near-duplicates, and those within a split."""
    near, kind = facts["near_duplicates"], facts["sample_type"]
    for pair, count in near["across_splits"].items():
        one, other = pair.split("/")
        hint = f"list them, with duplicates of image regions: `{format_dedup_command(source, other)}`"
        hint = f"compare them; {COPIES_HINT}" if kind == "clips" else hint
        verb = "is a near-duplicate" if count == 1 else "are near-duplicates"
        text = (
            f"{format_image_count(count, kind)} of {other} {verb} of {one} "
            f"{singular_noun(kind)}s{format_cross_split_pair(near, one, other)}"
        )
        yield WARN_LEVEL, "near_leak", text, hint
    if count := near["conflicting_labels"]:
        differ = "different classes" if facts["annotations"] else "two labels"
        differ = "values more than a standard deviation apart" if facts["targets"] else differ
        text = f"{count:,} groups of near-duplicate {singular_noun(kind)}s have {differ}{format_label_conflict(near)}"
        yield WARN_LEVEL, "near_duplicate_conflicts", text, "check their labels"
    within = {"exact copies": facts["exact_duplicates"]["surplus"], "near-duplicates": near["surplus"]}
    if any(within.values()):
        command = f"vitreous data dedup {source} --within --out copies.csv"
        text = " and ".join(f"{count:,} {name}" for name, count in within.items() if count)
        text += f" of other {singular_noun(kind)}s"
        listed = (facts["exact_duplicates"]["listed_groups"] or near["listed_groups"])[:1]
        text += "".join(format_first_pair(group) for group in listed)
        if kind == "clips":
            yield INFO_LEVEL, "duplicates", text, "remove them, or keep them in one split with --group-by"
            return
        yield INFO_LEVEL, "duplicates", text, f"list them: `{command}`; keep frames of a scene together with --group-by"


def format_first_pair(group: Sequence[dict[str, Any]]) -> str:
    """Format the first two images of a group of duplicates for the end of a sentence."""
    return f"; the first: {group[0]['path']} and {group[1]['path']}"


def format_cross_split_pair(copies: dict[str, Any], one: str, other: str) -> str:
    """Format the first pair of duplicates in two splits; an empty string if none is listed."""
    for group in copies["listed_groups"]:
        rows = [next((row for row in group if row["split"] == split), None) for split in (one, other)]
        if rows[0] and rows[1]:
            return format_first_pair([rows[0], rows[1]])
    return ""


def format_label_conflict(copies: dict[str, Any]) -> str:
    """Format the first pair of duplicates with different classes; an empty string if none is listed."""
    for group in copies["listed_groups"]:
        if other := next((row for row in group if row["class"] != group[0]["class"]), None):
            return format_first_pair([group[0], other])
    return ""


def report_class_balance(facts: dict[str, Any], source: str) -> Iterator[FindingRow]:
    """Yield findings on class balance."""
    spread = facts["class_balance"]
    if spread is None:
        return
    if spread["max_images"] >= IMBALANCE_RATIO * max(spread["min_images"], 1):
        text = (
            f"imbalanced: the largest class has {format_image_count(spread['max_images'], facts['sample_type'])}, "
            f"the smallest {spread['min_images']:,}; "
            f"effective number of classes {spread['effective_classes']:.1f} of {len(facts['classes'])}"
        )
        hint = f"`vitreous train {source} --sampling balanced`, or --class-weights balanced"
        if facts["annotations"]:
            hint = f"`vitreous train {source} --sampling repeat-factor`"
        yield WARN_LEVEL, "imbalance", text, hint
    if few := spread["small_classes"]:
        text = (
            f"{len(few):,} classes have fewer than {format_image_count(10, facts['sample_type'])}: "
            f"{format_first_names(few, MAX_LISTED_NAMES)}"
        )
        yield WARN_LEVEL, "small_classes", text, "add more, or merge classes"
    for name, missing in spread["missing_classes"].items():
        text = (
            f"{name} has no {singular_noun(facts['sample_type'])}s of {len(missing):,} classes: "
            f"{format_first_names(missing, MAX_LISTED_NAMES)}"
        )
        yield WARN_LEVEL, "missing_classes", text, "their metrics are undefined"


def report_target_values(facts: dict[str, Any], source: str) -> Iterator[FindingRow]:
    """Yield findings on the values of each target."""
    for row in facts["targets"]:
        name, own = row["target"], row["splits"][row["split"]]
        if not own["values"]:
            yield FAIL_LEVEL, "no_values", f"no image of {row['split']} has a value of {name}", "remove the target"
            continue
        if own["min"] == own["max"]:
            text = f"all values of {name} in {row['split']} are the same, {own['min']:g}"
            yield FAIL_LEVEL, "constant", text, "remove the target: it is constant"
        if outliers := row["outliers"]:
            low, high = row["fences"]
            first = f"{outliers[0]['value']:g} of {outliers[0]['path']}"
            text = f"{format_image_count(len(outliers))} with an outlier value of {name}, below {low:.4g} or above"
            text += f" {high:.4g}; the first: {first}"
            hint = f"check them; if they are correct, `vitreous train {source} --loss huber` is less sensitive to them"
            yield WARN_LEVEL, "outliers", text, hint
        if outside := row["out_of_range"]:
            text = (
                f"{format_image_count(len(outside))} with a value of {name} outside "
                f"the range of {row['split']}, {own['min']:g} to"
            )
            text += f" {own['max']:g}; the first: {outside[0]['value']:g} of {outside[0]['path']}"
            yield WARN_LEVEL, "out_of_range", text, "predictions are less reliable outside the training range"
        total, known = (sum(part[key] for part in row["splits"].values()) for key in ("images", "values"))
        if known < total:
            yield (
                INFO_LEVEL,
                "missing_values",
                f"{total - known:,} of {format_image_count(total)} have no value of {name}",
                "",
            )
        text = f"{name} in {row['split']}: {own['min']:g} to {own['max']:g}, median {own['median']:.4g}, mean"
        yield INFO_LEVEL, "values", f"{text} {own['mean']:.4g}, standard deviation {own['std']:.4g}", ""


def report_clips(facts: dict[str, Any]) -> Iterator[FindingRow]:
    """Yield findings on clips: short clips, still clips, or different frame rates."""
    if not (own := facts["clips"]):
        return
    if rows := own["without_motion"]:
        text = f"{format_image_count(len(rows), 'clips')} without motion; the first: {rows[0]['path']}"
        yield WARN_LEVEL, "without_motion", text, "check whether these are still images or failed recordings"
    if rows := own["short"]:
        text = (
            f"{format_image_count(len(rows), 'clips')} with fewer than the "
            f"{own['frames_read']} frames that a run reads by default"
        )
        text += f"; some frames are repeated; the first: {rows[0]['path']}"
        yield WARN_LEVEL, "short_clips", text, "`vitreous train` reads fewer with --frames"
    if (rate := own["frame_rate"]) and rate["max"] > SAME_FRAME_RATE_RATIO * rate["min"]:
        text = f"from {rate['min']:.3g} to {rate['max']:.3g} frames/s, median"
        text += f" {rate['median']:.3g}: with --stride, equal numbers of frames span different times"
        yield INFO_LEVEL, "frame_rates", text, "without --stride, frames are spread over the full clip"


def report_image_properties(facts: dict[str, Any], source: str) -> Iterator[FindingRow]:
    """Yield properties of the images, and how the loader handles them."""
    traits, size, left_out, kind = facts["traits"], facts["image_sizes"], facts["ignored_files"], facts["sample_type"]
    first = {name: f"; the first: {path}" for name, path in facts["examples"].items()}
    if count := traits["one_colour"]:
        text = f"{format_image_count(count, kind)} of one colour{first['one_colour']}"
        yield WARN_LEVEL, "one_colour", text, "check whether they are damaged or placeholders"
    if outside := left_out.get("images", 0):
        text = (
            f"{format_image_count(outside, kind)} in the folder belong to no split "
            f"or class and are ignored{first['ignored_images']}"
        )
        yield WARN_LEVEL, "ignored_images", text, "move them into a split or class folder"
    for trait, count, text in (
        (
            "wrong_extension",
            traits["wrong_extension"],
            "with the file name extension of another format; the content is used",
        ),
        ("exif_rotated", traits["exif_rotated"], "rotated by EXIF; they are loaded upright"),
        ("alpha", traits["alpha"], "with transparency; they are composited on white"),
        ("animated", traits["animated"], "with several frames; the first is used"),
        ("cmyk", facts["modes"].get("CMYK", 0), "in CMYK; they are converted to RGB"),
        (
            "sixteen_bit",
            0 if facts["channels"] else facts["bit_depths"].get("16", 0),
            "with 16 bits; they are scaled to 8 bits",
        ),
    ):
        if count:
            yield INFO_LEVEL, trait, f"{format_image_count(count, kind)} {text}{first[trait]}", ""
    others = {name: count for name, count in left_out.items() if name != "images"}
    if others:
        ends = format_first_names(others, MAX_LISTED_NAMES)
        text = f"{sum(others.values()):,} files without {singular_noun(kind)} file names are ignored: {ends}"
        text += first["ignored_files"]
        yield INFO_LEVEL, "ignored_files", text, ""
    if size is None:
        return
    median = min(size["width"]["median"], size["height"]["median"])
    side = size["model_input"]
    if size["fraction_smaller"] > 0.5 and median <= SMALL_IMAGE_RATIO * side:
        text = f"{size['fraction_smaller']:.0%} of the {singular_noun(kind)}s are smaller than the model input "
        text += f"({side} pixels) and are upscaled{first['small']}"
        yield INFO_LEVEL, "small", text, "a smaller --image-size is faster and loses no detail"
    if size["fraction_twice_as_large"] > 0.5:
        share = f"{size['fraction_twice_as_large']:.0%} of the {singular_noun(kind)}s"
        text = f"{share} are twice the model input ({side} pixels): most of the decoding is wasted{first['large']}"
        hint = f"`vitreous data pack {source} --out PACKED` once, then train on the pack"
        hint = "scale them down once" if kind == "clips" else hint
        if facts["annotations"]:
            hint = "packs do not store annotations: scale images and annotations together if decoding limits training"
        yield INFO_LEVEL, "large", text, "" if facts["layout_error"] else hint
