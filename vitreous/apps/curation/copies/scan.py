"""Read samples once, in worker processes: a file that crashes or hangs a process costs only itself."""

from __future__ import annotations

import gc
import hashlib
import multiprocessing
import signal
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from typing import Any

import numpy as np
from PIL import Image

from vitreous.apps.curation.copies.windows import LARGER_VIEW_SIZE, make_grey_view
from vitreous.data.shared_memory import limit_workers
from vitreous.data.split import Split
from vitreous.errors import DataError, ResourceError
from vitreous.system.children import block_stop_signals, ignore_group_signals

TASK_SAMPLES = 32  # samples of a task
TASK_TIMEOUT, SLOW_TASK_TIMEOUT = (
    60.0,
    1800.0,
)  # seconds after which a task is ended, and one of a sample that takes long
MAX_BROKEN_POOLS = 5  # pools in a row that may break before they read anything
UNSEEN, READABLE, UNREADABLE = range(3)  # values of the field `state` of a record
VIEW = np.dtype([("view", "u1", (LARGER_VIEW_SIZE, LARGER_VIEW_SIZE)), ("state", "u1")])

ReadErrors = dict[int, str]  # sample -> why it cannot be read, without its name


class ConcatenatedSplits:
    """Splits concatenated, for reading."""

    def __init__(self, splits: Iterable[Split]) -> None:
        self.splits = list(splits)
        self.ends = np.cumsum([len(split) for split in self.splits], dtype=np.int64)

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def place(self, sample: int) -> tuple[int, int]:
        """Return the number of the split that a sample is in, and its number there."""
        part = int(np.searchsorted(self.ends, sample, side="right"))
        return part, sample - int(self.ends[part]) + len(self.splits[part])

    def home(self, sample: int) -> tuple[Split, int]:
        """Return the split that a sample is in, and its number there."""
        part, number = self.place(sample)
        return self.splits[part], number

    def raw(self, sample: int) -> bytes | np.ndarray:
        """Return the bytes of a file, or pixels (H, W[, C]). Raises DataError."""
        split, number = self.home(sample)
        return split.raw(number)

    def name(self, sample: int) -> str:
        """Return the name of a sample for messages."""
        split, number = self.home(sample)
        return split.name(number)


SampleSource = Split | ConcatenatedSplits
#: (pool, n samples) -> (n,) records with a field `state`, and the reasons of those that cannot be read
ScanJob = Callable[[Any, Sequence[int]], tuple[np.ndarray, ReadErrors]]


def scan_samples(
    pool: SampleSource,
    samples: Sequence[int],
    job: ScanJob,
    workers: int,
    progress: Callable[[int], None] = lambda done: None,
    slow: bool = False,
) -> tuple[np.ndarray, ReadErrors]:
    """Run `job` on samples -> (n,) records in their order, and why some samples cannot be read.

    The result does not depend on `workers` (0: this process, which a decoder that crashes ends); `progress` gets the
    number of samples done. `slow`: a sample takes long, as a clip does; it is a task, and has SLOW instead of HANG.
    Raises ResourceError where no process survives its start.
    """
    records, reasons, done = np.zeros(len(samples), job(pool, ())[0].dtype), {}, 0
    with closing(scan_in_chunks(pool, samples, job, workers, slow)) as parts:
        for span, part, why in parts:
            records[span.start : span.stop] = part
            reasons |= {sample: sys.intern(reason) for sample, reason in why.items()}
            done += len(span)
            progress(done)
    return records, reasons


