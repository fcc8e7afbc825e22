"""The sections of a page for detection and segmentation: worst images, error counts, precision-recall curves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from vitreous.data.annotations.boxes_drawing import draw_label, draw_objects, round_box
from vitreous.data.annotations.drawing import create_class_colours, overlay_class_map, tile_middle_planes
from vitreous.data.annotations.shapes import mask_to_rle, rle_to_mask
from vitreous.data.annotations.target import IGNORE_INDEX, AnnotatedSplit, Target
from vitreous.data.rgb_images import to_rgb_image
from vitreous.errors import DataError
from vitreous.evaluation.coco import make_detection_function
from vitreous.evaluation.evaluator import Ragged
from vitreous.evaluation.matching import (
    DetectionError,
    MatchColumn,
    RegionColumn,
    get_true_mask_runs,
    match_image,
    select_counted_detections,
    select_region_columns,
)
from vitreous.evaluation.pixels import compute_segmentation_metrics, extract_confusion_matrices, make_logits_function
from vitreous.inference.engine import make_engine
from vitreous.reports.answers import SplitPredictions
from vitreous.reports.pages.formats import format_percent
from vitreous.reports.pages.plots import (
    INK,
    LINE_COLOURS,
    draw_confusion_plot,
    figure_to_svg_markup,
    strip_axes,
    use_page_style,
)
from vitreous.reports.pages.thumbnails import encode_data_uri, shrink_image
from vitreous.tasks.detections import Detections, detect_objects
from vitreous.tasks.metrics import BOX_PREFIX, DETECTION_ERRORS, OBJECT_SIZES
from vitreous.tasks.report import Report
from vitreous.tasks.tiles import predict_class_map, to_native_array

if TYPE_CHECKING:
    from matplotlib.axes import Axes


MAX_OBJECT_IMAGES = 6  # images
OBJECT_IMAGE_SIDE = 448  # maximum side in pixels of an image with boxes
MAX_NAMED_ERRORS = 8  # labelled errors per image: those of the highest scores
LABEL_HEIGHT = 18  # height of the label text on the image
MAX_CLASS_CURVES, MAX_OBJECT_MATRIX_CLASSES = 8, 30  # classes with a separate curve; classes of a confusion matrix

MAX_MAP_IMAGES = 6  # images


def build_object_section(answers: SplitPredictions, report: Report) -> dict[str, Any]:
    """Return the page's section on objects: images as data URIs, and plots."""
    details = report.details["objects"]
    kinds = (
        [("", ""), (BOX_PREFIX, "boxes")]
        if any(name.startswith(BOX_PREFIX) for name in details["errors"])
        else [("", "")]
    )
    return {
        "threshold": details["threshold"],
        "sizes": build_sizes_table(report),
        "scenes": find_worst_object_images(answers, details["threshold"], details["tiles"], bool(kinds[1:])),
        "panels": [
            *(
                {
                    "title": f"AP50 points lost, {title}" if title else "AP50 points lost",
                    "key": "tide",
                    "text": "",
                    "drawing": draw_error_bars(details["errors"], start, title),
                }
                for start, title in kinds
            ),
            {
                "title": "precision and recall, IoU 0.5",
                "key": "precision",
                "text": "",
                "drawing": draw_precision_curves(details["curves"], report),
            },
        ],
        "confusion": draw_object_confusion(details["confusion"], answers.bundle.task.classes),
    }


def build_sizes_table(report: Report) -> list[list[str]]:
    """Return header and rows of the table of AP and AR by object size, of masks and boxes if both exist."""
    starts = [("", "mask "), (BOX_PREFIX, "box ")] if f"{BOX_PREFIX}ap" in report.metrics else [("", "")]
    keys = [(start + name, f"{kind}{name.upper()}") for start, kind in starts for name in ("ap", "ar")]
    rows = [["objects", *(name for _, name in keys)]]
    for size in ("", *OBJECT_SIZES):
        cells = [f"{key}_{size}" if size else f"{key}100" if key.endswith("ar") else key for key, _ in keys]
        rows.append([size or "all", *(format_metric_with_interval(report, cell) for cell in cells)])
    return rows


def format_metric_with_interval(report: Report, name: str) -> str:
    """Format a metric with its interval, in per cent."""
    ends, value = report.ends.get(name), report.metrics[name]
    return format_percent(value, 1) + (f" ({100 * ends[0]:.1f} to {100 * ends[1]:.1f})" if ends else "")


def score_object_images(rows: Ragged, threshold: float) -> tuple[np.ndarray, np.ndarray]:
    """Compute F1 of each image at IoU 0.5 for predictions above a score, and its number of wrong predictions and
    objects: (n,) each; F1 is nan for an image with neither."""
    table, images, count = rows.table, rows.images, len(rows)
    truth, part = table[:, MatchColumn.TRUTH] == 1, select_region_columns(table, 0)
    counted = part[:, RegionColumn.IGNORED] % 2 == 0
    shown = ~truth & counted & (table[:, MatchColumn.SCORE] >= threshold)
    right = np.bincount(images[shown & (part[:, RegionColumn.MATCHED] % 2 == 1)], minlength=count)
    both = np.bincount(images[shown | (truth & counted)], minlength=count)
    return np.divide(2 * right, both, out=np.full(count, np.nan), where=both > 0), both - 2 * right


