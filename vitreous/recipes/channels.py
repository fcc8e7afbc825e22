"""Support images that are not 8-bit RGB or grey, and clips, volumes and signals: detect the format of a dataset,
measure channel statistics, disable colour augmentation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from vitreous.config import set_dotted_paths
from vitreous.data.annotations.target import AnnotatedSplit
from vitreous.data.augmentation.augment import Augment
from vitreous.data.layouts.video import ClipFiles, open_sample
from vitreous.data.modalities.bands import BandPreprocess
from vitreous.data.modalities.table import find_modality
from vitreous.data.split import ArraySplit, Data, Split
from vitreous.data.statistics import measure_channel_statistics
from vitreous.errors import DataError, UsageError
from vitreous.objectives.base import ObjectiveConfig
from vitreous.recipes.derive import NoteCallback, get_objective_config
from vitreous.recipes.options import TrainOptions
from vitreous.recipes.recipe import DatasetInfo
from vitreous.training.run import Run
from vitreous.weights.adopt import WeightsInfo

FORMAT_SETTINGS = ("name", "numbers")  # fields of the preprocessing that determine how ambiguous files are read
#: sample format (`Preprocess.form`) -> function (objective, whether samples are annotated) that returns whether the
#: objective supports it, and the hint if it does not
FORM_SUPPORT: dict[str, tuple[Callable[[type[ObjectiveConfig], bool], bool], str]] = {
    "images": (lambda objective, is_annotated: True, ""),
    "arrays": (
        lambda objective, is_annotated: bool(objective.annotated if is_annotated else objective.takes_volumes),
        "leave --recipe out to learn classes",
    ),
    "clips": (
        lambda objective, is_annotated: objective.takes_clips or objective.generates,
        "leave --recipe out to learn classes, use --recipe videomae without labels, or --recipe sit to generate clips",
    ),
}
MAX_PROBED_SAMPLES = 100  # number of first images of which at least one must be readable


def infer_dataset_info(data: Data, options: TrainOptions, start: WeightsInfo | None = None) -> DatasetInfo:
    """Infer the properties of a dataset that a recipe requires, from its first readable image.

    `--preprocess.numbers` and `--preprocess.name`, or else the initial weights `start`, define how ambiguous files are
    read, such as 16-bit grey images. Raises DataError if none of the first images is readable. Raises UsageError if the
    weights have another number of channels, or if the modality is not supported (`check_modality`).
    """
    split = data.split("train")
    check_modality(data, options, start)
    first_error, format_settings = None, collect_format_settings(options, start)
    for sample in range(min(len(split), MAX_PROBED_SAMPLES)):
        try:
            channels = start.config.channels if start else None
            info = read_sample_info(split, sample, format_settings, channels)
            stills = isinstance(split, ClipFiles) and split.num_stills > 0
            return replace(info, latents=data.latents, has_stills=stills)
        except DataError as error:
            first_error = first_error or error
    reason, hint = (f"; {first_error.message}", first_error.hint) if first_error else ("", "")
    raise DataError(
        f"{data.name}: none of the first {MAX_PROBED_SAMPLES} images can be read{reason}",
        hint or "fix or delete these images",
    )


def check_modality(data: Data, options: TrainOptions, start: WeightsInfo | None) -> None:
    """Raise UsageError if the initial weights or the objective do not support the modality of the data, or if an option
    is set that is for another modality. Weights for images may initialise a model for clips."""
    split, objective = data.split("train"), get_objective_config(options)
    modality = find_modality(split)
    if (
        start is not None
        and (weights_noun := get_weights_noun(start)) != modality.noun
        and (weights_noun, modality.noun) != ("images", "clips")
    ):
        problem = f"the weights of --init {options.init} are for {weights_noun}, but the data are {modality.noun}"
        raise UsageError(problem, "leave --init out")
    supports, hint = FORM_SUPPORT[modality.form]
    is_annotated = isinstance(split, AnnotatedSplit)
    if not supports(objective, is_annotated):
        hint = "use --recipe segment to learn a class for each voxel" if is_annotated else hint
        raise UsageError(f"{data.name} contains {modality.noun}, but {objective.name} needs images", hint)
    if modality.noun != "images" and options.native_aspect:
        problem = f"--native-aspect is for images, and {data.name} contains {modality.noun}"
        raise UsageError(problem, "leave --native-aspect out")
    if not modality.is_animated and (options.frames is not None or options.stride is not None):
        raise UsageError(
            f"--frames and --stride are for clips, and {data.name} contains {modality.noun}",
            "leave --frames and --stride out",
        )


def get_weights_noun(start: WeightsInfo) -> str:
    """Return the noun for the inputs of initial weights, such as images or clips, from their preprocessing or the axes
    of their model."""
    config, preprocess = start.config, start.preprocess
    if preprocess is not None and len(preprocess.image) == len(config.image):
        return preprocess.noun
    noun = "clips" if config.has_time_axis else "volumes"
    return {1: "signals", 2: "images"}.get(len(config.image), noun)


def collect_format_settings(options: TrainOptions, start: WeightsInfo | None) -> dict[str, str]:
    """Return the preprocessing settings that determine how ambiguous files are read: those of the options, or else
    those of the initial weights. Raises UsageError for invalid values."""
    selected = {
        path: options.settings[f"preprocess.{path}"]
        for path in FORMAT_SETTINGS
        if f"preprocess.{path}" in options.settings
    }
    if not selected:
        return start.preprocess.form_settings if start and start.preprocess else {}
    values = {path: values[0] for path, values in selected.items()}
    if "numbers" in selected:
        set_dotted_paths(BandPreprocess((1, 1)), {"numbers": selected["numbers"]}, "preprocess.")
    return values


def read_sample_info(split: Split, sample: int, format_settings: dict[str, str], channels: int | None) -> DatasetInfo:
    """Read the properties of the dataset from one of its images. `channels` is the number of channels of the initial
    weights, None without weights. Raises DataError if the image is unreadable, UsageError if its channels differ from
    the weights'."""
    is_grey = isinstance(split, ArraySplit) and split.pixels.ndim == 3
    raw, name = open_sample(split, sample), split.name(sample)
    form = find_modality(split).read_form(raw, name, channels or (1 if is_grey else None), format_settings)
    check_channels(form.channels, channels)
    return DatasetInfo(len(split), form.size, form.channels, form.preprocess)


