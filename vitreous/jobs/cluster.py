"""Run the trials of a learning-rate grid as tasks on a Ray cluster (extra `ray`).

Each task calls `run_trial` with the same number of threads as a single machine would, in the trial's folder. Weights
and metrics are therefore the same on the same hardware. The run folder, the data and this package must have the same
path on every machine.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from vitreous.errors import Interrupted, ResourceError, UsageError, VitreousError
from vitreous.jobs.trial import run_trial
from vitreous.progress import NullListener, ProgressListener
from vitreous.system.cluster import connect_ray
from vitreous.training.batches import RunInputs
from vitreous.training.folder import RunFolder
from vitreous.training.run import Run
from vitreous.training.signals import StopSignals

TASK_POLL_SECONDS = 0.2  # seconds between two checks for a signal
MAX_TRIAL_RETRIES = 3  # retries of a trial whose process or machine was lost; it resumes from its newest checkpoint
STOP_TIMEOUT = 300.0  # seconds after a signal in which trials can save their state


def run_trials_on_ray(
    address: str,
    trials: list[tuple[Run, RunFolder]],
    inputs: RunInputs,
    signals: StopSignals,
    listener: ProgressListener,
) -> None:
    """Train the incomplete trials on the Ray cluster at `address`, an address for `ray.init` or `local` to start one
    here.

    After a signal, returns when all trials have saved their state. A trial whose process or machine is lost is
    restarted up to MAX_TRIAL_RETRIES times. Raises UsageError if Ray is not installed or no cluster responds. Raises
    ResourceError if a trial was lost too often, or if its machine cannot access the run folder. Errors of a trial are
    raised again.
    """
    incomplete = [(run, folder) for run, folder in trials if not folder.summary.is_file()]
    if not incomplete:
        return
    if any(run.device.startswith("cuda:") and run.device != "cuda:0" for run, _ in incomplete):
        raise UsageError(
            f"--device {incomplete[0][0].device} is not supported with --ray, which assigns a GPU to each trial",
            "use --device cuda",
        )
    ray = connect_ray(address)
    try:
        threads = torch.get_num_threads()
        max_cpus = max((node["Resources"].get("CPU", 1) for node in ray.nodes() if node["Alive"]), default=1)
        uses_gpu = incomplete[0][0].device.startswith("cuda")
        resources = {"num_cpus": 1, "num_gpus": 1} if uses_gpu else {"num_cpus": min(threads, max_cpus)}
        # a process runs a single trial, because a trial sets the number of threads and the working directory
        remote_function = ray.remote(max_retries=MAX_TRIAL_RETRIES, max_calls=1, **resources)(run_remote_trial)
        shared_inputs = ray.put(inputs)
        tasks = {
            remote_function.remote(run, shared_inputs, str(folder.path.absolute()), os.getcwd(), threads): folder
            for run, folder in incomplete
        }
        wait_for_tasks(ray, list(tasks), signals, listener)
        if not signals.received:
            for reference, folder in tasks.items():
                check_trial_result(ray, reference, folder)
    finally:
        ray.shutdown()


def run_remote_trial(run: Run, inputs: RunInputs, folder: str, directory: str, threads: int) -> None:
    """Run a trial in a process of the Ray cluster, with its run folder `folder`, the working directory `directory` and
    a number of threads. `ray.cancel` interrupts it like SIGINT: the trial saves its state and ends."""
    os.chdir(directory)
    torch.set_num_threads(threads)
    run_trial(run, inputs, RunFolder(Path(folder)), NullListener())


def wait_for_tasks(ray: Any, tasks: list[Any], signals: StopSignals, listener: ProgressListener) -> None:
    """Wait until all tasks have ended. After a signal, cancel them, and kill them if they have not ended after
    `STOP_TIMEOUT` seconds."""
    pending, stop_at, total = tasks, None, len(tasks)
    listener.progress("trials", 0, total, f"0 of {total} on the cluster")
    while pending:
        ended, pending = ray.wait(pending, num_returns=len(pending), timeout=TASK_POLL_SECONDS)
        if ended:
            complete = total - len(pending)
            listener.progress("trials", complete, total, f"{complete} of {total} on the cluster")
        if signals.received and stop_at is None:
            stop_at = time.monotonic() + STOP_TIMEOUT
            for task in pending:
                ray.cancel(task)
        elif stop_at is not None and time.monotonic() > stop_at:
            for task in pending:
                ray.cancel(task, force=True)
            return


def check_trial_result(ray: Any, task: Any, folder: RunFolder) -> None:
    """Raise the error of a failed task again. Raises ResourceError if its machine failed, or if `folder` has no
    summary."""
    try:
        ray.get(task)
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, VitreousError) and not isinstance(cause, Interrupted):
            raise cause from None
        reason = (str(error).strip().splitlines() or ["no reason given"])[-1]
        raise ResourceError(f"a trial was lost: {reason}", "continue with --resume") from None
    if not folder.summary.is_file():
        hint = "set --out to storage that every machine of the cluster shares"
        raise ResourceError(f"a trial ended without results in {folder.path}", hint)
