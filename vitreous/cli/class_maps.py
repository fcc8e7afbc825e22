"""The verb `vitreous predict`, for semantic segmentation models."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

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
    from vitreous.inference.class_maps import ClassMap
    from vitreous.inference.predict import Predictor
    from vitreous.inference.sources import ImageSource, Item


def predict_class_maps(
    options: PredictionArguments, predictor: Predictor, source: ImageSource, console: Console
) -> dict[str, Any]:
    """Write a class map for each image to the folder --out, and overlays to --overlay; without --out, print the share
    of each class.

    Raises UsageError if a folder is a file, or contains files and --resume is not set.
    """
    from vitreous.errors import UsageError
    from vitreous.inference.class_maps import MapFiles, find_common_root, iterate_class_maps

    out, overlay = options.out, options.overlay
    if out is None:
        if overlay:
            raise UsageError("--overlay needs --out", "add --out FOLDER for the class maps")
        return print_class_shares(options, predictor, source, console)
    for folder in filter(None, (out, overlay)):
        if os.path.isfile(folder) or os.path.splitext(folder)[1]:
            raise UsageError(f"{folder} is a file, not a folder: class maps are one PNG per image", "use a folder")
        if not options.resume and os.path.isdir(folder) and os.listdir(folder):
            raise UsageError(f"{folder} contains files, which are not overwritten", "use a new folder, or add --resume")
    common_root = find_common_root([*options.images, *(f"@{name}" for name in options.list)])
    map_files = MapFiles(out, common_root, predictor.card.task.classes, overlay)
    if options.resume:
        map_files.resume()

    def iterate_predictions(items: Iterator[Item]) -> Iterator[Sequence[ClassMap]]:
        for class_map in iterate_class_maps(
            predictor.card, predictor.engine, items, options.bad_images, overlay is not None
        ):
            yield map_files.write([class_map])

    os.makedirs(out, exist_ok=True)
    provenance = {"verb": "predict", "model": predictor.card.name, "version": predictor.card.version}
    provenance |= collect_file_settings(options, predictor, overlay=overlay)
    return write_predictions(
        options,
        map_files.index,
        output_format=map_files,
        provenance=provenance,
        predict=iterate_predictions,
        source=source,
        console=console,
    ) | {"out": out}


def print_class_shares(
    options: PredictionArguments, predictor: Predictor, source: ImageSource, console: Console
) -> dict[str, Any]:
    """Print the share of the pixels that each class has in each image, and return the document."""
    from vitreous.errors import escape_unprintable
    from vitreous.inference.class_maps import iterate_class_maps

    meter, rows, predictions = ProgressMeter("predict", source.count, console), [], []
    for class_map in iterate_class_maps(predictor.card, predictor.engine, iter(source), options.bad_images, False):
        meter.count([class_map])
        text = "  ".join(f"{name} {share:.1%}" for name, share in class_map.class_shares.items())
        cell = describe_unreadable(class_map.path, class_map.error) if class_map.error else text
        rows.append([escape_unprintable(class_map.path), cell])
        predictions.append({"path": class_map.path, "class_shares": class_map.class_shares, "error": class_map.error})
    console.table(["image", "shares of the pixels"], rows)
    print_unreadable(console, (), meter.unreadable, meter.num_done)
    if not meter.unreadable:
        console.note("add --out FOLDER to write the class maps")
    return {"model": options.run, "precision": predictor.engine.precision, "predictions": predictions}