def check_channels(image_channels: int, weights_channels: int | None) -> None:
    """Raise UsageError if the number of channels of the images differs from that of the initial weights; None: there
    are no weights."""
    if weights_channels not in (None, image_channels):
        hint = f"convert the weights: vitreous convert ... --channels {image_channels}"
        raise UsageError(f"the images have {image_channels} channels, but the weights need {weights_channels}", hint)


def measure_channel_moments(
    run: Run,
    info: DatasetInfo,
    split: Split,
    start: WeightsInfo | None,
    options: TrainOptions,
    workers: int,
    note: NoteCallback,
) -> Run:
    """Set the mean and standard deviation of the run's channels, and disable colour augmentation if the images require
    it.

    They are measured on the training images, except in two cases. Values that the user set are kept, and so are those
    of initial weights for the same channels and value type. Latents are scaled as their autoencoder defines. `note`
    receives messages about the changes.
    """
    preprocess = run.preprocess
    if not preprocess.measures_moments:
        return run
    if not preprocess.shares_moments(start.preprocess if start else None):
        if info.latents is not None:
            moments, origin = info.latents.normalisation(preprocess.channels), f"those of {info.latents.autoencoder}"
        else:
            moments, origin = measure_channel_statistics(split, preprocess, workers), "measured on the training images"
        measured = dict(zip(("mean", "std"), moments, strict=True))
        preprocess = replace(
            preprocess,
            **{name: values for name, values in measured.items() if f"preprocess.{name}" not in options.settings},
        )
        note(f"{preprocess.channels} channels of {preprocess.value_type}: mean and standard deviation are {origin}")
    views = run.views.without_colour_transforms() if isinstance(run.views, Augment) else run.views
    if views != run.views:
        note("colour augmentation is disabled")
    return replace(run, preprocess=preprocess, views=views)
