"""The HTML report of a check: one self-contained page, light and dark."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from vitreous.apps.curation.checks.facts import by_reason
from vitreous.apps.curation.checks.findings import SHOWN
from vitreous.apps.curation.checks.record import middle_plane
from vitreous.apps.curation.checks.subject import Subject
from vitreous.data.annotations.target import axes_of, kind_of
from vitreous.data.curve import draw_curve
from vitreous.data.decoding.clip import Clip
from vitreous.data.decoding.volumes import read_volume, volume_form
from vitreous.data.layouts.video import open_sample
from vitreous.data.split import Split, picture_of
from vitreous.errors import DataError, printable

PAIRS, TOGETHER = 24, 4  # groups of copies that are shown, and images of each
SIDE = 112  # pixels of a shown image
BARS = 40  # classes in the bar chart


def page(document: dict[str, Any], subject: Subject) -> str:
    """Render the document of a check as HTML, with images of copies: in two splits or under two labels first."""
    from jinja2 import Environment

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["shown"] = printable
    sides, spread = document["sizes"], document["balance"]
    histogram = sides["histogram"] if sides else {"edges": [], "images": []}
    edges = histogram["edges"]
    ranges = [f"below {edges[0]}", *(f"{edge}" for edge in edges)] if edges else []
    counts = document["splits"][spread["split"]]["per_class"] if spread else {}
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    template = environment.from_string(files("vitreous.apps.curation.checks").joinpath("page.html").read_text("utf-8"))
    return template.render(
        **{key: value for key, value in document.items() if key != "copies"},
        name=printable(subject.name),
        unit="clip" if document["clips"] else "image",
        reasons=by_reason(document["unreadable"])[:SHOWN],
        most=SHOWN,
        sides=bars(ranges, histogram["images"]),
        per_class=bars([printable(label) for label, _ in ordered[:BARS]], [count for _, count in ordered[:BARS]]),
        hidden=max(len(ordered) - BARS, 0),
        copies=document["copies"],
        shown=pictures(document, subject),
        marked=marked_pictures(document, subject),
    )


def bars(names: Sequence[str], counts: Sequence[int]) -> list[dict[str, Any]]:
    """Rows of a bar chart: the name, the count, and the length of its bar, 0 to 100."""
    most = max(counts, default=0) or 1
    rows = zip(names, counts, strict=True)
    return [{"name": name, "count": count, "length": round(100 * count / most, 2)} for name, count in rows]


def pictures(document: dict[str, Any], subject: Subject) -> list[dict[str, Any]]:
    """The first PAIRS groups of copies: across splits before under two labels, equal before near ones."""
    groups = [("equal", group) for group in document["copies"]["listed"][:PAIRS]]
    groups += [("alike", group) for group in document["near_copies"]["listed"][:PAIRS]]
    groups.sort(key=lambda pair: [len({row[key] for row in pair[1]}) < 2 for key in ("split", "class")])  # stable
    return [
        {
            "what": relation,
            "more": max(len(group) - TOGETHER, 0),
            "images": [{**row, "picture": thumbnail(subject, row["split"], row["number"])} for row in two_sides(group)],
        }
        for relation, group in groups[:PAIRS]
    ]


def marked_pictures(document: dict[str, Any], subject: Subject) -> list[dict[str, Any]]:
    """The first objects that reach over the edge or are there twice, each as a picture with its box, and the first
    clips to look at, each as its middle frame; without a picture where it cannot be read any more."""
    texts = {"twice": "there twice", "outside": "over the edge", "one_colour": "of one colour"}
    texts |= {"frozen": "nothing changes", "short": "short"}
    places = (document["annotations"] or {}) | (document["clips"] or {})
    rows = [(kind, place) for kind in texts for place in places.get(kind, ())[: PAIRS // 2]]
    return [
        {
            **place,
            "what": texts[kind],
            "picture": thumbnail(subject, place["split"], place["number"], place.get("box", ())),
        }
        for kind, place in rows
    ]


def two_sides(group: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Choose TOGETHER images of a group, the first of each split and label among them."""
    kinds = [(row["split"], row["class"]) for row in group]
    order = sorted(range(len(group)), key=lambda i: (kinds.index(kinds[i]) != i, i))
    return [group[i] for i in sorted(order[:TOGETHER])]


def middle_picture(split: Split, sample: int) -> Image.Image:
    """The middle slice of a volume, the middle frame of a clip, or the curve of a signal. Raises DataError."""
    if kind_of(split) == "clips" and isinstance(clip := open_sample(split, sample), Clip):
        return Image.fromarray(clip.read(np.array([len(clip) // 2]))[0])
    raw = split.raw(sample)
    if axes_of(split) == 1:
        return draw_curve(read_volume(raw, volume_form(raw, axes=1)[0], axes=1)[0])
    return middle_plane(raw, volume_form(raw)[0])


def thumbnail(subject: Subject, split: str, sample: int, box: Sequence[float] = ()) -> str:
    """Encode a thumbnail as a data URL, with a `box` of pixels if there is one; an empty string where the image cannot
    be read any more."""
    try:
        own = subject.splits[split]
        picture = picture_of(own, sample, 3) if axes_of(own) == 2 else middle_picture(own, sample)
    except DataError:
        return ""
    if box:
        picture = picture.convert("RGB")
        left, top, right, bottom = box
        corners = max(left, 0), max(top, 0), min(right, picture.width), min(bottom, picture.height)
        if corners[0] < corners[2] and corners[1] < corners[3]:
            line = max(2, round(2 * max(picture.size) / SIDE))
            ImageDraw.Draw(picture).rectangle(corners, outline=(255, 64, 64), width=line)
    picture.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
