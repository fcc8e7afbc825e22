"""The transfer protocol of the ViT paper: choose the learning rate on held-out images, then train on all images.

arXiv:2010.11929, appendix B.1.1. A trial trains with each learning rate of a grid (Table 4), without a small share of
the training images, and is evaluated on that share. The best learning rate then trains on all images. The test split is
not opened.

    RUN/trials.json        the grid, the held-out share, the metrics of each trial, the choice and its reason
    RUN/trials/lr-0.003/   the run folder of the trial of each learning rate, without checkpoints
    RUN/report.html        the content of trials.json as a page
"""

from __future__ import annotations

import json
import math
from dataclasses import KW_ONLY, asdict, dataclass, replace
from typing import Any

import numpy as np

from vitreous.config import from_builtins, to_yaml
from vitreous.data.holdout import draw_stratified_splits
from vitreous.data.split import Data
from vitreous.errors import DataError, Interrupted, NonFiniteError, UsageError
from vitreous.jobs.cluster import run_trials_on_ray
from vitreous.jobs.trial import raise_if_stopped, run_trial
from vitreous.progress import NullListener, ProgressListener
from vitreous.recipes.derive import get_objective_config
from vitreous.recipes.options import TrainOptions
from vitreous.recipes.recipe import HOLD_OUT_SHARES
from vitreous.recipes.registry import get_hold_out_share, get_lr_grid
from vitreous.reports.pages import report
from vitreous.system.disk import write_text_atomic
from vitreous.tasks.metrics import METRICS
from vitreous.tasks.report import get_primary_key, get_report_score
from vitreous.training.batches import RunInputs
from vitreous.training.folder import RunFolder
from vitreous.training.ranks import SINGLE_PROCESS, Ranks
from vitreous.training.run import Run
from vitreous.training.session import Session
from vitreous.training.signals import StopSignals

TRIALS_FILE = "trials.json"


@dataclass(frozen=True)
class TransferProtocol:
    """The plan of a transfer protocol.

    - `grid`: the learning rates of the trials, ascending.
    - `held_out_share`, `held_out`: the share and the number of the images that trials hold out for validation.
    - `images`: the number of training images of a trial.
    - `lr`, `matrix_lr`: the learning rates of the recipe. Muon's learning rate `matrix_lr` keeps its ratio to `lr` in
      every trial.
    """

    grid: tuple[float, ...]
    held_out_share: float
    images: int
    held_out: int
    _: KW_ONLY
    lr: float
    matrix_lr: float


@dataclass(frozen=True)
class TrialResult:
    """The result of a trial on the held-out images. `score` is the value of the primary metric `metric`, whose `better`
    values are higher or lower.

    A trial whose loss was not finite has a `failure` and no metrics.
    """

    lr: float
    folder: str
    score: float | None = None
    nll: float | None = None
    _: KW_ONLY
    loss: float | None = None  # last training loss
    seconds: float | None = None  # wall time
    failure: str | None = None
    metric: str = "top1"
    better: str = "higher"

    @property
    def sort_key(self) -> tuple[float, float]:
        """The sort key of the trial, larger is better: its `Report.score`."""
        return get_report_score({"primary": "score", "score": self.score, "nll": self.nll, "better": self.better})


@dataclass(frozen=True)
class LearningRateChoice:
    """The chosen learning rate, the reason, and a warning if the grid may be too narrow."""

    lr: float
    reason: str
    warning: str | None = None


