"""The verb `vitreous predict`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from vitreous.cli.class_maps import predict_class_maps
from vitreous.cli.console import Console
from vitreous.cli.inference import (
    ImageArguments,
    PredictionArguments,
    ProgressMeter,
    choose_backend,
    choose_job_engine,
    collect_file_settings,
    describe_unreadable,
    get_engine_name,
    open_image_source,
    print_model_notes,
    print_unreadable,
    require_image_arguments,
    write_predictions,
)
from vitreous.cli.objects import predict_objects
from vitreous.weights.options import ZeroShotOptions

if TYPE_CHECKING:
    from vitreous.inference.predict import Predictor
    from vitreous.inference.sources import ImageSource, Item
    from vitreous.tasks.base import PredictionFormat

MAX_PREDICT_CALIBRATION_IMAGES = 512  # input images that calibrate int8 if there are no training images


@dataclass(frozen=True, kw_only=True)
class Options(ZeroShotOptions, PredictionArguments):
    """Predict classes, masks, objects or values for images.

    Example: vitreous predict runs/pets new/*.jpg --top 3
    """

    COMMON: ClassVar[tuple[str, ...]] = (
        "top",
        "threshold",
        "abstain",
        "out",
        "csv",
        "overlay",
        "tiles",
        "bad_images",
        "device",
        "engine",
    )

    top: int | None = None
    """Maximum number of classes per image (default: 3; for multi-label models all above --threshold)."""
    abstain: float | None = None
    """Predict "unsure" if the highest probability is below this value (0 to 1)."""


def run(options: Options, console: Console) -> dict[str, Any]:
    """Predict images, and print a table or write files. Raises UsageError for options that conflict or are out of
    range."""
    from vitreous.errors import UsageError
    from vitreous.inference.predict import load

    require_image_arguments(options)
    if options.top is not None and options.top < 1:
        raise UsageError(f"--top must be at least 1, not {options.top}")
    if options.threshold is not None and not 0 <= options.threshold < 1:
        raise UsageError(f"--threshold must be at least 0 and below 1, not {options.threshold}")
    if options.out and options.csv:
        raise UsageError("--out and --csv cannot be combined", "remove --csv")
    if options.resume and not options.out:
        raise UsageError("--resume needs the --out file to continue", "add --out FILE")
    warn_of_emulation(options, console)
    predictor = load(
        options.source(options.run), options.get_inference_options(), read_calibration_images(options), options.exact
    )
    source = open_image_source(options, predictor.card.preprocess)
    choose_job_engine(options, predictor, source.count)
    print_model_notes(predictor, console)
    task = predictor.card.task
    task.check_predict_options(options.run, vars(options))
    return TASK_PREDICTORS.get(task.endpoint, predict_outputs)(options, predictor, source, console)


def predict_outputs(options: Options, predictor: Predictor, source: ImageSource, console: Console) -> dict[str, Any]:
    """Predict classes or values, one output per image, and print a table or write the file of --out.

    Raises UsageError for options that do not apply to the task.
    """
    prediction_format = predictor.prediction_format(options.top, options.threshold, options.abstain, usual=3)

    def iterate_predictions(items: Iterator[Item]) -> Iterator[Sequence[Any]]:
        return choose_backend(options, predictor).predictions(items, prediction_format, options.bad_images)

    if options.out:
        provenance = {"verb": "predict", "model": predictor.card.name, "version": predictor.card.version}
        provenance |= collect_file_settings(options, predictor, **prediction_format.settings)
        return write_predictions(
            options,
            options.out,
            output_format=prediction_format,
            provenance=provenance,
            predict=iterate_predictions,
            source=source,
            console=console,
        )
    return {
        "model": options.run,
        "precision": predictor.engine.precision,
        "engine": get_engine_name(predictor, options),
        "predictions": print_predictions(
            options, prediction_format, iterate_predictions, source=source, console=console
        ),
    }


#: endpoint of the task -> predict function; other tasks have `predict_outputs`
TASK_PREDICTORS: dict[str, Callable[..., dict[str, Any]]] = {"detect": predict_objects, "segment": predict_class_maps}


def read_calibration_images(options: Options) -> Iterator[str | bytes]:
    """Yield the first input images, which calibrate int8 if there are no training images. Raises UsageError for stdin,
    which cannot be read twice."""
    from contextlib import suppress
    from itertools import islice

    from vitreous.errors import DataError, UsageError

    if {"-", "@-"} & {*options.images, *(f"@{name}" for name in options.list)}:
        raise UsageError(
            "int8 calibration without training images reads the input images twice, and stdin can be read only once",
            "use a list file: @list.txt",
        )
    for item in islice(open_image_source(options), MAX_PREDICT_CALIBRATION_IMAGES):
        with suppress(DataError):
            yield item.content()


def warn_of_emulation(options: ImageArguments, console: Console) -> None:
    """Print a note if the device emulates bf16, which is slow."""
    if options.precision == "bf16":
        from vitreous.system.machine import describe_emulation, pick_device

        if warning := describe_emulation(options.precision, pick_device(options.device)):
            console.note(warning)


def print_predictions(
    options: Options, prediction_format: PredictionFormat, predict: Any, source: ImageSource, console: Console
) -> list[dict[str, Any]]:
    """Predict all images, write the file of --csv, print the table, and return the predictions for the document."""
    from vitreous.errors import escape_unprintable
    from vitreous.system.disk import write_output_file
    from vitreous.system.tables import format_csv

    meter, predictions, rows = ProgressMeter("predict", source.count, console), [], []
    for chunk in predict(iter(source)):
        meter.count(chunk)
        predictions += chunk
    for prediction in predictions:
        cell = (
            describe_unreadable(prediction.path, prediction.error)
            if prediction.error
            else prediction_format.describe(prediction)
        )
        rows.append([escape_unprintable(prediction.path), cell])
    if options.csv:
        write_output_file(
            options.csv,
            format_csv(
                [
                    prediction_format.csv_columns,
                    *(row for prediction in predictions for row in prediction_format.to_csv_rows(prediction)),
                ]
            ),
        )
    console.table(["image", prediction_format.column], rows)
    print_unreadable(console, (), meter.unreadable, meter.num_done)
    return [prediction_format.to_dict(prediction) for prediction in predictions]