def scan_in_chunks(
    pool: SampleSource, samples: Sequence[int], job: ScanJob, workers: int, slow: bool = False
) -> Generator[tuple[range, np.ndarray, ReadErrors], None, None]:
    """Yield (positions in `samples`, (m,) records, reasons) as they are finished, and an empty part after each second.

    A part that ends its process, or takes longer than HANG (SLOW if `slow`), is done again sample by sample. Closing
    the generator ends the processes. Raises ResourceError where no process survives its start.
    """
    size, limit = (1, SLOW_TASK_TIMEOUT) if slow else (TASK_SAMPLES, TASK_TIMEOUT)
    spans = deque(range(low, min(low + size, len(samples))) for low in range(0, len(samples), size))
    if not limit_workers(workers):
        yield from ((span, *job(pool, samples[span.start : span.stop])) for span in spans)
        return
    from pebble import ProcessPool

    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    broken, tasks, empty = 0, {}, job(pool, ())[0]
    while spans:
        processes = ProcessPool(
            min(workers, len(spans)), initializer=start_scan_worker, initargs=(pool, job), context=context
        )
        try:
            while spans or tasks:
                while spans and len(tasks) < 2 * workers:
                    span = spans.popleft()
                    with block_stop_signals():  # for the pool's threads and processes, which the first task starts
                        task = processes.schedule(run_scan_job, [samples[span.start : span.stop]], timeout=limit)
                    tasks[task] = span
                finished = wait(tasks, timeout=1.0, return_when=FIRST_COMPLETED).done
                if not finished:
                    yield range(0), empty, {}
                for future in finished:
                    result, span, broken = get_task_result(future, limit), tasks.pop(future), 0
                    if not isinstance(result, str):
                        yield span, *result
                    elif len(span) > 1:
                        spans.extendleft(range(place, place + 1) for place in span)
                    else:
                        record = np.zeros(1, empty.dtype)
                        record["state"] = UNREADABLE
                        yield span, record, {samples[span.start]: result}
        except RuntimeError:  # also what a pool that broke raises for the next task
            broken += 1
            if broken > MAX_BROKEN_POOLS:
                raise ResourceError(
                    "processes end before they read an image", "try fewer --workers, or --workers 0"
                ) from None
            spans.extendleft(tasks.values())
            tasks.clear()
        finally:
            processes.stop()
            processes.join()


def get_task_result(future: Future, limit: float) -> Any:
    """The result of a task, or why there is none within `limit` seconds. Raises BrokenProcessPool, a RuntimeError."""
    from pebble import ProcessExpired

    try:
        return future.result()
    except BrokenProcessPool:
        raise
    except ProcessExpired as error:
        return f"ends the process that reads it ({describe_exit_code(error.exitcode)})"
    except TimeoutError:
        return f"takes longer than {limit:g} s"
    except Exception as error:
        return f"cannot be read ({type(error).__name__}: {error})"


def fill_records(
    records: np.ndarray, pool: SampleSource, samples: Sequence[int], read: Callable[[Any, int, Any], None]
) -> ReadErrors:
    """Call `read(pool, sample, record)` for each of (n,) records and set `state` -> why samples cannot be read."""
    reasons: ReadErrors = {}
    for record, sample in zip(records, samples, strict=True):
        try:
            read(pool, sample, record)
        except DataError as error:
            reasons[sample] = error.message.removeprefix("image: ").removeprefix(f"{pool.name(sample)}: ")
        except MemoryError:
            reasons[sample] = "cannot be read (out of memory)"
        record["state"] = UNREADABLE if sample in reasons else READABLE
    return reasons


def read_views(
    pool: SampleSource, samples: Sequence[int], read: Callable[[Any, int], Image.Image]
) -> tuple[np.ndarray, ReadErrors]:
    """Larger grey views of the n images that `read(pool, sample)` decodes: (n,) VIEW, and why some cannot be read."""
    records = np.zeros(len(samples), VIEW)

    def fill_view(pool: Any, sample: int, record: Any) -> None:
        record["view"] = make_grey_view(read(pool, sample), LARGER_VIEW_SIZE)

    return records, fill_records(records, pool, samples, fill_view)


def digest_content(raw: bytes | np.ndarray) -> np.ndarray:
    """The first half of the SHA-256 of bytes, or of pixels (H, W[, C]) with their shape and dtype, as (2,) uint64."""
    if isinstance(raw, bytes):
        sha256 = hashlib.sha256(raw)
    else:
        sha256 = hashlib.sha256(f"{raw.shape} {raw.dtype.str}".encode())
        sha256.update(np.ascontiguousarray(raw).data)
    return np.frombuffer(sha256.digest()[:16], "<u8")


def describe_exit_code(code: int) -> str:
    """Describe the exit code of a process."""
    return signal.Signals(-code).name if code < 0 and -code in set(signal.Signals) else f"exit code {code}"


_worker: dict[str, Any] = {}  # in a worker process: the pool and the job


def start_scan_worker(pool: SampleSource, job: ScanJob) -> None:
    """In a worker process: leave stop signals to the main process, and keep the pool and the job."""
    ignore_group_signals()
    gc.freeze()  # to collect garbage among what the main process left would copy all of it
    _worker.update(pool=pool, job=job)


def run_scan_job(samples: Sequence[int]) -> tuple[np.ndarray, ReadErrors]:
    """In a worker process: the (n,) records and the reasons of n samples."""
    return _worker["job"](_worker["pool"], samples)
