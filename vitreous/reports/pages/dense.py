"""The page sections of detection and segmentation: lowest-scoring images, error types, precision-recall curves."""

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
from vitreous.reports.pages.hover import HoverPoint, HoverSeries, HoverValues
from vitreous.reports.pages.plots import (
    INK,
    LINE_COLOURS,
    draw_confusion_plot,
    figure_to_svg_markup,
    style_axes,
    use_page_style,
)
from vitreous.reports.pages.thumbnails import encode_data_uri, shrink_image
from vitreous.tasks.detections import Detections, detect_objects
from vitreous.tasks.metrics import BOX_PREFIX, DETECTION_ERRORS, OBJECT_SIZES
from vitreous.tasks.report import Report
from vitreous.tasks.tiles import predict_class_map, to_native_array

if TYPE_CHECKING:
    from matplotlib.axes import Axes


MAX_OBJECT_IMAGES = 6  # images of the lowest F1 that are shown
OBJECT_IMAGE_SIDE = 448  # maximum side in pixels of an image with boxes
MAX_NAMED_ERRORS = 8  # labelled errors per image: those of the highest scores
LABEL_HEIGHT = 18  # font size of labels in pixels, at `OBJECT_IMAGE_SIDE`
MAX_CLASS_CURVES, MAX_OBJECT_MATRIX_CLASSES = 8, 30  # classes with a separate curve; classes of a confusion matrix

MAX_MAP_IMAGES = 6  # images of the lowest mIoU that are shown


def build_object_section(predictions: SplitPredictions, report: Report) -> dict[str, Any]:
    """Return the page section of detection: lowest-F1 images, metrics by object size, error plots, confusion matrix."""
    details = report.details["objects"]
    region_kinds = (
        [("", ""), (BOX_PREFIX, "boxes")]
        if any(name.startswith(BOX_PREFIX) for name in details["errors"])
        else [("", "")]
    )
    return {
        "threshold": details["threshold"],
        "sizes": build_sizes_table(report),
        "scenes": find_worst_object_images(predictions, details["threshold"], details["tiles"], bool(region_kinds[1:])),
        "panels": [
            *(
                {
                    "title": f"AP50 points lost ({title})" if title else "AP50 points lost",
                    "key": "tide",
                    "text": "",
                    "drawing": draw_error_bars(details["errors"], metric_prefix, title),
                }
                for metric_prefix, title in region_kinds
            ),
            {
                "title": "Precision-recall curve (IoU 0.5)",
                "key": "precision",
                "text": "",
                "drawing": draw_precision_curves(details["curves"], report),
            },
        ],
        "confusion": draw_object_confusion(details["confusion"], predictions.bundle.task.classes),
    }


def build_sizes_table(report: Report) -> list[list[str]]:
    """Return header and rows of the table of AP and AR by object size; with columns for masks and for boxes if both are
    evaluated."""
    prefixes = [("", "mask "), (BOX_PREFIX, "box ")] if f"{BOX_PREFIX}ap" in report.metrics else [("", "")]
    keys = [
        (prefix + name, f"{region_title}{name.upper()}") for prefix, region_title in prefixes for name in ("ap", "ar")
    ]
    rows = [["objects", *(name for _, name in keys)]]
    for size in ("", *OBJECT_SIZES):
        cells = [f"{key}_{size}" if size else f"{key}100" if key.endswith("ar") else key for key, _ in keys]
        rows.append([size or "all", *(format_metric_with_interval(report, cell) for cell in cells)])
    return rows


def format_metric_with_interval(report: Report, name: str) -> str:
    """Format a metric with its confidence interval, in per cent: `51.20 % (49.8 to 52.6)`."""
    interval, value = report.interval_lists.get(name), report.metrics[name]
    return format_percent(value, 1) + (f" ({100 * interval[0]:.1f} to {100 * interval[1]:.1f})" if interval else "")