def check_lr_grid_options(options: TrainOptions, folder: RunFolder | None = None) -> None:
    """Raise UsageError for options that conflict with --lr-grid, or with the transfer protocol of the `folder` to
    resume."""
    resumed = folder is not None and (folder.path / TRIALS_FILE).is_file()
    if resumed and (options.override or options.allow_data_change):
        raise UsageError(
            "--override and --allow-data-change are not supported with --lr-grid, whose trials differ only in learning "
            "rate",
            "start a new run",
        )
    if options.lr_grid is None:
        if options.ray and not resumed:
            raise UsageError("--ray needs --lr-grid", "add --lr-grid, or leave --ray out")
        return
    if folder is None and not get_objective_config(options).labelled:
        problem = f"--lr-grid needs labels to compare trials, and {options.recipe} trains without labels"
        raise UsageError(problem, "leave --lr-grid out, or use --lr")
    if options.lr is not None:
        raise UsageError("--lr and --lr-grid exclude each other", "leave one of them out")
    if any(path.replace("-", "_") in ("data.hold_out", "optimizer.lr") for path in options.settings):
        raise UsageError("--lr-grid sets optimizer.lr and data.hold_out itself", "leave these settings out")
    if any(not 0 < learning_rate < math.inf for learning_rate in options.lr_grid):
        raise UsageError(f"--lr-grid needs finite learning rates above 0, not {' '.join(map(str, options.lr_grid))}")
    if folder is None:
        return
    if not resumed:
        raise UsageError(f"{folder.path} was started without --lr-grid", "leave --lr-grid out")
    grid = read_protocol(folder)[0].grid
    if options.lr_grid and tuple(sorted(set(options.lr_grid))) != grid:
        raise UsageError(f"the run in {folder.path} uses the grid {' '.join(map(str, grid))}", "leave --lr-grid out")


def plan_transfer_protocol(run: Run, dataset: Data, inputs: RunInputs, options: TrainOptions) -> TransferProtocol:
    """Plan the transfer protocol for a run on all training images. Raises UsageError for --keep-best and --early-stop,
    DataError if the held-out share of a class is less than one image."""
    if run.keep_best or run.early_stop:
        hint = "leave --keep-best and --early-stop out"
        problem = "--keep-best and --early-stop need validation images, but --lr-grid trains on all images in the end"
        raise UsageError(problem, hint)
    grid = tuple(sorted(set(options.lr_grid or get_lr_grid(run))))
    images = len(dataset.split("train"))
    share = get_hold_out_share(run) or next(share for max_images, share in HOLD_OUT_SHARES if images < max_images)
    # with small classes, a share that rounds to zero images would leave no images for validation
    if share * images < dataset.label_kind.least_held_out(run.model.classes):
        share = HOLD_OUT_SHARES[0][1]
    held_out_inputs = hold_out_inputs(dataset, inputs, share, run.data.split_seed)
    assert held_out_inputs.val is not None
    if not len(held_out_inputs.val):
        raise DataError(
            f"{dataset.name}: {share:.0%} of each class is less than one image, too few to compare learning rates",
            "set a learning rate with --lr",
        )
    return TransferProtocol(
        grid,
        share,
        images=len(held_out_inputs.train),
        held_out=len(held_out_inputs.val),
        lr=run.optimizer.lr,
        matrix_lr=run.optimizer.matrix_lr,
    )


def build_initial_document(protocol: TransferProtocol) -> dict[str, Any]:
    """Build the content of `trials.json` before the first trial."""
    return {"protocol": asdict(protocol), "trials": [], "choice": None}


def read_protocol(folder: RunFolder) -> tuple[TransferProtocol, dict[str, Any]]:
    """Read the transfer protocol from `trials.json`, and the full document."""
    document = json.loads((folder.path / TRIALS_FILE).read_text("utf-8"))
    return from_builtins(TransferProtocol, document["protocol"]), document


def hold_out_inputs(dataset: Data, inputs: RunInputs, share: float, split_seed: int) -> RunInputs:
    """Split a share of each class from the training images as `val`, and return the inputs of the trials.

    The share is drawn from all training images. Unreadable images among them are not trained on, and count as wrong in
    evaluation.
    """
    training_split = dataset.split("train")
    samples = draw_stratified_splits(training_split.labels, split_seed, {"val": share}, dataset.groups)
    readable = np.ones(len(training_split), dtype=bool)
    if inputs.train_indices is not None:
        readable = np.isin(np.arange(len(training_split)), inputs.train_indices)
    kept_indices = (np.cumsum(readable) - 1)[samples["train"][readable[samples["train"]]]]
    cached = inputs.cached[kept_indices] if inputs.cached is not None else None
    return replace(
        inputs, train=inputs.train.take(kept_indices), val=training_split.take(samples["val"]), cached=cached
    )


