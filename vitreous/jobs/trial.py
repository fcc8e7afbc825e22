"""Run a trial of a learning-rate grid in its run folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext

from vitreous.config import to_yaml
from vitreous.errors import Interrupted, NonFiniteError
from vitreous.progress import ProgressListener
from vitreous.system.disk import write_text_atomic
from vitreous.training.batches import RunInputs
from vitreous.training.folder import RunFolder
from vitreous.training.ranks import SINGLE_PROCESS, Ranks
from vitreous.training.run import Run
from vitreous.training.session import Session
from vitreous.training.signals import StopSignals


def run_trial(
    run: Run,
    inputs: RunInputs,
    folder: RunFolder,
    listener: ProgressListener,
    ranks: Ranks = SINGLE_PROCESS,
    signals: StopSignals | None = None,
) -> None:
    """Run a trial to its end; an interrupted trial continues, and a complete trial is skipped.

    If the loss is not finite, the trial ends, and the failure is its result. Raises Interrupted after a signal;
    `signals` may contain one that was received before.
    """
    raise_if_stopped(signals or StopSignals(), ranks)
    if ranks.broadcast_text(str(folder.summary.is_file())) == "True":
        remove_checkpoints(folder, ranks)
        return
    if ranks.is_main and not folder.config.is_file():
        shutil.rmtree(folder.path, ignore_errors=True)  # from a trial that was killed before its config was written
        folder.path.mkdir(parents=True)
        write_text_atomic(folder.config, to_yaml(run))
    with folder.locked() if ranks.is_main else nullcontext():
        session = Session(run, inputs, folder, listener, ranks=ranks)
        try:
            summary = session.train()
        except NonFiniteError as error:
            session.note(error.message)
            summary = {"model": run.model.name(), "data": run.data.source, "seed": run.seed, "val": None, "test": None}
            summary |= {"run": str(folder.path), "failure": error.message}
        if ranks.is_main:
            write_text_atomic(folder.summary, json.dumps(summary, indent=2) + "\n")
    remove_checkpoints(folder, ranks)
    raise_if_stopped(session.signals, ranks)  # a signal that was received too late to stop the session


def remove_checkpoints(folder: RunFolder, ranks: Ranks) -> None:
    """Remove the checkpoints of a complete trial. All processes have to call this."""
    if ranks.is_main:
        shutil.rmtree(folder.path / "checkpoints", ignore_errors=True)
    ranks.wait()


def raise_if_stopped(
    signals: StopSignals,
    ranks: Ranks,
    error: Callable[[int], Interrupted] = lambda code: Interrupted("stopped", code=code),
) -> None:
    """Raise Interrupted in all processes if any process received a signal. `error` creates the error from the exit
    code."""
    received = int(ranks.all_reduce_max([signals.received or 0], "cpu")[0])
    if received:
        raise error(128 + received)
