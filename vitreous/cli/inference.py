"""Options of the verbs that run a model, and shared functions of `predict` and `embed`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

from tyro.conf import Positional, arg

from vitreous.cli.console import Console
from vitreous.config import list_field_names
from vitreous.inference.options import InferenceOptions
from vitreous.weights.options import InferenceWeightsOptions

if TYPE_CHECKING:
    from vitreous.data.modalities.base import Preprocess
    from vitreous.inference.predict import Predictor
    from vitreous.inference.ray_backend import RayPredictor
    from vitreous.inference.rows import RowFormat
    from vitreous.inference.sources import ImageSource, Item

T = TypeVar("T")
MAX_LISTED_UNREADABLE = 20  # unreadable images that are listed
UNREADABLE_EXIT_CODE = 3  # exit code of a command that finished but could not read some images


@dataclass(frozen=True, kw_only=True)
class InferenceArguments(InferenceOptions, InferenceWeightsOptions):
    """Options for inference, for foreign weights, and for unreadable images."""

    SECTIONS: ClassVar[dict[str, str]] = {"bad_images": "Images"}

    bad_images: Literal["stop", "skip"] = "stop"
    """Stop at unreadable images, or report them, count them as errors, and continue."""
    seed: int = 0
    """No effect: nothing is random."""

    def get_inference_options(self) -> InferenceOptions:
        """Return the options of the inference engine as a separate dataclass."""
        return select_options(InferenceOptions, self)


def select_options(options_type: type[T], options: Any) -> T:
    """Build an options dataclass from the fields of `options` that have the same names."""
    return options_type(**{name: getattr(options, name) for name in list_field_names(options_type)})


@dataclass(frozen=True, kw_only=True)
class ImageArguments(InferenceArguments):
    """Options for input images."""

    run: Annotated[Positional[str], arg(metavar="RUN")]
    """A run folder, a bundle, an exported file, or weights: a file of a supported format or a name listed by `vitreous
    models --weights`."""
    images: Annotated[Positional[tuple[str, ...]], arg(metavar="IMAGE...")] = ()
    """Image files (video files for models of clips), folders, 'patterns/**/*.jpg', @list.txt, - for a list on stdin,
    .csv, .tsv, .tar or .parquet."""
    list: tuple[str, ...] = ()
    """Files with one path per line, or NUL-separated paths; the same as @FILE."""
    column: str | None = None
    """Column of CSV and Parquet files that contains the images (default: path, image, file ...)."""
    exact: bool = False
    """Decode JPEG files at full resolution. By default, images at least four times too large are decoded at 1/2 to 1/8,
    which changes pixel values by 0.4 of 255 on average and by less than 16."""
    bad_images: Literal["skip", "stop"] = "skip"
    """Skip unreadable images (report them in the output and exit with code 3), or stop at the first."""
    resume: bool = False
    """Continue an interrupted --out file; finished rows are not computed again."""
    ray: Annotated[str | None, arg(metavar="ADDRESS")] = None
    """Address of a Ray cluster to compute on, or `local` to start one here; needs the extra `ray`."""


@dataclass(frozen=True, kw_only=True)
class PredictionArguments(ImageArguments):
    """Options for predictions and their output."""

    SECTIONS: ClassVar[dict[str, str]] = {"threshold": "Predictions"}

    threshold: float | None = None
    """Minimum probability of a listed class (default: 0.5 for multi-label models, else none); for detectors, minimum
    score (default: 0.5; use 0 to compute COCO metrics)."""
    out: str | None = None
    """Stream predictions to this .jsonl, .csv or .parquet file instead of printing them. Segmentation: a folder for
    index masks, one PNG per image. Detection: also .json (COCO results), or a folder for masks or YOLO text files."""
    to: Literal["table", "coco", "yolo", "masks"] | None = None
    """Detection: format of --out (default: from its extension; a folder gets one PNG of instances per image)."""
    coco_ids: str | None = None
    """COCO file whose image and category ids are used in COCO results (default: counted from 1 and listed in
    NAME.images.json)."""
    tiles: bool = False
    """Detection: process images larger than the model input in overlapping tiles at full resolution."""
    overlay: str | None = None
    """Segmentation and detection: folder for images with the predictions drawn on them."""
    csv: str | None = None
    """Also write the printed predictions to this CSV file: one row per top class or object."""


def require_image_arguments(options: ImageArguments) -> None:
    """Raise UsageError if no images are passed, DataError for missing files.

    The content of folders is listed later, because it depends on the input type of the model.
    """
    from vitreous.errors import UsageError
    from vitreous.inference.sources import SOURCE_HINT, check_words_exist

    if not options.images and not options.list:
        raise UsageError("no images", SOURCE_HINT)
    check_words_exist(options.images)


def open_image_source(options: ImageArguments, preprocess: Preprocess | None = None) -> ImageSource:
    """Return the source of the input images; `preprocess` determines which files are inputs. Raises DataError for
    missing files."""
    from vitreous.inference.sources import resolve_image_source

    return resolve_image_source(options.images, options.column, options.list, *([preprocess] if preprocess else []))


def choose_backend(options: ImageArguments, predictor: Predictor) -> Predictor | RayPredictor:
    """Return the predictor; with --ray a `RayPredictor`, for which `--engine auto` means PyTorch.

    Raises UsageError for int8 with --ray.
    """
    if options.ray is None:
        return predictor
    from vitreous.errors import UsageError
    from vitreous.inference.ray_backend import RayPredictor

    if options.precision == "int8":
        message = "--ray does not support int8, which one process calibrates"
        raise UsageError(message, "use --precision fp32, or remove --ray")
    return RayPredictor(options.ray, options.source(options.run), options.get_inference_options(), options.exact)


def collect_file_settings(options: ImageArguments, predictor: Predictor, **extra: Any) -> dict[str, Any]:
    """Return the settings that affect the content of an output file, in addition to model and images.

    They are stored with the file, so that --resume can compare them. Precision and engine are those in use.
    """
    settings = {name: getattr(options, name) for name in ("exact", "device", "engine", "merge_tokens")}
    settings |= {"engine": get_engine_name(predictor, options)}
    settings |= {"clip_views": options.clip_views} if options.clip_views != "1x1" else {}
    names = ("resize", "source_size", "native_aspect", "tokens", "labels", "templates", "multilabel")
    weights_settings = {
        name: value for name in names if (value := getattr(options, name, None)) not in (None, False, ())
    }
    return {**settings, "precision": predictor.engine.precision, **extra, **weights_settings}


class ProgressMeter:
    """Count predictions and unreadable images, and report progress.

    `total` is the number of images, None if unknown; `done` are those of an earlier, interrupted run. `first_errors`
    are the error messages of the first unreadable images.
    """

    def __init__(self, label: str, total: int | None, console: Console, done: int = 0) -> None:
        self.label, self.total, self.console = label, total, console
        self.num_done, self.initial_count, self.start_time = done, done, time.monotonic()
        self.first_errors: list[str] = []
        self.unreadable = 0

    @property
    def images_per_second(self) -> float:
        """Return the throughput since the start, in images/s."""
        return (self.num_done - self.initial_count) / max(time.monotonic() - self.start_time, 1e-9)

    def count(self, predictions: Sequence[Any]) -> None:
        """Add predictions to the counts, and report progress."""
        self.num_done += len(predictions)
        errors = [prediction.error for prediction in predictions if prediction.error is not None]
        self.unreadable += len(errors)
        self.first_errors += errors[: MAX_LISTED_UNREADABLE - len(self.first_errors)]
        self.console.progress(self.label, self.num_done, self.total, f"{self.images_per_second:,.1f} images/s")


def write_predictions(
    options: ImageArguments,
    out: str,
    output_format: RowFormat,
    provenance: dict[str, Any],
    predict: Callable[[Iterator[Item]], Iterator[Sequence[Any]]],
    source: ImageSource,
    console: Console,
) -> dict[str, Any]:
    """Compute predictions and stream them to the file `out`; none is kept in memory. Returns the document of the verb.

    `provenance` is the model and the settings, which are stored with the file. `predict` maps images to chunks of
    predictions.
    """
    from vitreous.inference.sinks import OutputFile

    output_file = OutputFile(out, output_format, provenance, options.resume)
    try:
        items = iter(source) if output_file.is_finished else output_file.remaining(iter(source))
        meter = ProgressMeter("images", source.count, console, output_file.num_rows)
        if output_file.is_finished:
            console.note(f"{out} is complete: {output_file.num_rows:,} images")
        else:
            if output_file.num_rows:
                console.note(f"{out} already contains {output_file.num_rows:,} images")
            for predictions in predict(items):
                output_file.add(predictions)
                meter.count(predictions)
            output_file.finish()
            console.note(f"{output_file.num_rows:,} images in {out}, {meter.images_per_second:,.1f} images/s")
    finally:
        output_file.close()
    print_unreadable(console, meter.first_errors, output_file.num_unreadable, output_file.num_rows)
    engine_settings = {name: provenance[name] for name in ("precision", "engine")}
    document = {"model": options.run, **engine_settings, "out": out, "images": output_file.num_rows}
    return document | {"unreadable": output_file.num_unreadable, "images_per_second": meter.images_per_second}


def get_engine_name(predictor: Predictor, options: InferenceArguments) -> str:
    """Return the name of the engine in use; for exported files and Ray clusters, that of --engine."""
    engine_options = getattr(predictor.engine, "options", None)
    return (
        engine_options.engine
        if engine_options is not None and getattr(options, "ray", None) is None
        else options.engine
    )


def choose_job_engine(
    options: ImageArguments, predictor: Predictor, images: int | None, features: bool = False
) -> None:
    """Choose the engine if `--engine` is auto. If the number of images is unknown (None), engines are not measured."""
    if options.ray is None:
        predictor.choose_engine(images or 0, features)


def print_model_notes(predictor: Predictor, console: Console) -> None:
    """Print notes on assumptions about foreign weights, and on the chosen engine."""
    for text in predictor.bundle.notes if predictor.bundle else ():
        console.note(text)
    if note := getattr(predictor.engine, "note", ""):
        console.note(note)


def describe_unreadable(path: str, error: str) -> str:
    """Format the table cell of an unreadable image: the error message without the path, which is in another cell."""
    from vitreous.errors import escape_unprintable

    text = error.removeprefix(f"{escape_unprintable(path)}: ")
    return text if text.startswith("cannot be read") else f"cannot be read: {text}"


def print_unreadable(console: Console, messages: Sequence[str], num_unreadable: int, total: int) -> None:
    """Print the number of unreadable images, and set the exit code to 3 if there are any.

    `messages` are the first error messages; empty if a table lists the images.
    """
    if num_unreadable:
        listing = "".join(f"\n  {message}" for message in messages[:MAX_LISTED_UNREADABLE])
        omitted_text = (
            f"\n  and {num_unreadable - len(messages)} more" if messages and num_unreadable > len(messages) else ""
        )
        console.note(
            f"{num_unreadable:,} of {total:,} images could not be read{':' * bool(messages)}{listing}{omitted_text}"
        )
        console.code = UNREADABLE_EXIT_CODE
