"""The paper's transfer protocol: choose the learning rate on held-out training images, then train on all of them.

arXiv:2010.11929, App. B.1.1: each rate of a grid (Table 4) is tried on a training split less a small share, which
judges it; the best one trains on everything. The test split is not judged, and none of its files is opened.

    RUN/trials.json        the grid, what was held out, the figures of each trial, the choice and why
    RUN/trials/lr-0.003/   a whole run folder for each rate, less its checkpoints
    RUN/report.html        the same for people
"""

from __future__ import annotations

import json
import math
from dataclasses import KW_ONLY, asdict, dataclass, replace
from typing import Any

import numpy as np

from vitreous.config import from_plain, to_yaml
from vitreous.data.holdout import hold_out
from vitreous.data.split import Data
from vitreous.errors import DataError, Interrupted, NonFiniteError, UsageError
from vitreous.jobs.cluster import run_trials_on_ray
from vitreous.jobs.trial import raise_if_stopped, run_trial
from vitreous.progress import Listener, NullListener
from vitreous.recipes.derive import objective_of
from vitreous.recipes.options import TrainOptions
from vitreous.recipes.recipe import SHARES
from vitreous.recipes.registry import grid_of, hold_out_of
from vitreous.reports.pages import report
from vitreous.system.disk import write_text
from vitreous.tasks.metrics import METRICS
from vitreous.tasks.report import leading_of, score_of
from vitreous.training.batches import Inputs
from vitreous.training.folder import Folder
from vitreous.training.ranks import SINGLE_PROCESS, Ranks
from vitreous.training.run import Run
from vitreous.training.session import Session
from vitreous.training.signals import Signals

TRIALS = "trials.json"


@dataclass(frozen=True)
class Protocol:
    """The learning rates to try, ascending, and how many images train and evaluate each. `lr` and `matrix_lr` are the
    recipe's: Muon's rate keeps its proportion to the other."""

    grid: tuple[float, ...]
    share: float
    images: int
    held_out: int
    _: KW_ONLY
    lr: float
    matrix_lr: float


@dataclass(frozen=True)
class Trial:
    """How a rate did on the held-out images: `score` is the leading figure, of which the higher or lower is `better`.

    A trial whose loss was not finite has a `failure` and no figures.
    """

    lr: float
    folder: str
    score: float | None = None
    nll: float | None = None
    _: KW_ONLY
    loss: float | None = None  # of training, the last
    seconds: float | None = None
    failure: str | None = None
    figure: str = "top1"
    better: str = "higher"

    @property
    def rank(self) -> tuple[float, float]:
        """`Report.score` of the trial: the larger is the better one."""
        return score_of({"leading": "score", "score": self.score, "nll": self.nll, "better": self.better})


@dataclass(frozen=True)
class Choice:
    """The chosen rate, the reason, and a warning where the grid may be too narrow."""

    lr: float
    why: str
    caution: str | None = None


def check_options(options: TrainOptions, folder: Folder | None = None) -> None:
    """Raises UsageError for options that do not go with the protocol, or not with that of a folder to resume."""
    resumed = folder is not None and (folder.path / TRIALS).is_file()
    if resumed and (options.override or options.allow_data_change):
        raise UsageError(
            "the trials of a grid differ in their rate alone: nothing else can change on the way", "start a new run"
        )
    if options.lr_grid is None:
        if options.ray and not resumed:
            raise UsageError("--ray is for the trials of --lr-grid", "add --lr-grid, or leave --ray out")
        return
    if folder is None and not objective_of(options).labelled:
        problem = f"--lr-grid chooses by labels, and {options.recipe} learns without them"
        raise UsageError(problem, "leave it out, or name a rate with --lr")
    if options.lr is not None:
        raise UsageError("--lr says the rate that --lr-grid is to find", "leave one of them out")
    if any(path.replace("-", "_") in ("data.hold_out", "optimizer.lr") for path in options.settings):
        raise UsageError("--lr-grid chooses optimizer.lr, and holds out its recipe's share", "leave these settings out")
    if any(not 0 < rate < math.inf for rate in options.lr_grid):
        raise UsageError(f"--lr-grid takes rates above 0, not {' '.join(map(str, options.lr_grid))}")
    if folder is None:
        return
    if not resumed:
        raise UsageError(f"{folder.path} was begun without --lr-grid", "leave it out")
    grid = read_protocol(folder)[0].grid
    if options.lr_grid and tuple(sorted(set(options.lr_grid))) != grid:
        raise UsageError(f"the run in {folder.path} tries {' '.join(map(str, grid))}", "leave --lr-grid out")


