"""What a run does about pictures that are not RGB or grey at 8 bits: find out, measure their channels, leave colours
alone."""

from __future__ import annotations

from dataclasses import replace

from vitreous.config import set_paths
from vitreous.data.annotations.target import AnnotatedSplit, axes_of, kind_of
from vitreous.data.augmentation.augment import Augment
from vitreous.data.decoding.clip import Clip
from vitreous.data.decoding.decode import decode
from vitreous.data.decoding.spectral import channel_form, read_bands, read_channels
from vitreous.data.decoding.volumes import volume_form
from vitreous.data.layouts.video import ClipFiles, open_sample
from vitreous.data.preprocess import Preprocess
from vitreous.data.split import Arrays, Data, Split
from vitreous.data.statistics import statistics
from vitreous.errors import DataError, UsageError
from vitreous.recipes.derive import Note, objective_of
from vitreous.recipes.options import TrainOptions
from vitreous.recipes.recipe import DatasetInfo
from vitreous.training.run import Run
from vitreous.weights.adopt import Start

PROBED = 100  # pictures of which one must be readable


def detect_info(opened: Data, options: TrainOptions, start: Start | None = None) -> DatasetInfo:
    """What the recipe has to know of the data: its first readable picture stands for all.

    `--preprocess.numbers`, or else the weights that the run starts from, say how files are to be read that can be read
    in two ways, as 16-bit greys can. Raises DataError where none of the first can be read, UsageError for weights of
    another number of channels, and for volumes and signals where the objective takes pictures.
    """
    split = opened.split("train")
    check_kind(opened, options, start)
    first = None
    for sample in range(min(len(split), PROBED)):
        try:
            channels = start.config.channels if start else None
            info = read_info(split, sample, requested_numbers(options, start), channels)
            stills = isinstance(split, ClipFiles) and split.stills > 0
            return replace(info, latents=opened.latents, stills=stills)
        except DataError as error:
            first = first or error
    why, hint = (f"; {first.message}", first.hint) if first else ("", "")
    raise DataError(f"{opened.name}: none of the first {PROBED} images can be read{why}", hint or "mend or remove them")


def check_kind(opened: Data, options: TrainOptions, start: Start | None) -> None:
    """Raise UsageError for weights of another kind of images than the data, for volumes with masks where the objective
    does not learn a class for each voxel, for volumes, signals and clips where it takes pictures, and for options of
    clips where there are none. Weights of pictures start a model of clips."""
    kind, objective = kind_of(opened.split("train")), objective_of(options)
    if start is not None:
        config = start.config
        solid = "clips" if config.has_time_axis else "volumes"
        own = {1: "signals", 2: "pictures"}.get(len(config.image), solid)
        if own != kind and (own, kind) != ("pictures", "clips"):
            problem = f"the weights of --init {options.init} are for {own}, the data are {kind}"
            raise UsageError(problem, "leave --init out")
    masked = isinstance(opened.split("train"), AnnotatedSplit)
    if kind == "volumes" and masked and not objective.annotated:
        hint = "learn a class for each voxel: --recipe segment"
        raise UsageError(f"{opened.name} has volumes, and {objective.name} takes pictures", hint)
    if kind in ("volumes", "signals") and not (objective.takes_volumes or masked):
        hint = "learn their classes: leave --recipe out"
        raise UsageError(f"{opened.name} has {kind}, and {objective.name} takes pictures", hint)
    if kind == "clips" and not (objective.takes_clips or objective.generates):
        hint = "learn their classes: leave --recipe out; without labels: --recipe videomae; to make clips: --recipe sit"
        raise UsageError(f"{opened.name} has clips, and {objective.name} takes pictures", hint)
    if kind != "pictures" and options.native_aspect:
        raise UsageError(f"{opened.name} has {kind}, which a model takes at one size", "leave --native-aspect out")
    if kind != "clips" and (options.frames is not None or options.stride is not None):
        raise UsageError(f"--frames and --stride are for clips, and {opened.name} has {kind}", "leave them out")


def requested_numbers(options: TrainOptions, start: Start | None) -> str | None:
    """How files are to be read; None where nothing says so."""
    if words := options.settings.get("preprocess.numbers"):
        return set_paths(Preprocess((1, 1)), {"numbers": words}, "preprocess.").numbers
    numbers = start.preprocess.numbers if start and start.preprocess else "colours"
    return None if numbers == "colours" else numbers


def read_info(split: Split, sample: int, numbers: str | None, channels: int | None) -> DatasetInfo:
    """The facts that one image tells; `channels` are those of the weights. Raises DataError where it cannot be read,
    UsageError where it has other channels than the weights take."""
    raw, name = open_sample(split, sample), split.name(sample)
    if isinstance(raw, Clip):
        return DatasetInfo(len(split), (len(raw), *raw.size), channels or 3)
    if axes_of(split) != 2:
        count, size = volume_form(raw, name, axes_of(split))
        check_channels(count, channels)
        return DatasetInfo(len(split), size, count, "voxels")
    info = channel_form(raw, name) if numbers is None else None
    if numbers not in (None, "colours"):
        info = len(read_channels(raw, name)), numbers
    if info is None:
        picture = decode(raw, 3, name)
        grey = isinstance(split, Arrays) and split.pixels.ndim == 3
        return DatasetInfo(len(split), (picture.height, picture.width), channels or (1 if grey else 3))
    check_channels(info[0], channels)
    band = read_bands(raw, *info, name)[0]
    return DatasetInfo(len(split), (band.height, band.width), *info)  # type: ignore[arg-type]


def check_channels(own: int, taken: int | None) -> None:
    """Raise UsageError for images of other channels than weights take; None where there are no weights."""
    if taken not in (None, own):
        hint = f"vitreous convert ... --channels {own} makes weights that do"
        raise UsageError(f"the images have {own} channels, the weights take {taken}", hint)


def measure_channels(
    run: Run, info: DatasetInfo, split: Split, start: Start | None, options: TrainOptions, workers: int, note: Note
) -> Run:
    """The run with its channels measured, and without augmentation that is made for colours, where the pictures ask for
    it.

    Mean and deviation that the user gave stay, and those of weights that were trained on as many channels of such
    numbers; latents are scaled as their autoencoder says.
    """
    one_by_one = info.numbers == "voxels" and run.preprocess.standardise == "each"
    if info.numbers == "colours" or one_by_one:
        return run
    seen = replace(run.preprocess, numbers=info.numbers)
    known = start.preprocess if start else None
    own = (seen.channels, seen.numbers, seen.standardise)
    if known is None or (known.channels, known.numbers, known.standardise) != own:
        if info.latents is not None:
            moments, whence = info.latents.normalisation(seen.channels), f"those of {info.latents.autoencoder}"
        else:
            moments, whence = statistics(split, seen, workers), "measured on the training images"
        measured = dict(zip(("mean", "std"), moments, strict=True))
        seen = replace(
            seen, **{name: values for name, values in measured.items() if f"preprocess.{name}" not in options.settings}
        )
        note(f"{seen.channels} channels of {seen.numbers}: their mean and deviation are {whence}")
    views = run.views.geometric() if isinstance(run.views, Augment) else run.views
    if views != run.views:
        note("augmentation that is made for colours is left out")
    return replace(run, preprocess=seen, views=views)