def find_worst_object_images(answers: SplitPredictions, threshold: float, tiles: bool, masks: bool) -> dict[str, Any]:
    """Return the images of the lowest F1, most errors first: ground truth and predictions above the `threshold`, drawn
    over the image, detected in `tiles` if set; and the classes with their colours."""
    classes, split = answers.bundle.task.classes, answers.split
    assert isinstance(split, AnnotatedSplit), "objects are evaluated on annotated data"
    f1, wrong = score_object_images(answers.raw, threshold)  # type: ignore[arg-type]
    order = [int(one) for one in np.lexsort((-wrong, f1)) if wrong[one] and int(one) not in answers.bad]
    engine, colours, rows = (
        make_engine(answers.bundle.model, answers.bundle.preprocess),
        create_class_colours(classes),
        [],
    )
    for sample in order[:MAX_OBJECT_IMAGES]:
        try:
            pixels = to_native_array(answers.bundle.preprocess.decode(split.raw(sample), split.name(sample)))
            truth = split.target(sample)
        except DataError:  # the file has disappeared since the evaluation
            continue
        image = to_rgb_image(torch.from_numpy(pixels))
        answer = detect_objects(make_detection_function(engine), pixels, answers.bundle.preprocess, tiles, threshold)
        answer = answer.take(select_counted_detections(answer, truth))
        pictures = draw_truth_and_prediction(image, answer, truth=truth, classes=classes, colours=colours, masks=masks)
        facts = {"name": split.name(sample), "f1": float(f1[sample]), "wrong": int(wrong[sample])}
        rows.append(
            facts | {"pictures": [encode_data_uri(shrink_image(picture, OBJECT_IMAGE_SIDE)) for picture in pictures]}
        )
    names = [
        {"name": name, "colour": "#{:02x}{:02x}{:02x}".format(*colour)}
        for name, colour in zip(classes, colours, strict=True)
    ]
    return {"rows": rows, "classes": names if len(names) <= MAX_OBJECT_MATRIX_CLASSES else []}


def draw_truth_and_prediction(
    image: Image.Image, answer: Detections, truth: Target, classes: tuple[str, ...], colours: np.ndarray, masks: bool
) -> tuple[Image.Image, Image.Image]:
    """Draw ground truth and predictions over an image, in the colours (K, 3) of the classes; missed and wrong ones are
    crossed out and labelled. A small image is enlarged."""
    table = match_image(answer, truth, masks)
    factor = max(1, OBJECT_IMAGE_SIDE // max(image.size))
    image = image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
    rows = select_region_columns(table, 0)
    answered = [int(code) for code in rows[: len(table) - len(truth), RegionColumn.ERROR]]
    alone = (rows[len(table) - len(truth) :, RegionColumn.MATCHED] == 0) & ~truth.crowd
    missed = ["missed" if one else "" for one in alone]
    wrong = [DETECTION_ERRORS[DetectionError(code).name.lower()] if code else "" for code in answered]
    shapes = (get_true_mask_runs(truth), answer.masks) if masks else (None, None)
    runs = [None if part is None else [scale_mask_runs(one, answer.size, factor) for one in part] for part in shapes]
    return (
        draw_marked_objects(image, truth.boxes * factor, colours[truth.labels], runs[0], missed),
        draw_marked_objects(image, answer.boxes * factor, colours[answer.labels], runs[1], wrong),
    )


def scale_mask_runs(runs: list[int], size: tuple[int, int], factor: int) -> list[int]:
    """Scale the run lengths of a mask of an image (H, W) to an image `factor` times as large."""
    if factor == 1:
        return runs
    return mask_to_rle(rle_to_mask(runs, size).repeat(factor, 0).repeat(factor, 1))


def draw_marked_objects(
    image: Image.Image, boxes: np.ndarray, colours: np.ndarray, masks: Any, errors: list[str]
) -> Image.Image:
    """Draw objects with boxes (n, 4) and colours (n, 3); errors are crossed out, and the first of them are labelled."""
    shades = [(int(r), int(g), int(b)) for r, g, b in colours]
    picture = draw_objects(image, boxes, shades, [""] * len(boxes), masks)
    pen, width = ImageDraw.Draw(picture), max(1, round(min(image.size) / 250))
    marked = [(round_box(boxes[row]), shades[row], error) for row, error in enumerate(errors) if error]
    for (left, top, right, bottom), colour, _ in marked:
        for line in ((left, top, right, bottom), (left, bottom, right, top)):
            pen.line(line, fill=(0, 0, 0), width=width + 2)
            pen.line(line, fill=colour, width=width)
    font = ImageFont.load_default(LABEL_HEIGHT * max(image.size) / OBJECT_IMAGE_SIDE)
    for box, colour, error in reversed(marked[:MAX_NAMED_ERRORS]):
        draw_label(pen, picture.size, box=box, text=error, colour=colour, font=font)
    return picture


def draw_error_bars(errors: dict[str, float], start: str, title: str) -> Any:
    """Draw the AP50 points lost to each error type."""
    from matplotlib.figure import Figure

    values = [100 * errors[start + name] for name in DETECTION_ERRORS]
    with use_page_style():
        figure = Figure(figsize=(4.6, 2.6))
        figure.subplots_adjust(left=0.32, right=0.9, bottom=0.17, top=0.9)
        axes: Axes = figure.subplots()
        places = np.arange(len(values))[::-1]
        axes.barh(places, values, color=LINE_COLOURS[1], alpha=0.7, height=0.65)
        axes.set_yticks(places, list(DETECTION_ERRORS.values()))
        spare = max(1.0, *values) * 0.02
        for place, value in zip(places, values, strict=True):
            axes.text(max(value, 0) + spare, place, f"{value:.1f}", va="center", fontsize=8)
        axes.set_xlim(min(0.0, *values), max(1.0, *values) * 1.12)
        axes.set_xlabel("AP50 points lost")
        axes.tick_params(axis="y", length=0)
        strip_axes(axes)
        return figure_to_svg_markup(figure, f"AP50 points lost by error type {title}".strip())


def draw_precision_curves(curves: dict[str, Any], report: Report) -> Any:
    """Draw precision against recall at IoU 0.5: the mean over classes, and the classes with most objects."""
    from matplotlib.figure import Figure

    objects = {row["class"]: row["objects"] for row in report.per_class}
    named = sorted(curves["classes"], key=lambda name: -objects[name])[:MAX_CLASS_CURVES]
    with use_page_style():
        figure = Figure(figsize=(4.6, 3.4))
        figure.subplots_adjust(left=0.13, right=0.98, bottom=0.14, top=0.91)
        axes: Axes = figure.subplots()
        for number, name in enumerate(named):
            axes.plot(curves["recall"], curves["classes"][name], color=LINE_COLOURS[number], linewidth=1.2, label=name)
        if len(curves["classes"]) > 1:
            axes.plot(curves["recall"], curves["mean"], color=INK, linewidth=2, label="mean over classes")
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1.02)
        axes.set_xlabel("recall")
        axes.set_ylabel("precision")
        strip_axes(axes)
        if named:
            legend = axes.legend(frameon=False, fontsize=8, loc="best")
            for text in legend.get_texts():
                text.set_parse_math(False)  # a class name may contain $x$
        return figure_to_svg_markup(figure, "precision and recall")