def plan_protocol(run: Run, opened: Data, inputs: Inputs, options: TrainOptions) -> Protocol:
    """The protocol for a run on all training images. Raises UsageError for --keep-best and --early-stop, DataError
    where the share of a class is less than one image."""
    if run.keep_best or run.early_stop:
        hint = "leave --keep-best and --early-stop out"
        raise UsageError("--lr-grid trains on all images in the end: none are left to choose the best weights by", hint)
    grid = tuple(sorted(set(options.lr_grid or grid_of(run))))
    images = len(opened.split("train"))
    share = hold_out_of(run) or next(share for below, share in SHARES if images < below)
    # small classes: a share that rounds to nothing would judge nothing
    if share * images < opened.label_kind.least_held_out(run.model.classes):
        share = SHARES[0][1]
    held = hold_out_inputs(opened, inputs, share, run.data.split_seed)
    assert held.val is not None
    if not len(held.val):
        raise DataError(
            f"{opened.name}: {share:.0%} of each class is less than an image, nothing can judge a rate",
            "name one with --lr",
        )
    return Protocol(
        grid,
        share,
        images=len(held.train),
        held_out=len(held.val),
        lr=run.optimizer.lr,
        matrix_lr=run.optimizer.matrix_lr,
    )


def initial_document(protocol: Protocol) -> dict[str, Any]:
    """`trials.json` before the first trial."""
    return {"protocol": asdict(protocol), "trials": [], "choice": None}


def read_protocol(folder: Folder) -> tuple[Protocol, dict[str, Any]]:
    """The protocol in `trials.json`, and the whole document."""
    document = json.loads((folder.path / TRIALS).read_text("utf-8"))
    return from_plain(Protocol, document["protocol"]), document


def hold_out_inputs(opened: Data, inputs: Inputs, share: float, split_seed: int) -> Inputs:
    """The images of a trial: those of the run less a share of each class, and that share as `val`.

    The share is drawn from all training images. One that cannot be read is not trained on, and counts as wrong where it
    judges.
    """
    whole = opened.split("train")
    rows = hold_out(whole.labels, split_seed, {"val": share}, opened.groups)
    readable = np.ones(len(whole), dtype=bool)
    if inputs.rows is not None:
        readable = np.isin(np.arange(len(whole)), inputs.rows)
    at = (np.cumsum(readable) - 1)[rows["train"][readable[rows["train"]]]]
    cached = inputs.cached[at] if inputs.cached is not None else None
    return replace(inputs, train=inputs.train.take(at), val=whole.take(rows["val"]), cached=cached)


def with_rate(run: Run, protocol: Protocol, rate: float) -> Run:
    """The run with another learning rate, and Muon's in the same proportion."""
    scale = rate / protocol.lr if protocol.lr else 1.0
    return replace(run, optimizer=replace(run.optimizer, lr=rate, matrix_lr=protocol.matrix_lr * scale))


def transfer(
    folder: Folder,
    run: Run,
    inputs: Inputs,
    opened: Data,
    listener: Listener,
    ranks: Ranks = SINGLE_PROCESS,
    ray: str | None = None,
) -> dict[str, Any]:
    """Try the grid, choose, and train on everything; goes on from wherever the folder is. Returns the run's summary.

    Trials run one after another here, or at the same time on the Ray cluster at that address. Raises Interrupted after
    a signal, with everything saved, UsageError for --ray under torchrun, NonFiniteError where every trial ended in a
    loss that is not finite, and what `Session` raises.
    """
    if ray and ranks.world > 1:
        raise UsageError("--ray places the trials itself", "start it without torchrun")
    protocol, document = read_protocol(folder)
    with (signals := Signals()).caught():
        trials = list_trials(folder, run, protocol, opened)
        held_out = hold_out_inputs(opened, inputs, protocol.share, run.data.split_seed)
        if ray:
            run_trials_on_ray(ray, trials, held_out, signals, listener)
        for number, (trial, place) in enumerate(trials, 1):
            label = f"lr {trial.optimizer.lr:g} ({number} of {len(trials)})"
            try:
                run_trial(
                    trial,
                    held_out,
                    folder=place,
                    listener=PrefixedListener(listener, label),
                    ranks=ranks,
                    signals=signals,
                )
            except Interrupted as error:
                raise interruption(folder, error.code, f"in trial {number} of {len(trials)}") from None
        del held_out  # a second copy of what is kept in memory
        table = json.loads(
            ranks.broadcast_text(json.dumps(choose_from_trials(folder, trials, protocol)) if ranks.is_main else "")
        )
        choice = Choice(**table["choice"])
        final = with_rate(run, protocol, choice.lr)
        if ranks.is_main:
            for text in filter(None, (f"lr {choice.lr:g} is chosen: {choice.why}", choice.caution)):
                listener.note(text)
            if table != document:
                write_text(folder.path / TRIALS, json.dumps(table, indent=2) + "\n")
            if folder.run() != final:
                write_text(folder.config, to_yaml(final))
            report.write_report(folder.path / "report.html", folder)
        raise_if_stopped(signals, ranks, lambda code: interruption(folder, code, "before the run on all images"))
        summary = Session(final, inputs, folder, listener, ranks=ranks).train() | {"lr_grid": table}
    if "test" in opened.splits and ranks.is_main:
        listener.note(f"the test split was not read; `vitreous evaluate {folder.path}` reads it")
    return summary


