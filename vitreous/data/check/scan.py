"""Read every sample of a split once, in worker processes: a file that crashes or hangs one costs only itself."""

from __future__ import annotations

import gc
import multiprocessing
import signal
import sys
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import FIRST_COMPLETED, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from vitreous.data.check.record import UNREADABLE, survey
from vitreous.data.split import Split
from vitreous.errors import ResourceError

SPAN = 32  # samples of a task
HANG = 60.0  # seconds after which a task is ended
BROKEN = 5  # pools in a row that may break before they read anything

Reasons = dict[int, str]  # why a sample cannot be read
#: (split, n samples) -> (n,) records with a field `state`, and the reasons of those that cannot be read
Job = Callable[[Split, range], tuple[np.ndarray, Reasons]]
Part = tuple[range, np.ndarray, Reasons]


@dataclass
class ScanResult:
    """One record for each sample of a split, and the reason for each that cannot be read."""

    records: np.ndarray
    reasons: Reasons


def scan(
    split: Split, workers: int, progress: Callable[[int], None] = lambda done: None, job: Job = survey
) -> ScanResult:
    """Run `job` on every sample once, in `workers` processes; 0: in this one, which a decoder that crashes takes along.

    The result does not depend on `workers`; `progress` hears how many samples are done. Raises ResourceError where
    processes cannot live at all.
    """
    spans = deque(range(low, min(low + SPAN, len(split))) for low in range(0, len(split), SPAN))
    result, done = ScanResult(np.zeros(len(split), job(split, range(0))[0].dtype), {}), 0
    parts = in_processes(split, spans, workers, job) if workers else ((span, *job(split, span)) for span in spans)
    with closing(parts):
        for span, records, reasons in parts:
            result.records[span.start : span.stop] = records
            result.reasons |= {sample: sys.intern(reason) for sample, reason in reasons.items()}
            done += len(span)
            progress(done)
    return result


def in_processes(split: Split, spans: deque[range], workers: int, job: Job) -> Generator[Part, None, None]:
    """Spans as they are finished, and an empty one after each second. Whatever ends this ends the processes.

    A span that ends its process, or takes too long, is done again sample by sample.
    """
    from pebble import ProcessExpired, ProcessPool

    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    broken, tasks = 0, {}
    while spans:
        pool = ProcessPool(min(workers, len(spans)), initializer=start_worker, initargs=(split, job), context=context)
        try:
            while spans or tasks:
                while spans and len(tasks) < 2 * workers:
                    span = spans.popleft()
                    tasks[pool.schedule(run_job, [span], timeout=HANG)] = span
                finished = wait(tasks, timeout=1.0, return_when=FIRST_COMPLETED).done
                if not finished:
                    yield range(0), *job(split, range(0))
                for future in finished:
                    span = tasks[future]
                    try:
                        result = future.result()
                    except BrokenProcessPool:
                        raise
                    except ProcessExpired as error:
                        result = f"ends the process that reads it ({exit_text(error.exitcode)})"
                    except TimeoutError:
                        result = f"takes longer than {HANG:g} s"
                    except Exception as error:
                        result = f"cannot be read ({type(error).__name__}: {error})"
                    del tasks[future]
                    broken = 0
                    if not isinstance(result, str):
                        yield span, *result
                    elif len(span) == 1:
                        yield span, *unreadable(split, job, span.start, result)
                    else:
                        spans.extendleft(range(sample, sample + 1) for sample in span)
        except RuntimeError:  # also what a pool that broke says to the next task
            broken += 1
            if broken > BROKEN:
                raise ResourceError(
                    "processes end before they read an image", "try fewer --workers, or --workers 0"
                ) from None
            spans.extendleft(tasks.values())
            tasks.clear()
        finally:
            pool.stop()
            pool.join()


def unreadable(split: Split, job: Job, sample: int, reason: str) -> tuple[np.ndarray, Reasons]:
    """The record of a sample that no process could read."""
    record = np.zeros(1, job(split, range(0))[0].dtype)
    record["state"] = UNREADABLE
    return record, {sample: reason}


def exit_text(code: int) -> str:
    """How a process ended, by its exit code."""
    return signal.Signals(-code).name if code < 0 and -code in set(signal.Signals) else f"exit code {code}"


_worker: dict[str, Any] = {}  # in a worker process: the split and the job


def start_worker(split: Split, job: Job) -> None:
    """In a worker process: end at once on SIGTERM, and remember what to do."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    gc.freeze()  # to look for garbage among what the main process left would copy all of it
    _worker.update(split=split, job=job)


def run_job(span: range) -> tuple[np.ndarray, Reasons]:
    """In a worker process: the records and reasons of some samples."""
    return _worker["job"](_worker["split"], span)
