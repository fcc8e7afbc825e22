"""The trials of a grid side by side, on the machines of a Ray cluster (extra `ray`).

Ray Tune places the trials and no more: each is the `run_trial` that one machine would make, with as many threads, in
its own folder, so that weights and figures are the same on the same hardware. The run folder, the data and this package
have to be where every machine finds them: on shared storage, at the same path.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import os
import shutil
import signal
import time
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch

import vitreous.errors as errors
from vitreous.cluster import connected
from vitreous.errors import ResourceError, UsageError, VitreousError
from vitreous.jobs.trial import run_trial
from vitreous.progress import Listener, NullListener
from vitreous.training.folder import Folder
from vitreous.training.run import Run
from vitreous.training.session import Inputs, Session
from vitreous.training.signals import Signals

STOP = ".stop"  # a file beside the trials: each of them saves, and ends
GLANCE = 0.2  # seconds between two looks for it

Job = tuple[Run, str]  # what a machine trains, and in which folder


def in_parallel(
    address: str, trials: list[tuple[Run, Folder]], inputs: Inputs, folder: Folder, signals: Signals, listener: Listener
) -> None:
    """Make the trials that are not complete on the cluster at `address`: as `ray.init` takes it, or `local` for one
    started here.

    After a signal it returns when all trials have saved. Raises UsageError without Ray or cluster, ResourceError for a
    trial whose machine gave out or does not see the run folder, and what a trial raised.
    """
    home = folder.path.absolute() / "trials"
    jobs: list[Job] = [(run, str(place.path.absolute())) for run, place in trials if not place.summary.is_file()]
    if not jobs:
        return
    if any(run.device.startswith("cuda:") and run.device != "cuda:0" for run, _ in jobs):
        raise UsageError("a trial on a cluster has one GPU to itself, the first", "use --device cuda")
    ray = connected(address)
    home.mkdir(exist_ok=True)
    (home / STOP).unlink(missing_ok=True)
    over = Event()
    messenger = Thread(target=carry, args=(jobs, home / STOP, signals, listener, over), daemon=True)
    messenger.start()
    try:
        with signals.caught():  # Ray took SIGTERM over
            failures = tuned(ray, jobs, inputs, home)
    finally:
        over.set()
        messenger.join()
        (home / STOP).unlink(missing_ok=True)
        ray.shutdown()
    if signals.received:
        return
    for kind, message, hint in failures:
        raise getattr(errors, kind)(message, hint)
    for _, place in jobs:
        if not Folder(Path(place)).summary.is_file():
            raise ResourceError(
                f"a trial ended and left nothing in {place}",
                "use an --out on storage that every machine of the cluster sees",
            )


def tuned(ray: Any, jobs: list[Job], inputs: Inputs, home: Path) -> list[tuple[str, str, str]]:
    """Run the jobs to their end by Ray Tune. Returns what went wrong: the kind of error, its message and its way
    out."""
    from ray import tune

    threads = torch.get_num_threads()
    most = max((node["Resources"].get("CPU", 1) for node in ray.nodes() if node["Alive"]), default=1)
    needs: dict[str, float] = (
        {"cpu": 1, "gpu": 1} if jobs[0][0].device.startswith("cuda") else {"cpu": min(threads, most)}
    )
    task = tune.with_parameters(
        placed, jobs=jobs, inputs=inputs, place=os.getcwd(), threads=threads, stop=str(home / STOP)
    )
    scratch = home / ".tune"
    tuner = tune.Tuner(
        tune.with_resources(task, needs),
        param_space={"number": tune.grid_search(list(range(len(jobs))))},
        run_config=tune.RunConfig(name="trials", storage_path=str(scratch), verbose=0),
    )
    try:
        results = tuner.fit()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    failures = []
    for result in results:
        if result.error is not None:
            failures.append(
                (
                    "ResourceError",
                    f"a trial was lost: {(str(result.error).strip().splitlines() or ['no reason given'])[-1]}",
                    "continue with --resume",
                )
            )
        elif (told := result.metrics or {}).get("kind", "Interrupted") not in ("", "Interrupted"):
            failures.append((told["kind"], told["message"], told["hint"]))
    return failures


def placed(
    config: dict[str, int], jobs: list[Job], inputs: Inputs, place: str, threads: int, stop: str
) -> dict[str, str]:
    """One job, on whatever machine Ray chose; returns the error that it ended with, all empty for none."""
    run, folder = jobs[config["number"]]
    os.chdir(place)
    torch.set_num_threads(threads)
    try:
        if not Path(stop).exists():
            run_trial(run, inputs, Folder(Path(folder)), NullListener(), watch=partial(listen, stop=Path(stop)))
    except VitreousError as error:
        return {"kind": type(error).__name__, "message": error.message, "hint": error.hint}
    return {"kind": "", "message": "", "hint": ""}


def listen(session: Session, stop: Path) -> None:
    """Have the session stop, as after a signal, when the file is there."""

    def look() -> None:
        while not stop.exists():
            time.sleep(GLANCE)
        session.signals.received = signal.SIGTERM

    Thread(target=look, daemon=True).start()


def carry(jobs: list[Job], stop: Path, signals: Signals, listener: Listener, over: Event) -> None:
    """Until it is over: tell the trials of a signal, and the listener of trials that are complete."""
    told = -1
    while not over.wait(GLANCE):
        if signals.received and not stop.exists():
            stop.touch()
        complete = sum(Folder(Path(place)).summary.is_file() for _, place in jobs)
        if complete != told:
            told = complete
            listener.progress("trials", complete, len(jobs), f"{complete} of {len(jobs)} on the cluster")