def set_learning_rate(run: Run, protocol: TransferProtocol, learning_rate: float) -> Run:
    """Return the run with another learning rate, and with Muon's learning rate scaled by the same factor."""
    scale = learning_rate / protocol.lr if protocol.lr else 1.0
    return replace(run, optimizer=replace(run.optimizer, lr=learning_rate, matrix_lr=protocol.matrix_lr * scale))


def run_transfer_protocol(
    folder: RunFolder,
    run: Run,
    inputs: RunInputs,
    dataset: Data,
    listener: ProgressListener,
    ranks: Ranks = SINGLE_PROCESS,
    ray: str | None = None,
) -> dict[str, Any]:
    """Run a trial for each learning rate of the grid, choose the best, and train on all images with it. An interrupted
    protocol resumes at any stage. Returns the run's summary.

    Trials run one after another in this process, or in parallel on the Ray cluster at the address `ray`. Raises
    Interrupted after a signal when the state is saved, UsageError for --ray under torchrun, and NonFiniteError if every
    trial ended with a non-finite loss. Errors of `Session` are raised again.
    """
    if ray and ranks.world > 1:
        raise UsageError(
            "--ray cannot be combined with torchrun, because Ray starts the processes", "run without torchrun"
        )
    protocol, document = read_protocol(folder)
    with (signals := StopSignals()).catch():
        trials = list_trials(folder, run, protocol, dataset)
        held_out = hold_out_inputs(dataset, inputs, protocol.held_out_share, run.data.split_seed)
        if ray:
            run_trials_on_ray(ray, trials, held_out, signals, listener)
        for index, (trial, trial_folder) in enumerate(trials, 1):
            label = f"lr {trial.optimizer.lr:g} ({index} of {len(trials)})"
            try:
                run_trial(
                    trial,
                    held_out,
                    folder=trial_folder,
                    listener=PrefixedListener(listener, label),
                    ranks=ranks,
                    signals=signals,
                )
            except Interrupted as error:
                raise make_interrupted_error(folder, error.code, f"in trial {index} of {len(trials)}") from None
        del held_out  # frees the second copy of cached images
        trials_document = json.loads(
            ranks.broadcast_text(json.dumps(build_trials_document(folder, trials, protocol)) if ranks.is_main else "")
        )
        choice = LearningRateChoice(**trials_document["choice"])
        final_run = set_learning_rate(run, protocol, choice.lr)
        if ranks.is_main:
            for text in filter(None, (f"chose lr {choice.lr:g}: {choice.reason}", choice.warning)):
                listener.note(text)
            if trials_document != document:
                write_text_atomic(folder.path / TRIALS_FILE, json.dumps(trials_document, indent=2) + "\n")
            if folder.run() != final_run:
                write_text_atomic(folder.config, to_yaml(final_run))
            report.write_report(folder.path / "report.html", folder)
        raise_if_stopped(
            signals, ranks, lambda code: make_interrupted_error(folder, code, "before the run on all images")
        )
        summary = Session(final_run, inputs, folder, listener, ranks=ranks).train() | {"lr_grid": trials_document}
    if "test" in dataset.splits and ranks.is_main:
        listener.note(f"the test split was not used; to evaluate the model on it: vitreous evaluate {folder.path}")
    return summary


def list_trials(folder: RunFolder, run: Run, protocol: TransferProtocol, dataset: Data) -> list[tuple[Run, RunFolder]]:
    """List the run and the folder of each trial. There are none if the grid has a single learning rate."""
    if len(protocol.grid) == 1:
        return []
    fingerprint = dataset.with_holdout(protocol.held_out_share, run.data.split_seed).fingerprint()
    data = replace(run.data, images=protocol.images, hold_out=protocol.held_out_share, fingerprint=fingerprint)
    trial_folders = [RunFolder(folder.path / "trials" / f"lr-{learning_rate!r}") for learning_rate in protocol.grid]
    return [
        (replace(set_learning_rate(run, protocol, learning_rate), data=data), trial_folder)
        for learning_rate, trial_folder in zip(protocol.grid, trial_folders, strict=True)
    ]


