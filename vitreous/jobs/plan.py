"""Plan a run before its first step: its folder, its config and its data."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from itertools import chain, count
from pathlib import Path

from vitreous.config import from_yaml, list_differences
from vitreous.data.sources import resolve_source
from vitreous.data.split import Data
from vitreous.errors import DataError, UsageError
from vitreous.jobs.data import prepare_data
from vitreous.models.names import config_from_name
from vitreous.models.zoo import build_without_init
from vitreous.progress import ProgressListener
from vitreous.recipes.derive import apply_train_options
from vitreous.recipes.options import TrainOptions
from vitreous.recipes.own_aspect import parse_token_range
from vitreous.training.batches import RunInputs
from vitreous.training.folder import RunFolder
from vitreous.training.run import Run
from vitreous.weights.model_paths import is_run_folder

LATEST_RUN = "runs/latest"  # link to the newest run
MAX_RUN_NAME_BYTES = 160  # file systems allow 255 bytes, and a date and a number are added to the name
#: settings that a resumed run cannot change, because they define the model or the order of its training samples
FIXED_SETTINGS = (
    "model.",
    "data.source",
    "data.classes",
    "data.targets",
    "data.split_seed",
    "data.group_by",
    "data.axes",
    "data.ignore_index",
    "data.exclude",
    "seed",
    "init",
    "tune.",
    "objective.name:",
    "objective.loss:",
    "objective.teacher:",
    "preprocess.",
    "batch_size:",
    "accumulate:",
)
#: settings that a resumed run can change, because they do not affect its results
CHANGEABLE_SETTINGS = ("timeout:", "data.workers:", "keep:", "device:", "micro_batch:")


def resolve_data_option(options: TrainOptions) -> TrainOptions:
    """Return options with a dataset: if none is set, that of the run to resume. `--resume RUN` becomes `--resume
    --out RUN`.

    Raises UsageError if neither a dataset nor a run to resume is set, or if a run is given as the dataset.
    """
    options.require_data_source()
    if options.data and is_run_folder(options.data):
        if not options.resume:
            hint = f"to continue the run: vitreous train --resume {options.data}; "
            hint += f"to start from its weights: vitreous train DATA --init {options.data}"
            raise UsageError(f"{options.data} is a run, not a dataset", hint)
        if options.out and Path(options.out).resolve() != Path(options.data).resolve():
            raise UsageError(
                f"--resume {options.data} and --out {options.out} are different runs", "leave one of them out"
            )
        options = replace(options, out=options.data, data="")
    return (
        options if options.data else replace(options, data=RunFolder(Path(options.out or LATEST_RUN)).run().data.source)
    )


def plan_run(
    options: TrainOptions, listener: ProgressListener, folder: RunFolder | None = None, dataset: Data | None = None
) -> tuple[RunFolder, Run, RunInputs, Data]:
    """Plan a run before its first step. Returns its folder, the run, its inputs and its dataset.

    Args:
        options: the options of `train`.
        listener: receives notes about the data and derived settings.
        folder: the folder of the run to resume, if `open_resumed_folder` has already checked it.
        dataset: the dataset of a new run if it is already open, such as data in memory.

    Raises UsageError for options that contradict a config or the resumed run, DataError if the data differ from those
    of that run.
    """
    if options.resume:
        folder = folder or open_resumed_folder(options, listener)
        stored_run = folder.run()
        source = options.data if is_moved_data(options.data, stored_run.data.source) else stored_run.data.source
        dataset, run, inputs = prepare_data(source, stored_run, options, listener, folder)
        if source != stored_run.data.source:
            run = replace(run, data=replace(run.data, source=resolve_source(source)))
        if (fingerprint := dataset.fingerprint()) != stored_run.data.fingerprint:
            if not options.allow_data_change or dataset.classes != stored_run.data.classes:
                hint = "restore the files, or start a new run" + (
                    ", or use --allow-data-change" if dataset.classes == stored_run.data.classes else ""
                )
                raise DataError(f"{options.data} has changed since the run started", hint)
            listener.note(f"{options.data} has changed since the run started; continuing with the current files")
            run = replace(run, data=replace(run.data, fingerprint=fingerprint, images=len(inputs.train)))
        return folder, run, inputs, dataset
    config_run = from_yaml(Run, read_config_file(options.config)) if options.config else None
    if config_run and (conflicts := list_conflicting_options(config_run, options)):
        raise UsageError(
            f"options differ from {options.config}: {', '.join(conflicts)}", "leave these options or --config out"
        )
    if options.keep_best and options.keep_last:
        raise UsageError("--keep-best and --keep-last exclude each other", "leave one of them out")
    dataset, run, inputs = prepare_data(dataset or options.data, config_run, options, listener)
    if config_run is None and should_keep_best(run, inputs, options):
        run = replace(run, keep_best=True)
    build_without_init(run.model)  # rejects sizes that the layers do not support, before a folder is created
    out = (
        Path(options.out)
        if options.out
        else find_free_run_path(f"{time.strftime('%Y-%m-%d-%H%M%S')}-{build_run_name(run, dataset)}")
    )
    return RunFolder(out), run, inputs, dataset


def should_keep_best(run: Run, inputs: RunInputs, options: TrainOptions) -> bool:
    """Return whether a run keeps the weights of its best evaluation by default: if it learns from labels, masks or
    boxes and has validation images."""
    has_targets = run.objective.labelled or bool(run.objective.annotated)
    return has_targets and bool(inputs.val) and options.lr_grid is None and not options.keep_last


def find_free_run_path(name: str) -> Path:
    """Return a path in `runs` that does not exist. If `name` exists, because another run started in the same second, a
    number from 2 is appended."""
    numbered = (f"{name}-{number}" for number in count(2))
    return next(path for path in map(Path("runs").joinpath, chain([name], numbered)) if not path.exists())


def open_resumed_folder(options: TrainOptions, listener: ProgressListener | None = None) -> RunFolder:
    """Open the folder of the run to resume. Raises UsageError, listing the differences, if options differ from the
    run's settings.

    With `--override`, differences are noted instead, unless they change the model, the data or their order.
    """
    folder = RunFolder(Path(options.out or LATEST_RUN))
    stored_run = folder.run()
    if (name := options.settings.get("objective.name", [stored_run.objective.name])) != [stored_run.objective.name]:
        change = f"objective.name: {stored_run.objective.name} -> {' '.join(name)}"
        problem = f"a resumed run cannot change these settings:\n    {change}"
        raise UsageError(
            problem, f"leave objective.name out, or start a new run from its weights: --init {folder.path}"
        )
    changed = [
        line
        for line in list_differences(stored_run, apply_train_options(stored_run, options))
        if not line.startswith(CHANGEABLE_SETTINGS)
    ]
    fixed = [line for line in changed if line.startswith(FIXED_SETTINGS)] + list_conflicting_options(
        stored_run, options
    )
    if resolve_source(options.data) != resolve_source(stored_run.data.source) and not is_moved_data(
        options.data, stored_run.data.source
    ):
        fixed.append(f"data: {stored_run.data.source} -> {options.data}")
    rejected = fixed if options.override else [*dict.fromkeys([*changed, *fixed])]
    if rejected:
        listing = "".join(f"\n    {line}" for line in rejected)
        restriction = "cannot change these settings" if options.override else "keeps its settings, but these differ"
        hint = "" if fixed else ", or use --override"
        if any(line.startswith("recipe:") for line in rejected):
            hint = f", or start a new run from its weights: --init {folder.path}"
        raise UsageError(f"a resumed run {restriction}:{listing}", "leave these options out" + hint)
    if changed and listener:
        listener.note("continuing with changed settings: " + "; ".join(changed))
    return folder


def is_extending_complete_run(folder: RunFolder, options: TrainOptions) -> bool:
    """Return whether the options extend a complete run. Raises UsageError if they change other settings, because no
    steps are left for which these could have an effect."""
    stored_run = folder.run()
    extended_run = apply_train_options(stored_run, options)
    if extended_run.total > stored_run.total:
        return True
    if changed := [
        line for line in list_differences(stored_run, extended_run) if not line.startswith(CHANGEABLE_SETTINGS)
    ]:
        listing = "".join(f"\n    {line}" for line in changed)
        hint = f"raise --epochs or --steps, or start a new run from its weights: --init {folder.path}"
        raise UsageError(f"{folder.path} is complete, so these settings have no effect:{listing}", hint)
    return False


def is_moved_data(source: str, stored_source: str) -> bool:
    """Return whether `source` may be the moved dataset of a run: it exists, and nothing exists at the run's path
    `stored_source`. The fingerprint then decides."""
    return (
        resolve_source(source) != resolve_source(stored_source)
        and not os.path.lexists(stored_source)
        and os.path.exists(source)
    )


def list_conflicting_options(run: Run, options: TrainOptions) -> list[str]:
    """List the options for model, sizes, recipe and targets that differ from those of `run`, one line each."""
    run_values = {
        "model": run.model.name(),
        "image_size": run.model.image[-1],
        "patch_size": run.model.patch[-1],
        "frames": run.preprocess.frames,
        "stride": run.preprocess.stride,
        "recipe": run.recipe,
        "targets": run.data.targets,
        "buckets": tuple("x".join(map(str, size)) for size in run.preprocess.buckets),
        "native_aspect": not run.preprocess.stacks,
        "tokens": (getattr(run.views, "fewest_tokens", 0) or run.max_image_tokens, run.max_image_tokens),
    }
    option_values = {
        "model": options.model and config_from_name(options.model).name(),
        "image_size": options.image_size,
        "patch_size": options.patch_size,
        "frames": options.frames,
        "stride": options.stride,
        "recipe": options.recipe,
        "targets": options.targets and tuple(options.targets),
        "buckets": options.buckets or (run_values["buckets"] or ("chosen",) if options.buckets is not None else None),
        "native_aspect": options.native_aspect or None,
        "tokens": parse_token_range(options.tokens) if options.tokens else None,
    }
    return [
        f"{name}: {run_values[name]} -> {option_values[name]}"
        for name in run_values
        if option_values[name] not in (None, run_values[name])
    ]


def build_run_name(run: Run, dataset: Data) -> str:
    """Build the name of a run from the names of its model and dataset, as a valid file name of at most
    MAX_RUN_NAME_BYTES bytes."""
    text = f"{run.model.name()}-{Path(dataset.name).name}"
    name = "".join(c if c.isalnum() or c in "-+._" else "-" for c in text)
    return os.fsencode(name)[:MAX_RUN_NAME_BYTES].decode("utf-8", "ignore")


def read_config_file(path: str) -> str:
    """Read the text of a config file. Raises UsageError if it cannot be read."""
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"cannot read the config {path} ({type(error).__name__})", "give the path of a config.yaml"
        ) from None
