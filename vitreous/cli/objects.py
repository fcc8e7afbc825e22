"""The verb `vitreous predict`, for object detection and instance segmentation models."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vitreous.cli.console import Console
from vitreous.cli.inference import (
    ProgressMeter,
    collect_file_settings,
    describe_unreadable,
    print_unreadable,
    write_predictions,
)

if TYPE_CHECKING:
    from vitreous.cli.inference import PredictionArguments
    from vitreous.inference.objects import DetectOptions, ImageObjects
    from vitreous.inference.predict import Predictor
    from vitreous.inference.sources import ImageSource, Item

ObjectFormat = Literal["table", "coco", "yolo", "masks"]
OBJECT_TABLE_SUFFIXES = (".jsonl", ".csv", ".parquet")
MAX_LISTED_OBJECTS = 8  # objects per image in the printed table


def predict_objects(
    options: PredictionArguments, predictor: Predictor, source: ImageSource, console: Console
) -> dict[str, Any]:
    """Detect objects in images; print a table, or write the files of --out and --overlay. Raises UsageError for options
    that conflict."""
    from vitreous.errors import UsageError
    from vitreous.inference.class_maps import find_common_root
    from vitreous.inference.object_files import (
        CocoResults,
        ObjectFolder,
        ObjectRows,
        PlannedOutputPaths,
        check_overwrite,
    )
    from vitreous.inference.objects import DEFAULT_THRESHOLD, DetectOptions

    object_format, card = choose_object_format(options, predictor), predictor.card
    if options.threshold is None:  # COCO metrics need predictions of any score
        detect_options = DetectOptions(0.0 if object_format == "coco" else DEFAULT_THRESHOLD, options.tiles)
    else:
        detect_options = DetectOptions(options.threshold, options.tiles)
    for folder in filter(None, (options.overlay, options.out if object_format in ("yolo", "masks") else None)):
        check_output_folder(folder, options.resume)
    if options.overlay and options.overlay == options.out:
        raise UsageError("--overlay and --out are the same folder", "use two folders: their files have the same names")
    common_root = find_common_root([*options.images, *(f"@{name}" for name in options.list)])
    planned_outputs = PlannedOutputPaths(source, common_root, ".txt" if object_format == "yolo" else ".png")
    if options.out is None:
        return print_objects(
            options,
            predictor,
            planned_outputs.source,
            console,
            ObjectFinder(predictor, detect_options, options, planned_outputs.output_paths),
        )
    provenance = {"verb": "predict", "model": card.name, "version": card.version}
    provenance |= collect_file_settings(
        options, predictor, threshold=detect_options.threshold, tiles=detect_options.tiles, overlay=options.overlay
    )
    provenance |= {"to": object_format, "coco_ids": options.coco_ids}
    if object_format in ("yolo", "masks"):
        folder = ObjectFolder(options.out, object_format, card.task.classes, planned_outputs.output_paths)
        finder = ObjectFinder(predictor, detect_options, options, planned_outputs.output_paths, folder=folder)
        document = write_predictions(
            options,
            folder.index,
            output_format=folder,
            provenance=provenance,
            predict=finder.iterate_chunks,
            source=planned_outputs.source,
            console=console,
        )
        return document | {"out": options.out}
    if object_format == "coco":
        check_overwrite(options.out, options.resume)
    output_format = (
        CocoResults(card.task.classes, common_root, options.coco_ids) if object_format == "coco" else ObjectRows()
    )
    finder = ObjectFinder(predictor, detect_options, options, planned_outputs.output_paths)
    return write_predictions(
        options,
        options.out,
        output_format=output_format,
        provenance=provenance,
        predict=finder.iterate_chunks,
        source=planned_outputs.source,
        console=console,
    )


def choose_object_format(options: PredictionArguments, predictor: Predictor) -> ObjectFormat:
    """Return the output format: that of --to, or of the extension of --out. Raises UsageError if they conflict."""
    from vitreous.errors import UsageError, escape_unprintable

    suffix = os.path.splitext(options.out)[1].lower() if options.out else ""
    masks = predictor.card.task.masks
    if not options.out:
        if options.to is not None:
            raise UsageError(f"--to {options.to} needs --out", "add --out FILE or FOLDER")
        return "table"
    object_format: ObjectFormat = options.to or ("coco" if suffix == ".json" else "table" if suffix else "masks")
    if object_format == "masks" and not masks:
        message = f"{options.run} predicts boxes only, and {escape_unprintable(options.out)} is a folder for masks"
        raise UsageError(message, "use --to yolo, or end --out in .json, .jsonl, .csv or .parquet")
    suffixes = {"coco": (".json",), "table": OBJECT_TABLE_SUFFIXES}.get(object_format, ("",))
    if suffix not in suffixes:
        expected = f"a {' or '.join(suffixes)} file" if suffixes[0] else "a folder"
        raise UsageError(
            f"--to {object_format} writes {expected}, and --out is {escape_unprintable(options.out)}",
            "change --out or --to",
        )
    if options.coco_ids is not None and object_format != "coco":
        raise UsageError("--coco-ids applies to COCO results only", "add --out results.json")
    return object_format


def check_output_folder(folder: str, resume: bool) -> None:
    """Raise UsageError if `folder` is a file, or contains files and `resume` is not set."""
    from vitreous.errors import UsageError, escape_unprintable

    if os.path.isfile(folder):
        raise UsageError(f"{escape_unprintable(folder)} is not a folder", "use a folder: one file is written per image")
    if not resume and os.path.isdir(folder) and os.listdir(folder):
        message = f"{escape_unprintable(folder)} contains files, which are not overwritten"
        raise UsageError(message, "use a new folder, or add --resume")


class ObjectFinder:
    """Detect objects in images, in order, and write one file per image to `folder` and --overlay if they are set.

    The files of an image are written before the next image is processed, and its pixels and masks are released.
    """

    def __init__(
        self,
        predictor: Predictor,
        detect_options: DetectOptions,
        options: PredictionArguments,
        output_paths: dict[str, Path],
        *,
        folder: Any = None,
    ) -> None:
        from vitreous.inference.objects import DEFAULT_THRESHOLD

        self.predictor, self.detect_options, self.bad_images = predictor, detect_options, options.bad_images
        self.overlays, self.output_paths, self.folder = options.overlay, output_paths, folder
        # COCO results contain all scores; overlays show those above the default threshold
        self.overlay_threshold = detect_options.threshold if options.threshold is not None else DEFAULT_THRESHOLD

    def iterate_predictions(self, items: Iterator[Item]) -> Iterator[ImageObjects]:
        """Yield the objects of each image, after its files are written."""
        from vitreous.inference.class_maps import save_png
        from vitreous.inference.objects import iterate_image_objects

        card, engine, keep_images = self.predictor.card, self.predictor.engine, self.overlays is not None
        for image_objects in iterate_image_objects(
            card, engine, items=items, options=self.detect_options, bad_images=self.bad_images, keep_images=keep_images
        ):
            if self.folder is not None:
                image_objects = self.folder.write(image_objects)
            if self.overlays is not None and image_objects.detections is not None:
                path = Path(self.overlays) / self.output_paths[image_objects.path].with_suffix(".png")
                drawn = replace(
                    image_objects, detections=image_objects.detections.filter_by_score(self.overlay_threshold)
                )
                save_png(drawn.draw_overlay(), path)
                image_objects = replace(image_objects, image=None, overlay=os.fspath(path))
            yield image_objects

    def iterate_chunks(self, items: Iterator[Item]) -> Iterator[Sequence[ImageObjects]]:
        """Yield chunks for `write_predictions`; each chunk is a list with the objects of one image."""
        for image_objects in self.iterate_predictions(items):
            yield [image_objects]


def print_objects(
    options: PredictionArguments, predictor: Predictor, source: ImageSource, console: Console, finder: ObjectFinder
) -> dict[str, Any]:
    """Print a table with the objects of each image, write the file of --csv, and return the document."""
    from vitreous.errors import escape_unprintable
    from vitreous.inference.object_files import ObjectRows
    from vitreous.system.disk import write_output_file
    from vitreous.system.tables import format_csv

    meter, formatter, rows, cells, document = ProgressMeter("predict", source.count, console), ObjectRows(), [], [], []
    for image_objects in finder.iterate_predictions(iter(source)):
        meter.count([image_objects])
        cell = (
            describe_unreadable(image_objects.path, image_objects.error)
            if image_objects.error
            else describe_best_objects(image_objects)
        )
        rows.append([escape_unprintable(image_objects.path), cell])
        cells += formatter.to_csv_rows(image_objects) if options.csv else []
        document.append(formatter.to_dict(image_objects))
    if options.csv:
        write_output_file(options.csv, format_csv([formatter.csv_columns, *cells]))
    console.table(["image", f"objects with a score of at least {finder.detect_options.threshold:g}"], rows)
    print_unreadable(console, (), meter.unreadable, meter.num_done)
    return {"model": options.run, "precision": predictor.engine.precision, "predictions": document}


def describe_best_objects(image_objects: ImageObjects) -> str:
    """Format the classes and scores of the highest-scoring objects of an image, and the number of omitted objects."""
    best = zip(image_objects.names[:MAX_LISTED_OBJECTS], image_objects.scores[:MAX_LISTED_OBJECTS], strict=True)
    omitted_text = (
        f"  and {len(image_objects) - MAX_LISTED_OBJECTS} more" if len(image_objects) > MAX_LISTED_OBJECTS else ""
    )
    return "  ".join(f"{name} {score:.0%}" for name, score in best) + omitted_text or "none"