def list_trials(folder: Folder, run: Run, protocol: Protocol, opened: Data) -> list[tuple[Run, Folder]]:
    """The run and the folder of each trial; none where the grid has one rate, which needs no trial."""
    if len(protocol.grid) == 1:
        return []
    fingerprint = opened.holding_out(protocol.share, run.data.split_seed).fingerprint()
    data = replace(run.data, images=protocol.images, hold_out=protocol.share, fingerprint=fingerprint)
    places = [Folder(folder.path / "trials" / f"lr-{rate!r}") for rate in protocol.grid]
    return [
        (replace(with_rate(run, protocol, rate), data=data), place)
        for rate, place in zip(protocol.grid, places, strict=True)
    ]


def choose_from_trials(folder: Folder, trials: list[tuple[Run, Folder]], protocol: Protocol) -> dict[str, Any]:
    """`trials.json` after the last trial. Raises NonFiniteError where no trial has figures."""
    rows = [read_trial(run, place, folder) for run, place in trials]
    return {
        "protocol": asdict(protocol),
        "trials": [asdict(row) for row in rows],
        "choice": asdict(choose_rate(rows, protocol)),
    }


def read_trial(run: Run, trial: Folder, folder: Folder) -> Trial:
    """The figures of a complete trial."""
    summary, place = json.loads(trial.summary.read_text("utf-8")), str(trial.path.relative_to(folder.path))
    if "failure" in summary:
        return Trial(run.optimizer.lr, place, failure=summary["failure"])
    val = summary["val"]
    nll = val.get("nll") if math.isfinite(val.get("nll") or 0.0) else None
    score, loss, seconds = val[leading_of(val)], summary["train"]["loss"], summary["wall_seconds"]
    return Trial(
        run.optimizer.lr,
        place,
        score=score,
        figure=leading_of(val),
        nll=nll,
        loss=loss,
        seconds=seconds,
        better=val.get("better", "higher"),
    )


def choose_rate(rows: list[Trial], protocol: Protocol) -> Choice:
    """The rate of the best score; of equals that of the lower NLL, then the smaller one.

    Raises NonFiniteError where no trial has figures.
    """
    if not rows:
        return Choice(protocol.grid[0], "it is the only one of the grid")
    able = [row for row in rows if row.score is not None]
    if not able:
        raise NonFiniteError(
            f"none of the {len(rows)} trials had a finite loss to its end", "give --lr-grid smaller rates"
        )
    first, *others = sorted(able, key=lambda row: (-row.rank[0], -row.rank[1], row.lr))
    score = f"{first.score:{METRICS[first.figure].form}}"
    why = f"the best of the grid on {protocol.held_out} held-out images, {score}"
    if others and others[0].score == first.score:
        why += f" as lr {others[0].lr:g}, " + (
            "with the same NLL, and smaller" if others[0].nll == first.nll else "with a lower NLL"
        )
    end = {protocol.grid[0]: "smallest", protocol.grid[-1]: "largest"}.get(first.lr)
    return Choice(
        first.lr,
        why,
        end and f"the chosen rate is the {end} of the grid, which may be too narrow: widen it with --lr-grid",
    )


def interruption(folder: Folder, code: int, where: str) -> Interrupted:
    """The error of a protocol stopped by a signal."""
    return Interrupted(f"stopped {where}, saved", f"continue with --resume --out {folder.path}", code)


def forecast(run: Run, protocol: Protocol, seconds_per_step: float) -> dict[str, Any]:
    """What `--dry-run` adds: how many trials, on how many images, and the minutes of everything, one trial after
    another."""
    steps = replace(run, data=replace(run.data, images=protocol.images)).steps
    count = len(protocol.grid) if len(protocol.grid) > 1 else 0
    minutes = seconds_per_step * (count * steps + run.steps) / 60
    return {
        "trials": count,
        "lr_grid": list(protocol.grid),
        "held_out": protocol.held_out,
        "minutes_in_all": round(minutes, 1),
    }


class PrefixedListener(NullListener):
    """Puts the name of a trial before every message."""

    def __init__(self, listener: Listener, label: str) -> None:
        self.listener, self.label = listener, label

    def note(self, text: str) -> None:
        """The text, after the trial."""
        self.listener.note(f"{self.label}: {text}")

    def progress(self, label: str, done: int, total: int | None, text: str = "") -> None:
        """The progress, after the trial."""
        self.listener.progress(f"{self.label}, {label}", done, total, text)
