"""vitreous predict, of models that give a class to every pixel."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from vitreous.cli.console import Console
from vitreous.cli.inference import Meter, describe_unreadable, file_settings, print_unreadable, write_answers

if TYPE_CHECKING:
    from vitreous.cli.inference import AnswerArguments
    from vitreous.inference.class_maps import ClassMap
    from vitreous.inference.predict import Predictor
    from vitreous.inference.sources import Item, Source


def write_maps(options: AnswerArguments, predictor: Predictor, source: Source, console: Console) -> dict[str, Any]:
    """Write a class map for each image into the folder --out, and overlays into --overlay; or print the share of each
    class. Raises UsageError for a folder that has files in it, and for a file in its place."""
    from vitreous.errors import UsageError
    from vitreous.inference.class_maps import MapFiles, class_maps, common_root

    out, overlay = options.out, options.overlay
    if out is None:
        if overlay:
            raise UsageError("--overlay is written beside the class maps", "name a folder for those: --out FOLDER")
        return print_shares(options, predictor, source, console)
    for folder in filter(None, (out, overlay)):
        if os.path.isfile(folder) or os.path.splitext(folder)[1]:
            raise UsageError(f"{folder} is no folder: a class map is a PNG for each image", "name a folder")
        if not options.resume and os.path.isdir(folder) and os.listdir(folder):
            raise UsageError(f"{folder} has files in it, and none is overwritten", "name a new folder, or --resume it")
    root = common_root([*options.images, *(f"@{name}" for name in options.list)])
    files = MapFiles(out, root, predictor.card.task.classes, overlay)
    if options.resume:
        files.resume()

    def answers(items: Iterator[Item]) -> Iterator[Sequence[ClassMap]]:
        for answer in class_maps(predictor.card, predictor.engine, items, options.bad_images, overlay is not None):
            yield files.write([answer])

    os.makedirs(out, exist_ok=True)
    made_by = {"verb": "predict", "model": predictor.card.name, "version": predictor.card.version}
    made_by |= file_settings(options, predictor, overlay=overlay)
    return write_answers(
        options, files.index, kind=files, made_by=made_by, answers=answers, source=source, console=console
    ) | {"out": out}


def print_shares(options: AnswerArguments, predictor: Predictor, source: Source, console: Console) -> dict[str, Any]:
    """Print the share of each class of each image, and return the document."""
    from vitreous.errors import printable
    from vitreous.inference.class_maps import class_maps

    meter, rows, document = Meter("predict", source.count, console), [], []
    for answer in class_maps(predictor.card, predictor.engine, iter(source), options.bad_images, False):
        meter.count([answer])
        text = "  ".join(f"{name} {share:.1%}" for name, share in answer.shares.items())
        cell = describe_unreadable(answer.path, answer.error) if answer.error else text
        rows.append([printable(answer.path), cell])
        document.append({"path": answer.path, "shares": answer.shares, "error": answer.error})
    console.table(["image", "shares of the pixels"], rows)
    print_unreadable(console, (), meter.unreadable, meter.done)
    if not meter.unreadable:
        console.note("--out FOLDER writes the class maps")
    return {"model": options.run, "precision": predictor.engine.precision, "predictions": document}
