"""The command `train`: plan a run, train, evaluate and save the model."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, cast

import torch

from vitreous.config import apply_keyword_options, list_differences
from vitreous.data.exclusions import read_exclusion_list
from vitreous.data.pairs import get_tokenizer
from vitreous.data.split import Data, Split
from vitreous.errors import UsageError, check_path_argument
from vitreous.jobs.evaluate_run import evaluate_run
from vitreous.jobs.plan import LATEST_RUN, is_extending_complete_run, open_resumed_folder, plan_run, resolve_data_option
from vitreous.jobs.transfer import (
    TRIALS_FILE,
    build_initial_document,
    check_lr_grid_options,
    plan_transfer_protocol,
    run_transfer_protocol,
)
from vitreous.progress import NullListener, ProgressDisplay, ProgressListener
from vitreous.recipes.options import TrainOptions
from vitreous.system.machine import describe_emulation, describe_environment, pick_device
from vitreous.tasks.documents import RunSummary
from vitreous.training.best import check_selection
from vitreous.training.folder import RunFolder
from vitreous.training.live import show_live_curves
from vitreous.training.probe import find_micro_batch
from vitreous.training.ranks import Ranks, count_restarts, get_launch_name, process_group
from vitreous.training.run import Run
from vitreous.training.scale import check_activation_memory
from vitreous.training.session import Session
from vitreous.training.slices import check_processes
from vitreous.training.trackers.trackers import choose_trackers, run_trackers

if TYPE_CHECKING:
    from vitreous.keywords import TrainKeywords

AnnounceCallback = Callable[[Run, Data], None]  # called with a run and its data before the first step


def train(
    data: str | os.PathLike[str] = "",
    listener: ProgressListener | None = None,
    progress: bool = True,
    **options: Unpack[TrainKeywords],
) -> RunSummary:
    """Train a model on a dataset and return the run's summary. `options` are the fields of `TrainOptions`, as on the
    command line.

    With `resume=True`, the dataset of the run is used if none is passed. `progress` prints progress and notes to
    stderr: a bar in a terminal, otherwise lines. `progress=False` prints nothing. A `listener` receives progress and
    notes instead.

    If there is a test split, the trained model is evaluated on it once, at the end. Raises UsageError (also for an
    unknown option, with the most similar name), DataError, WeightsError, NonFiniteError, ResourceError or Interrupted,
    each with a hint.
    """
    check_path_argument(data, "train(data)")
    refuse_modules(dict(options))
    known_keywords = ("data", "listener", "progress")
    (train_options,) = apply_keyword_options(
        "train", dict(options), TrainOptions(os.fspath(data)), extra_names=known_keywords
    )
    if listener is not None or not progress:
        return cast(RunSummary, launch_training(train_options, listener or NullListener()))
    display = ProgressDisplay()
    try:
        return cast(RunSummary, launch_training(train_options, display))
    finally:
        display.close()


def refuse_modules(options: dict[str, Any]) -> None:
    """Raise UsageError if an option is a torch.nn.Module, because a run builds its model from a name."""
    for name, option in options.items():
        if isinstance(option, torch.nn.Module):
            hint = "give a name that `vitreous models` lists, such as model='ViT-S/16'"
            hint += "; to start from this module's weights, call vitreous.save(module, FOLDER) and give init=FOLDER"
            raise UsageError(f"train({name}=…) must be a name, not a module ({type(option).__name__})", hint)


def launch_training(
    options: TrainOptions, listener: ProgressListener, announce: AnnounceCallback = lambda run, data: None
) -> dict[str, Any]:
    """Train with these options in every process that `torchrun` started; only the main process reports and writes
    files.

    `announce` is called with the run and its dataset before the first step. Raises the errors of `train`.
    """
    options = resolve_data_option(options)
    with process_group(pick_device(options.device or "auto"), options.timeout or Run.timeout) as ranks:
        return run_training(options, listener if ranks.is_main else NullListener(), ranks, announce)


def run_training(
    options: TrainOptions, listener: ProgressListener, ranks: Ranks, announce: AnnounceCallback
) -> dict[str, Any]:
    """Plan, train and evaluate a run as one process among `ranks`. Returns the summary. `announce` is called with the
    run and its dataset before the first step."""
    options = resume_after_restart(options, listener, ranks)
    resumed, tracker_names = None, ()
    if options.resume:
        options = replace(options, out=ranks.broadcast_text(options.out or str(Path(LATEST_RUN).resolve())))
        resumed = open_resumed_folder(options, listener)
        check_lr_grid_options(options, resumed)
        if resumed.summary.is_file() and not is_extending_complete_run(resumed, options):
            listener.note(f"{resumed.path} is already complete")
            return json.loads(resumed.summary.read_text("utf-8"))
    else:
        check_lr_grid_options(options)
        if options.out and ranks.is_main:
            RunFolder(Path(options.out)).refuse_existing()
    if ranks.is_main:
        tracker_names = choose_trackers(options.log_to, resumed, listener)
    folder, run, inputs, dataset = plan_run(options, listener, resumed)
    folder = RunFolder(Path(ranks.broadcast_text(str(folder.path))))
    if options.micro_batch == "auto":
        run = find_micro_batch(run, inputs, folder, ranks, listener.note)
    check_processes(run, ranks)
    check_activation_memory(run, ranks.world)
    if options.lr_grid is None:  # the transfer protocol rejects both
        check_selection(run, inputs.val)
    if ranks.is_main:
        trials = (
            {}
            if options.lr_grid is None or resumed
            else {"trials": build_initial_document(plan_transfer_protocol(run, dataset, inputs, options))}
        )
        excluded_names = sorted(read_exclusion_list(run.data.exclude)) if run.data.exclude and not resumed else None
        excluded = {} if excluded_names is None else {"excluded": excluded_names}
        prepare_run_folder(
            folder, run, {"data": describe_run_data(run, dataset), **trials, **excluded}, resumed, inputs.train
        )
        announce(run, dataset)
    ranks.wait()
    if emulation_warning := describe_emulation(run.precision, run.device):
        listener.note(emulation_warning)
    with folder.locked() if ranks.is_main else nullcontext(), folder.explain_resume():
        display = listener if options.live and isinstance(listener, ProgressDisplay) else None
        with (
            run_trackers(tracker_names, folder, listener, options.log_timeout) as trackers,
            show_live_curves(run.steps, display) if display else nullcontext() as curves,
        ):
            sinks = (trackers,) if curves is None else (trackers, curves)
            folder = replace(folder, sinks=sinks if ranks.is_main else ())
            if (folder.path / TRIALS_FILE).is_file():
                summary = run_transfer_protocol(
                    folder, run, inputs=inputs, dataset=dataset, listener=listener, ranks=ranks, ray=options.ray
                )
            else:
                summary = Session(run, inputs, folder, listener, ranks=ranks).train()
            if ranks.is_main:
                evaluate_run(folder, run, dataset=dataset, summary=summary, listener=listener, trackers=trackers)
    return summary


def resume_after_restart(options: TrainOptions, listener: ProgressListener, ranks: Ranks) -> TrainOptions:
    """Set `resume` in the options if `torchrun` has restarted processes that had started the run.

    With --out, the run in that folder is resumed if the same `torchrun` job started it. Without --out, the newest run
    is resumed if the same job started it and an agent counts a restart, because a job may train several runs. The main
    process decides for all processes, so that a folder that it has just created is not resumed.
    """
    launch_name = get_launch_name()
    if options.resume or not launch_name:
        return options
    if not options.out and not ranks.all_reduce_max([count_restarts()], "cpu")[0]:
        return options
    folder = RunFolder(Path(options.out or LATEST_RUN).resolve())
    is_from_launch = ranks.is_main and folder.config.is_file() and folder.launch() == launch_name
    run_path = ranks.broadcast_text(str(folder.path) if is_from_launch else "")
    if not run_path:
        return options
    listener.note(f"torchrun restarted the processes: resuming {run_path}")
    return replace(options, out=run_path, resume=True)


def prepare_run_folder(
    folder: RunFolder, run: Run, documents: dict[str, Any], resumed: RunFolder | None, train: Split
) -> None:
    """Create the folder of a new run with its `documents` and the tokenizer of the training split, or record changed
    settings in the folder of a resumed run."""
    command = shlex.join(["vitreous", *sys.argv[1:]])
    if resumed is None:
        launch = {"torchrun": name} if (name := get_launch_name()) else {}
        folder.create(run, command, {"environment": describe_environment() | launch, **documents}, get_tokenizer(train))
        return
    if list_differences(resumed.run(), run):
        folder.record_resumption(run, command, documents)
    folder.summary.unlink(missing_ok=True)  # a complete run that is extended has a summary


def describe_run_data(run: Run, dataset: Data) -> dict[str, Any]:
    """Return the content of `data.json`: source, classes, splits and notes of the dataset of a run."""
    return {
        "source": run.data.source,
        "fingerprint": run.data.fingerprint,
        "classes": list(dataset.classes),
        "targets": list(dataset.targets),
        "titles": dataset.titles,
        "split_seed": run.data.split_seed,
        "splits": {name: len(split) for name, split in dataset.splits.items()},
        "train_images": run.data.images,
        "excluded_by": run.data.exclude,
        "notes": dataset.notes,
    }