def score_object_images(matches: Ragged, threshold: float) -> tuple[np.ndarray, np.ndarray]:
    """Compute F1 and the number of errors of each image, (n,) each, at IoU 0.5 for predictions above a score threshold.

    Errors are false detections and missed objects. F1 is nan for an image without predictions and objects.
    """
    table, images, count = matches.table, matches.images, len(matches)
    truth, region = table[:, MatchColumn.TRUTH] == 1, select_region_columns(table, 0)
    is_counted = region[:, RegionColumn.IGNORED] % 2 == 0
    is_shown = ~truth & is_counted & (table[:, MatchColumn.SCORE] >= threshold)
    num_correct = np.bincount(images[is_shown & (region[:, RegionColumn.MATCHED] % 2 == 1)], minlength=count)
    num_objects = np.bincount(images[is_shown | (truth & is_counted)], minlength=count)
    return np.divide(
        2 * num_correct, num_objects, out=np.full(count, np.nan), where=num_objects > 0
    ), num_objects - 2 * num_correct


def find_worst_object_images(
    predictions: SplitPredictions, threshold: float, tiles: bool, masks: bool
) -> dict[str, Any]:
    """Return the images of the lowest F1, of equal F1 those with most errors first, and the colours of the classes.

    Each has two images as data URIs: the ground truth, and the predictions above the score `threshold`. Objects are
    detected again, in `tiles` if set; `masks` draws masks in addition to boxes.
    """
    classes, split = predictions.bundle.task.classes, predictions.split
    assert isinstance(split, AnnotatedSplit), "objects are evaluated on annotated data"
    f1, num_errors = score_object_images(predictions.raw_logits, threshold)  # type: ignore[arg-type]
    order = [
        int(index)
        for index in np.lexsort((-num_errors, f1))
        if num_errors[index] and int(index) not in predictions.unreadable
    ]
    engine, colours, image_records = (
        make_engine(predictions.bundle.model, predictions.bundle.preprocess),
        create_class_colours(classes),
        [],
    )
    for sample in order[:MAX_OBJECT_IMAGES]:
        try:
            pixels = to_native_array(predictions.bundle.preprocess.decode(split.raw(sample), split.name(sample)))
            truth = split.target(sample)
        except DataError:  # the file was deleted after the evaluation
            continue
        image = to_rgb_image(torch.from_numpy(pixels))
        detections = detect_objects(
            make_detection_function(engine), pixels, predictions.bundle.preprocess, tiles, threshold
        )
        detections = detections.take(select_counted_detections(detections, truth))
        drawn_images = draw_truth_and_prediction(
            image, detections, truth=truth, classes=classes, colours=colours, masks=masks
        )
        image_info = {"name": split.name(sample), "f1": float(f1[sample]), "wrong": int(num_errors[sample])}
        image_records.append(
            image_info
            | {
                "images": [
                    encode_data_uri(shrink_image(drawn_image, OBJECT_IMAGE_SIDE)) for drawn_image in drawn_images
                ]
            }
        )
    names = [
        {"name": name, "colour": "#{:02x}{:02x}{:02x}".format(*colour)}
        for name, colour in zip(classes, colours, strict=True)
    ]
    return {"rows": image_records, "classes": names if len(names) <= MAX_OBJECT_MATRIX_CLASSES else []}


