"""Collect the images of a run's page for experiment trackers."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

from PIL import Image, ImageOps

from vitreous.inference.image_grid import SAMPLES_FILE, arrange_image_grid
from vitreous.reports.pages.plots import draw_confusion_plot, figure_to_image
from vitreous.reports.pages.report import select_confusion_matrix
from vitreous.reports.pages.thumbnails import MIN_SMOOTH_SIDE, enlarge_pixels
from vitreous.tasks.report import Report
from vitreous.training.folder import RunFolder


def collect_run_images(folder: RunFolder, page: dict[str, Any], report: Report | None) -> dict[str, Image.Image]:
    """Return the images of a complete run by name, as far as the run has them.

    Names: `confusion`, `worst` and `unsure` (images with attention), `reconstructions`, `attention` (one column per
    head), `nearest`, `samples`. `page` is the return value of `write_report`.
    """
    learned, image_rows = page.get("learned") or {}, dict[str, list[list[str | None]]]()
    for name in ("reconstructions", "attention"):
        image_rows[name] = [row["images"] for row in (learned.get(name) or {}).get("rows", [])]
    nearest = (learned.get("neighbours") or {}).get("rows", [])
    image_rows["nearest"] = [[row["image"], *(card["image"] for card in row["neighbours"])] for row in nearest]
    cards = (page.get("evaluation") or {}).get("cards") or {}
    for name in ("worst", "unsure"):
        entries = cards.get(name, [])
        image_rows[name] = [
            [card[key] for card in entries] for key in ("image", "attention") if entries and entries[0][key]
        ]
    images = {name: make_uri_grid(entries) for name, entries in image_rows.items() if entries}
    cells = select_confusion_matrix(report, tuple(row["class"] for row in report.per_class)) if report else None
    if cells is not None:
        images["confusion"] = draw_confusion_plot(*cells, render=figure_to_image)
    if (path := folder.path / SAMPLES_FILE).is_file():
        with Image.open(path) as image:
            images["samples"] = image.convert("RGB")
    return images


def make_uri_grid(rows: Sequence[Sequence[str | None]]) -> Image.Image:
    """Arrange rows of data URIs as one image. Cells are as large as the largest image; None is skipped."""
    images = [[enlarge_pixels(decode_data_uri(uri), MIN_SMOOTH_SIDE) for uri in row if uri is not None] for row in rows]
    flat = [image for row in images for image in row]
    cell = max(image.width for image in flat), max(image.height for image in flat)
    columns, blank = max(map(len, images)), Image.new("RGB", cell, "white")
    fitted = [[ImageOps.pad(image, cell, color="white") for image in row] for row in images]
    return arrange_image_grid([image for row in fitted for image in [*row, *[blank] * (columns - len(row))]], columns)


def decode_data_uri(uri: str) -> Image.Image:
    """Decode the RGB image of a data URI."""
    return Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))).convert("RGB")
