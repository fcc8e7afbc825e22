"""Races: contenders run alternately, each in a separate process, so that changes in machine speed affect all of
them."""

from __future__ import annotations

import importlib.util
import multiprocessing as mp
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from vitreous.apps.bench.profile import OperatorProfile, profile_steps
from vitreous.apps.bench.work import LIMIT_CONTENDERS, BenchmarkStep, Contender, LogitsStep, Timing, Workload
from vitreous.system.cores import get_peak_memory, restore_default_spinning, synchronize_device

RESPONSE_TIMEOUT = 900.0  # maximum seconds until a contender responds
MEASURE_ERROR = -1.0  # sent instead of seconds: measure the error of the logits
MEASURE_PROFILE = -2.0  # sent instead of seconds: record the profile
CONTENDER_PAUSE = 0.05  # seconds between two contenders, until idle threads sleep


@dataclass
class ContenderResult:
    """Results of one contender.

    Throughput of each round in units per second (images, or operations of a peak), seconds to build and to warm up, and
    peak memory in bytes. If measured, also the profile, and the relative error of the logits compared with float32.
    """

    contender: Contender
    throughputs: list[float] = field(default_factory=list)
    build_seconds: float = 0.0
    warmup_seconds: float = 0.0
    _: KW_ONLY
    memory: int = 0
    error: float | None = None
    profile: OperatorProfile | None = None
    failure: str | None = None

    @property
    def median(self) -> float:
        """Return the median throughput of the rounds."""
        return statistics.median(self.throughputs)


def run_race(
    workload: Workload,
    contenders: Sequence[Contender],
    timing: Timing,
    on_round: Callable[[int, str], None] = lambda done, label: None,
) -> list[ContenderResult]:
    """Run the installed contenders alternately: one warm-up round, then the measured rounds.

    In a round, each contender runs for at least `timing.seconds` and at least one step. Contenders that prefetch run
    half as long first, to empty their queues. If a contender fails, its error is stored and the others continue.
    `on_round` receives the number of finished rounds and the contender's label. With `timing.profile`, each contender
    is profiled after its rounds, for one second or one step.
    """
    results = [ContenderResult(contender) for contender in contenders if importlib.util.find_spec(contender.needs)]
    context, pipes, processes = mp.get_context("spawn"), [], []
    try:
        for result in results:
            pipe, child_pipe = context.Pipe()
            process = context.Process(target=run_contender_process, args=(child_pipe, result.contender, workload))
            with nullcontext() if result.contender.is_ours else restore_default_spinning():
                process.start()
            child_pipe.close()
            pipes.append(pipe)
            processes.append(process)
            result.build_seconds, result.warmup_seconds = request_contender(result, pipe, None) or (0.0, 0.0)
        for round_ in range(1 + timing.rounds):
            for result, pipe in zip(results, pipes, strict=True):
                response = (
                    request_contender(result, pipe, timing.seconds / (1 if round_ else 2))
                    if result.failure is None
                    else None
                )
                if response and round_:
                    units, elapsed, result.memory = response
                    result.throughputs.append(units / elapsed)
                on_round(round_, result.contender.label)
                time.sleep(CONTENDER_PAUSE)
        for result, pipe in zip(results, pipes, strict=True):  # at the end, because it needs memory
            result.error = request_contender(result, pipe, MEASURE_ERROR) if result.failure is None else None
            if timing.profile and result.failure is None and result.contender.name not in LIMIT_CONTENDERS:
                result.profile = request_contender(result, pipe, MEASURE_PROFILE)
    finally:
        for pipe, process in zip(pipes, processes, strict=True):
            pipe.close()
            process.join(5)
            process.kill()
    return results


def request_contender(result: ContenderResult, pipe: Connection, order: float | None) -> Any:
    """Send a contender the number of seconds to run, or a `MEASURE_` order, and return its response. None only waits
    until the contender is ready. If it fails, store the failure in its result and return None."""
    try:
        if order is not None:
            pipe.send(order)
        if not pipe.poll(RESPONSE_TIMEOUT):
            result.failure = f"no response within {RESPONSE_TIMEOUT:.0f} s"
            return None
        status, response = pipe.recv()
    except (EOFError, OSError):
        status, response = "failed", "the process ended"
    if status == "failed":
        result.failure = response
        return None
    return response


def run_steps_for(seconds: float, step: BenchmarkStep, device: str = "cpu") -> tuple[float, float]:
    """Run steps for `seconds`, at least one. Return the number of units and the elapsed seconds, including GPU
    synchronisation.

    On a GPU, the host launches 1, 2, 4 … steps between synchronisations, but not more than fit in the time.
    """
    units, num_steps, burst, started, elapsed = 0.0, 0, 1, time.perf_counter(), 0.0
    while not num_steps or elapsed < seconds:
        units += sum(step() for _ in range(burst))
        synchronize_device(device)
        num_steps, elapsed = num_steps + burst, time.perf_counter() - started
        remaining = round(num_steps / elapsed * (seconds - elapsed))
        burst = 1 if device == "cpu" else max(1, min(2 * burst, remaining))
    return units, elapsed


def run_contender_process(pipe: Connection, contender: Contender, workload: Workload) -> None:
    """Run a contender's process: build its step, run it once, then serve requests until the pipe closes."""
    import logging
    import os
    import signal
    import warnings

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and closes the pipe
    # a spawned process would spawn its workers: use the default of the platform instead
    mp.set_start_method(None, force=True)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        started = time.perf_counter()
        step = contender.build(workload)
        ready = time.perf_counter()
        step()
        synchronize_device(workload.device)
        pipe.send(("ready", (ready - started, time.perf_counter() - ready)))
        while True:
            seconds = pipe.recv()
            if seconds == MEASURE_ERROR:
                pipe.send(("exact", step.error() if isinstance(step, LogitsStep) else None))
                continue
            if seconds == MEASURE_PROFILE:
                pipe.send(("profile", profile_steps(step, 1.0)))
                continue
            if workload.loads_ahead:
                run_steps_for(seconds / 2, step, workload.device)
            pipe.send(("done", (*run_steps_for(seconds, step, workload.device), get_peak_memory(workload.device))))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except Exception as error:  # a peer may fail in any way; the race continues without it
        pipe.send(("failed", f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]))