def build_trials_document(
    folder: RunFolder, trials: list[tuple[Run, RunFolder]], protocol: TransferProtocol
) -> dict[str, Any]:
    """Build the content of `trials.json` after the last trial. Raises NonFiniteError if no trial has metrics."""
    results = [read_trial_result(run, trial_folder, folder) for run, trial_folder in trials]
    return {
        "protocol": asdict(protocol),
        "trials": [asdict(result) for result in results],
        "choice": asdict(choose_learning_rate(results, protocol)),
    }


def read_trial_result(run: Run, trial: RunFolder, folder: RunFolder) -> TrialResult:
    """Read the result of a complete trial from its summary. `folder` is the folder of the whole run."""
    summary = json.loads(trial.summary.read_text("utf-8"))
    relative_path = str(trial.path.relative_to(folder.path))
    if "failure" in summary:
        return TrialResult(run.optimizer.lr, relative_path, failure=summary["failure"])
    val = summary["val"]
    nll = val.get("nll") if math.isfinite(val.get("nll") or 0.0) else None
    score, loss, seconds = val[get_primary_key(val)], summary["train"]["loss"], summary["wall_seconds"]
    return TrialResult(
        run.optimizer.lr,
        relative_path,
        score=score,
        metric=get_primary_key(val),
        nll=nll,
        loss=loss,
        seconds=seconds,
        better=val.get("better", "higher"),
    )


def choose_learning_rate(results: list[TrialResult], protocol: TransferProtocol) -> LearningRateChoice:
    """Choose the learning rate with the best score. If scores are equal, the lower NLL decides, then the smaller
    learning rate.

    Raises NonFiniteError if no trial has metrics.
    """
    if not results:
        return LearningRateChoice(protocol.grid[0], "the only learning rate of the grid")
    finite_results = [result for result in results if result.score is not None]
    if not finite_results:
        raise NonFiniteError(
            f"the loss became non-finite in all {len(results)} trials", "use smaller learning rates in --lr-grid"
        )
    best, *runners_up = sorted(finite_results, key=lambda result: (-result.sort_key[0], -result.sort_key[1], result.lr))
    score = f"{best.score:{METRICS[best.metric].format_spec}}"
    reason = f"the best of the grid on {protocol.held_out} held-out images, {score}"
    if runners_up and runners_up[0].score == best.score:
        reason += f", equal to lr {runners_up[0].lr:g} " + (
            "with the same NLL, but smaller" if runners_up[0].nll == best.nll else "but with a lower NLL"
        )
    grid_end = {protocol.grid[0]: "smallest", protocol.grid[-1]: "largest"}.get(best.lr)
    return LearningRateChoice(
        best.lr, reason, grid_end and f"the chosen learning rate is the {grid_end} of the grid; try a wider --lr-grid"
    )


def make_interrupted_error(folder: RunFolder, code: int, stage: str) -> Interrupted:
    """Return the error for a transfer protocol that a signal stopped: `code` is the exit code, `stage` completes
    "stopped ...", such as "in trial 2 of 5"."""
    return Interrupted(f"stopped {stage}, saved", f"continue with --resume --out {folder.path}", code)


def forecast_lr_grid(run: Run, protocol: TransferProtocol, seconds_per_step: float) -> dict[str, Any]:
    """Estimate the cost of the transfer protocol for `--dry-run`: number of trials, held-out images, and total minutes
    if trials run one after another."""
    steps = replace(run, data=replace(run.data, images=protocol.images)).steps
    count = len(protocol.grid) if len(protocol.grid) > 1 else 0
    minutes = seconds_per_step * (count * steps + run.steps) / 60
    return {
        "trials": count,
        "lr_grid": list(protocol.grid),
        "held_out": protocol.held_out,
        "total_minutes": round(minutes, 1),
    }


class PrefixedListener(NullListener):
    """A progress listener that prefixes every message with the name of a trial."""

    def __init__(self, listener: ProgressListener, label: str) -> None:
        self.listener, self.label = listener, label

    def note(self, text: str) -> None:
        """Print a note with the prefix."""
        self.listener.note(f"{self.label}: {text}")

    def progress(self, label: str, done: int, total: int | None, text: str = "") -> None:
        """Report progress with the prefix."""
        self.listener.progress(f"{self.label}, {label}", done, total, text)