def draw_truth_and_prediction(
    image: Image.Image,
    detections: Detections,
    truth: Target,
    classes: tuple[str, ...],
    colours: np.ndarray,
    masks: bool,
) -> tuple[Image.Image, Image.Image]:
    """Draw the ground truth over an image, and the predictions over another copy of it.

    Objects have the colours (K, 3) of their classes. Missed objects and wrong predictions are crossed out and labelled.
    A small image is enlarged.
    """
    table = match_image(detections, truth, masks)
    factor = max(1, OBJECT_IMAGE_SIDE // max(image.size))
    image = image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
    region = select_region_columns(table, 0)
    error_codes = [int(code) for code in region[: len(table) - len(truth), RegionColumn.ERROR]]
    is_missed = (region[len(table) - len(truth) :, RegionColumn.MATCHED] == 0) & ~truth.crowd
    missed_texts = ["missed" if item else "" for item in is_missed]
    error_texts = [DETECTION_ERRORS[DetectionError(code).name.lower()] if code else "" for code in error_codes]
    mask_sets = (get_true_mask_runs(truth), detections.masks) if masks else (None, None)
    runs = [
        None if image_masks is None else [scale_mask_runs(item, detections.size, factor) for item in image_masks]
        for image_masks in mask_sets
    ]
    return (
        draw_marked_objects(image, truth.boxes * factor, colours[truth.labels], runs[0], missed_texts),
        draw_marked_objects(image, detections.boxes * factor, colours[detections.labels], runs[1], error_texts),
    )


def scale_mask_runs(runs: list[int], size: tuple[int, int], factor: int) -> list[int]:
    """Enlarge a run-length encoded mask of size (H, W) by an integer factor."""
    if factor == 1:
        return runs
    return mask_to_rle(rle_to_mask(runs, size).repeat(factor, 0).repeat(factor, 1))


def draw_marked_objects(
    image: Image.Image, boxes: np.ndarray, colours: np.ndarray, masks: Any, errors: list[str]
) -> Image.Image:
    """Draw n objects with boxes (n, 4) and colours (n, 3) over an image.

    `errors` has the error type of each object, an empty string if there is none. Errors are crossed out, and the first
    `MAX_NAMED_ERRORS` are labelled.
    """
    shades = [(int(r), int(g), int(b)) for r, g, b in colours]
    drawing = draw_objects(image, boxes, shades, [""] * len(boxes), masks)
    pen, width = ImageDraw.Draw(drawing), max(1, round(min(image.size) / 250))
    marked = [(round_box(boxes[index]), shades[index], error) for index, error in enumerate(errors) if error]
    for (left, top, right, bottom), colour, _ in marked:
        for line in ((left, top, right, bottom), (left, bottom, right, top)):
            pen.line(line, fill=(0, 0, 0), width=width + 2)
            pen.line(line, fill=colour, width=width)
    font = ImageFont.load_default(LABEL_HEIGHT * max(image.size) / OBJECT_IMAGE_SIDE)
    for box, colour, error in reversed(marked[:MAX_NAMED_ERRORS]):
        draw_label(pen, drawing.size, box=box, text=error, colour=colour, font=font)
    return drawing


def draw_error_bars(errors: dict[str, float], metric_prefix: str, title: str) -> Any:
    """Draw a bar for the AP50 points lost to each error type; `metric_prefix` selects masks or boxes in `errors`."""
    from matplotlib.figure import Figure

    values = [100 * errors[metric_prefix + name] for name in DETECTION_ERRORS]
    with use_page_style():
        figure = Figure(figsize=(4.6, 2.6))
        figure.subplots_adjust(left=0.32, right=0.9, bottom=0.17, top=0.9)
        axes: Axes = figure.subplots()
        bar_positions = np.arange(len(values))[::-1]
        axes.barh(bar_positions, values, color=LINE_COLOURS[1], alpha=0.7, height=0.65)
        axes.set_yticks(bar_positions, list(DETECTION_ERRORS.values()))
        label_gap = max(1.0, *values) * 0.02
        for bar_position, value in zip(bar_positions, values, strict=True):
            axes.text(max(value, 0) + label_gap, bar_position, f"{value:.1f}", va="center", fontsize=8)
        axes.set_xlim(min(0.0, *values), max(1.0, *values) * 1.12)
        axes.set_xlabel("AP50 points lost")
        axes.tick_params(axis="y", length=0)
        style_axes(axes)
        return figure_to_svg_markup(figure, f"AP50 points lost by error type {title}".strip())


def draw_precision_curves(curves: dict[str, Any], report: Report) -> Any:
    """Draw precision against recall at IoU 0.5: the mean over classes, and the classes with most objects."""
    from matplotlib.figure import Figure

    objects = {row["class"]: row["objects"] for row in report.per_class}
    shown_classes = sorted(curves["classes"], key=lambda name: -objects[name])[:MAX_CLASS_CURVES]
    with use_page_style():
        figure = Figure(figsize=(4.6, 3.4))
        figure.subplots_adjust(left=0.13, right=0.98, bottom=0.14, top=0.91)
        axes: Axes = figure.subplots()
        tooltips = []
        for index, name in enumerate(shown_classes):
            axes.plot(curves["recall"], curves["classes"][name], color=LINE_COLOURS[index], linewidth=1.2, label=name)
            points = [
                HoverPoint(recall, precision, f"recall {recall:.0%}", f"{precision:.1%}")
                for recall, precision in zip(curves["recall"], curves["classes"][name], strict=True)
            ]
            tooltips.append(HoverSeries(name, LINE_COLOURS[index], points))
        if len(curves["classes"]) > 1:
            axes.plot(curves["recall"], curves["mean"], color=INK, linewidth=2, label="mean over classes")
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1.02)
        axes.set_xlabel("recall")
        axes.set_ylabel("precision")
        style_axes(axes)
        if shown_classes:
            legend = axes.legend(frameon=False, fontsize=8, loc="best")
            for text in legend.get_texts():
                text.set_parse_math(False)  # a class name may contain $x$
        return figure_to_svg_markup(figure, "precision-recall curve", HoverValues(axes, tooltips))