def draw_object_confusion(matrix: list[list[int]] | None, classes: tuple[str, ...]) -> Any:
    """Draw the confusion matrix; the last row and column are `nothing`. If there are many classes, the most confused
    are shown."""
    if matrix is None:
        return None
    counts = np.array(matrix)
    wrong = counts.sum(0) + counts.sum(1) - 2 * np.diag(counts)
    chosen = np.sort(np.argsort(-wrong[:-1], kind="stable")[:MAX_OBJECT_MATRIX_CLASSES])
    names = [*(classes[place] for place in chosen), "nothing"]
    rows = np.append(chosen, len(classes))
    return draw_confusion_plot(counts[np.ix_(rows, rows)], names)


def find_worst_map_images(answers: SplitPredictions) -> dict[str, Any]:
    """Return the images of the lowest mIoU, each with its mIoU and three images as data URIs: the image, and the true
    and predicted class map over it (middle planes of volumes); and the classes with their colours."""
    classes, split = answers.bundle.task.classes, answers.split
    assert isinstance(split, AnnotatedSplit), "class maps are evaluated on annotated data"
    metrics = [
        compute_segmentation_metrics(matrix)["miou"] for matrix in extract_confusion_matrices(answers.raw, len(classes))
    ]
    order = sorted(
        (sample for sample in range(len(split)) if metrics[sample] is not None and sample not in answers.bad),
        key=lambda sample: metrics[sample] or 0.0,
    )
    engine, colours, rows = (
        make_engine(answers.bundle.model, answers.bundle.preprocess),
        create_class_colours(classes),
        [],
    )
    for sample in order[:MAX_MAP_IMAGES]:
        try:
            pixels = to_native_array(answers.bundle.preprocess.decode(split.raw(sample), split.name(sample)))
            truth = split.target(sample).class_map()
        except DataError:  # the file has disappeared since the evaluation
            continue
        answer = predict_class_map(make_logits_function(engine), pixels, answers.bundle.preprocess.image)
        if answer.ndim == 3:
            pixels = tile_middle_planes(pixels, pixels.min())
            truth, answer = (tile_middle_planes(classes, IGNORE_INDEX) for classes in (truth, answer))
        image = to_rgb_image(torch.from_numpy(pixels))
        pictures = [image, overlay_class_map(image, truth, colours), overlay_class_map(image, answer, colours)]
        uris = [encode_data_uri(shrink_image(picture)) for picture in pictures]
        rows.append({"name": split.name(sample), "miou": metrics[sample], "pictures": uris})
    names = [
        {"name": name, "colour": "#{:02x}{:02x}{:02x}".format(*colour)}
        for name, colour in zip(classes, colours, strict=True)
    ]
    return {"rows": rows, "classes": names}
