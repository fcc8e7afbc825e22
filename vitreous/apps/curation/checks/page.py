"""The HTML report of `data check`: one self-contained page with a light and a dark theme."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Sequence
from importlib.resources import files
from itertools import pairwise
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from vitreous.apps.curation.checks.facts import group_by_reason
from vitreous.apps.curation.checks.findings import FAIL_LEVEL, INFO_LEVEL, MAX_LISTED_NAMES, WARN_LEVEL, singular_noun
from vitreous.apps.curation.checks.record import read_middle_slice
from vitreous.apps.curation.checks.subject import CheckedDataset
from vitreous.data.annotations.target import get_sample_axes, get_sample_noun
from vitreous.data.curve import draw_signal_curve
from vitreous.data.decoding.clip import Clip
from vitreous.data.decoding.volumes import read_volume, read_volume_form
from vitreous.data.layouts.video import open_sample
from vitreous.data.split import Split, decode_sample
from vitreous.errors import DataError, escape_unprintable

MAX_SHOWN_GROUPS, MAX_GROUP_IMAGES = 24, 4  # maximum groups of duplicates on the page, and images per group
THUMBNAIL_SIZE = 112  # maximum height and width of a thumbnail in pixels
MAX_BARS = 40  # maximum classes in the bar chart
LEVEL_LABELS = {FAIL_LEVEL: "Error", WARN_LEVEL: "Warning", INFO_LEVEL: "Note"}


def render_check_page(document: dict[str, Any], subject: CheckedDataset) -> str:
    """Render the document of a check as an HTML page, with thumbnails of duplicates and of suspicious objects or
    clips."""
    from jinja2 import Environment

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"printable": escape_unprintable, "code": format_inline_code}
    sizes, balance = document["image_sizes"], document["class_balance"]
    histogram = sizes["histogram"] if sizes else {"edges": [], "images": []}
    edges = histogram["edges"]
    ranges = [f"{low} to {high - 1}" for low, high in pairwise(edges)]
    ranges = [f"below {edges[0]}", *ranges, f"{edges[-1]} or more"] if edges else []
    counts = document["splits"][balance["split"]]["per_class"] if balance else {}
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    template = environment.from_string(files("vitreous.apps.curation.checks").joinpath("page.html").read_text("utf-8"))
    return template.render(
        **document,
        name=escape_unprintable(subject.name),
        unit=singular_noun(document["sample_type"]),
        reasons=group_by_reason(document["unreadable"])[:MAX_LISTED_NAMES],
        max_listed=MAX_LISTED_NAMES,
        level_labels=LEVEL_LABELS,
        size_bars=make_bar_rows(ranges, histogram["images"]),
        class_bars=make_bar_rows(
            [escape_unprintable(label) for label, _ in ordered[:MAX_BARS]], [count for _, count in ordered[:MAX_BARS]]
        ),
        num_hidden_classes=max(len(ordered) - MAX_BARS, 0),
        copy_groups=make_copy_thumbnails(document, subject),
        problems=make_problem_thumbnails(document, subject),
    )


def format_inline_code(text: str) -> Any:
    """Convert text to HTML markup: text in backticks becomes `code` elements."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def make_bar_rows(names: Sequence[str], counts: Sequence[int]) -> list[dict[str, Any]]:
    """Make the rows of a bar chart: name, count, and length of the bar in percent of the longest."""
    max_count = max(counts, default=0) or 1
    bars = zip(names, counts, strict=True)
    return [{"name": name, "count": count, "length": round(100 * count / max_count, 2)} for name, count in bars]


def make_copy_thumbnails(document: dict[str, Any], subject: CheckedDataset) -> list[dict[str, Any]]:
    """Make thumbnails of the first groups of duplicates. Groups across splits come first, then groups with two labels;
    exact duplicates come before near-duplicates."""
    groups = [("exact duplicates", group) for group in document["exact_duplicates"]["listed_groups"][:MAX_SHOWN_GROUPS]]
    groups += [("near-duplicates", group) for group in document["near_duplicates"]["listed_groups"][:MAX_SHOWN_GROUPS]]
    groups.sort(key=lambda pair: [len({entry[key] for entry in pair[1]}) < 2 for key in ("split", "class")])  # stable
    return [
        {
            "title": relation,
            "more": max(len(group) - MAX_GROUP_IMAGES, 0),
            "images": [
                {**entry, "thumbnail": encode_thumbnail_url(subject, entry["split"], entry["index"])}
                for entry in select_group_images(group)
            ],
        }
        for relation, group in groups[:MAX_SHOWN_GROUPS]
    ]


def make_problem_thumbnails(document: dict[str, Any], subject: CheckedDataset) -> list[dict[str, Any]]:
    """Make thumbnails of the first objects outside their image or duplicated, with their boxes, and of the first
    suspicious clips (middle frame). The thumbnail is empty if the image cannot be read any more."""
    texts = {"duplicates": "duplicate", "out_of_bounds": "outside the image", "one_colour": "single colour"}
    texts |= {"without_motion": "no motion", "short": "short"}
    locations_by_problem = (document["annotations"] or {}) | (document["clips"] or {})
    located_problems = [
        (problem, location)
        for problem in texts
        for location in locations_by_problem.get(problem, ())[: MAX_SHOWN_GROUPS // 2]
    ]
    return [
        {
            **location,
            "title": texts[problem],
            "thumbnail": encode_thumbnail_url(subject, location["split"], location["index"], location.get("box", ())),
        }
        for problem, location in located_problems
    ]


def select_group_images(group: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Select up to `MAX_GROUP_IMAGES` images of a group of duplicates, including the first of each split and label."""
    split_labels = [(entry["split"], entry["class"]) for entry in group]
    order = sorted(range(len(group)), key=lambda i: (split_labels.index(split_labels[i]) != i, i))
    return [group[i] for i in sorted(order[:MAX_GROUP_IMAGES])]


def render_middle_image(split: Split, sample: int) -> Image.Image:
    """Render the middle slice of a volume, the middle frame of a clip, or the curve of a signal. Raises DataError if
    the sample cannot be read."""
    if get_sample_noun(split) == "clips" and isinstance(clip := open_sample(split, sample), Clip):
        return Image.fromarray(clip.read_frames(np.array([len(clip) // 2]))[0])
    raw = split.raw(sample)
    if get_sample_axes(split) == 1:
        return draw_signal_curve(read_volume(raw, read_volume_form(raw, axes=1)[0], axes=1)[0])
    return read_middle_slice(raw, read_volume_form(raw)[0])


def encode_thumbnail_url(subject: CheckedDataset, split: str, sample: int, box: Sequence[float] = ()) -> str:
    """Encode a thumbnail of a sample as a data URL, with the `box` (left, top, right, bottom) in pixels drawn on it, if
    not empty. Return an empty string if the image cannot be read any more."""
    try:
        image_split = subject.splits[split]
        image = (
            decode_sample(image_split, sample, 3)
            if get_sample_axes(image_split) == 2
            else render_middle_image(image_split, sample)
        )
    except DataError:
        return ""
    if box:
        image = image.convert("RGB")
        left, top, right, bottom = box
        corners = max(left, 0), max(top, 0), min(right, image.width), min(bottom, image.height)
        if corners[0] < corners[2] and corners[1] < corners[3]:
            line = max(2, round(2 * max(image.size) / THUMBNAIL_SIZE))
            ImageDraw.Draw(image).rectangle(corners, outline=(255, 64, 64), width=line)
    image.thumbnail((THUMBNAIL_SIZE, THUMBNAIL_SIZE), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    image.save(file, "JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