def draw_object_confusion(matrix: list[list[int]] | None, classes: tuple[str, ...]) -> Any:
    """Draw the confusion matrix of objects, whose last row and column are `background`.

    At most `MAX_OBJECT_MATRIX_CLASSES` classes are shown, those with the most errors.
    """
    if matrix is None:
        return None
    counts = np.array(matrix)
    num_errors = counts.sum(0) + counts.sum(1) - 2 * np.diag(counts)
    class_indices = np.sort(np.argsort(-num_errors[:-1], kind="stable")[:MAX_OBJECT_MATRIX_CLASSES])
    names = [*(classes[index] for index in class_indices), "background"]
    matrix_indices = np.append(class_indices, len(classes))
    return draw_confusion_plot(counts[np.ix_(matrix_indices, matrix_indices)], names)


def find_worst_map_images(predictions: SplitPredictions) -> dict[str, Any]:
    """Return the images of the lowest mIoU, and the colours of the classes.

    Each has three images as data URIs: the image, and the true and the predicted class map over it. Volumes are shown
    by their middle planes.
    """
    classes, split = predictions.bundle.task.classes, predictions.split
    assert isinstance(split, AnnotatedSplit), "class maps are evaluated on annotated data"
    metrics = [
        compute_segmentation_metrics(matrix)["miou"]
        for matrix in extract_confusion_matrices(predictions.raw_logits, len(classes))
    ]
    order = sorted(
        (
            sample
            for sample in range(len(split))
            if metrics[sample] is not None and sample not in predictions.unreadable
        ),
        key=lambda sample: metrics[sample] or 0.0,
    )
    engine, colours, image_records = (
        make_engine(predictions.bundle.model, predictions.bundle.preprocess),
        create_class_colours(classes),
        [],
    )
    for sample in order[:MAX_MAP_IMAGES]:
        try:
            pixels = to_native_array(predictions.bundle.preprocess.decode(split.raw(sample), split.name(sample)))
            truth = split.target(sample).class_map()
        except DataError:  # the file was deleted after the evaluation
            continue
        prediction = predict_class_map(make_logits_function(engine), pixels, predictions.bundle.preprocess.image)
        if prediction.ndim == 3:
            pixels = tile_middle_planes(pixels, pixels.min())
            truth, prediction = (tile_middle_planes(class_map, IGNORE_INDEX) for class_map in (truth, prediction))
        image = to_rgb_image(torch.from_numpy(pixels))
        drawn_images = [image, overlay_class_map(image, truth, colours), overlay_class_map(image, prediction, colours)]
        uris = [encode_data_uri(shrink_image(drawn_image)) for drawn_image in drawn_images]
        image_records.append({"name": split.name(sample), "miou": metrics[sample], "images": uris})
    names = [
        {"name": name, "colour": "#{:02x}{:02x}{:02x}".format(*colour)}
        for name, colour in zip(classes, colours, strict=True)
    ]
    return {"rows": image_records, "classes": names}
