"""Read samples once in worker processes. A file that crashes or hangs its process affects only itself."""

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

TASK_SAMPLES = 32  # samples per task
# seconds until a task is stopped: with TASK_SAMPLES samples, and with one slow sample
TASK_TIMEOUT, SLOW_TASK_TIMEOUT = 60.0, 1800.0
MAX_BROKEN_POOLS = 5  # maximum consecutive process pools that break before they read a sample
UNSEEN, READABLE, UNREADABLE = range(3)  # values of the field `state` of a record
VIEW = np.dtype([("view", "u1", (LARGER_VIEW_SIZE, LARGER_VIEW_SIZE)), ("state", "u1")])

ReadErrors = dict[int, str]  # sample index -> error message without the sample's name


class ConcatenatedSplits:
    """Several splits as one sequence of samples that can be read: a pool."""

    def __init__(self, splits: Iterable[Split]) -> None:
        self.splits = list(splits)
        self.ends = np.cumsum([len(split) for split in self.splits], dtype=np.int64)

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def locate_sample(self, sample: int) -> tuple[int, int]:
        """Return the index of a sample's split, and the sample's index in that split."""
        split_index = int(np.searchsorted(self.ends, sample, side="right"))
        return split_index, sample - int(self.ends[split_index]) + len(self.splits[split_index])

    def get_split_and_index(self, sample: int) -> tuple[Split, int]:
        """Return a sample's split, and the sample's index in that split."""
        split_index, index = self.locate_sample(sample)
        return self.splits[split_index], index

    def raw(self, sample: int) -> bytes | np.ndarray:
        """Return the bytes of a sample's file, or its pixels (H, W[, C]). Raises DataError if they cannot be read."""
        split, index = self.get_split_and_index(sample)
        return split.raw(index)

    def name(self, sample: int) -> str:
        """Return the name of a sample for messages."""
        split, index = self.get_split_and_index(sample)
        return split.name(index)


SampleSource = Split | ConcatenatedSplits
#: reads n samples of a pool -> (n,) records with a field `state`, and the read errors
ScanJob = Callable[[Any, Sequence[int]], tuple[np.ndarray, ReadErrors]]


def scan_samples(
    pool: SampleSource,
    samples: Sequence[int],
    job: ScanJob,
    workers: int,
    progress: Callable[[int], None] = lambda done: None,
    slow: bool = False,
) -> tuple[np.ndarray, ReadErrors]:
    """Run `job` on samples of a pool. Return (n,) records in the order of `samples`, and the read errors.

    The result does not depend on `workers`; 0 is this process, which would crash with its decoder. `progress` receives
    the number of finished samples. With `slow`, each sample, such as a clip, is a task with a longer timeout. Raises
    ResourceError if worker processes end before they read a sample.
    """
    records, reasons, done = np.zeros(len(samples), job(pool, ())[0].dtype), {}, 0
    with closing(scan_in_chunks(pool, samples, job, workers, slow)) as chunks:
        for span, chunk_records, errors in chunks:
            records[span.start : span.stop] = chunk_records
            reasons |= {sample: sys.intern(reason) for sample, reason in errors.items()}
            done += len(span)
            progress(done)
    return records, reasons


def scan_in_chunks(
    pool: SampleSource, samples: Sequence[int], job: ScanJob, workers: int, slow: bool = False
) -> Generator[tuple[range, np.ndarray, ReadErrors], None, None]:
    """Yield each finished chunk of samples: indices into `samples`, (m,) records, and read errors. Yield an empty chunk
    after each second without a finished one.

    If a chunk crashes its process or exceeds its timeout, its samples are retried one by one. Closing the generator
    ends the processes. Raises ResourceError if worker processes end before they read a sample.
    """
    size, timeout = (1, SLOW_TASK_TIMEOUT) if slow else (TASK_SAMPLES, TASK_TIMEOUT)
    spans = deque(range(start, min(start + size, len(samples))) for start in range(0, len(samples), size))
    if not limit_workers(workers):
        yield from ((span, *job(pool, samples[span.start : span.stop])) for span in spans)
        return
    from pebble import ProcessPool

    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    num_broken_pools, tasks, empty_records = 0, {}, job(pool, ())[0]
    while spans:
        processes = ProcessPool(
            min(workers, len(spans)), initializer=start_scan_worker, initargs=(pool, job), context=context
        )
        try:
            while spans or tasks:
                while spans and len(tasks) < 2 * workers:
                    span = spans.popleft()
                    with block_stop_signals():  # for the pool's threads and processes, which start with the first task
                        task = processes.schedule(run_scan_job, [samples[span.start : span.stop]], timeout=timeout)
                    tasks[task] = span
                finished = wait(tasks, timeout=1.0, return_when=FIRST_COMPLETED).done
                if not finished:
                    yield range(0), empty_records, {}
                for future in finished:
                    result, span, num_broken_pools = get_task_result(future, timeout), tasks.pop(future), 0
                    if not isinstance(result, str):
                        yield span, *result
                    elif len(span) > 1:
                        spans.extendleft(range(index, index + 1) for index in span)
                    else:
                        record = np.zeros(1, empty_records.dtype)
                        record["state"] = UNREADABLE
                        yield span, record, {samples[span.start]: result}
        except RuntimeError:  # a broken pool also raises it for the next task
            num_broken_pools += 1
            if num_broken_pools > MAX_BROKEN_POOLS:
                raise ResourceError(
                    "worker processes ended before they read an image", "use fewer --workers, or --workers 0"
                ) from None
            spans.extendleft(tasks.values())
            tasks.clear()
        finally:
            processes.stop()
            processes.join()


def get_task_result(future: Future, timeout: float) -> Any:
    """Return the result of a task, or an error message if it raised, crashed its process, or exceeded `timeout`
    seconds. Raises BrokenProcessPool, a RuntimeError."""
    from pebble import ProcessExpired

    try:
        return future.result()
    except BrokenProcessPool:
        raise
    except ProcessExpired as error:
        return f"crashes the process that reads it ({describe_exit_code(error.exitcode)})"
    except TimeoutError:
        return f"takes longer than {timeout:g} s"
    except Exception as error:
        return f"cannot be read ({type(error).__name__}: {error})"


def fill_records(
    records: np.ndarray, pool: SampleSource, samples: Sequence[int], read: Callable[[Any, int, Any], None]
) -> ReadErrors:
    """Call `read(pool, sample, record)` for each of (n,) records, and set the record's `state`. Return the read
    errors."""
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


def make_grey_views(
    pool: SampleSource, samples: Sequence[int], read: Callable[[Any, int], Image.Image]
) -> tuple[np.ndarray, ReadErrors]:
    """Make grey views of `LARGER_VIEW_SIZE` x `LARGER_VIEW_SIZE` pixels of n images, decoded by `read(pool, sample)`.
    Return (n,) records of dtype `VIEW`, and the read errors."""
    records = np.zeros(len(samples), VIEW)

    def fill_view(pool: Any, sample: int, record: Any) -> None:
        """Fill the record of one image with its grey view."""
        record["view"] = make_grey_view(read(pool, sample), LARGER_VIEW_SIZE)

    return records, fill_records(records, pool, samples, fill_view)


def digest_content(raw: bytes | np.ndarray) -> np.ndarray:
    """Return the first half of a SHA-256 as (2,) uint64: of bytes, or of pixels (H, W[, C]) with their shape and
    dtype."""
    if isinstance(raw, bytes):
        sha256 = hashlib.sha256(raw)
    else:
        sha256 = hashlib.sha256(f"{raw.shape} {raw.dtype.str}".encode())
        sha256.update(np.ascontiguousarray(raw).data)
    return np.frombuffer(sha256.digest()[:16], "<u8")


def describe_exit_code(code: int) -> str:
    """Return the name of the signal that ended a process, or its exit code."""
    return signal.Signals(-code).name if code < 0 and -code in set(signal.Signals) else f"exit code {code}"


_worker: dict[str, Any] = {}  # in a worker process: the pool and the job


def start_scan_worker(pool: SampleSource, job: ScanJob) -> None:
    """Initialise a worker process: ignore stop signals, and store the pool and the job for `run_scan_job`."""
    ignore_group_signals()
    gc.freeze()  # collecting inherited objects would copy their memory
    _worker.update(pool=pool, job=job)


def run_scan_job(samples: Sequence[int]) -> tuple[np.ndarray, ReadErrors]:
    """Run the stored job in a worker process: (n,) records and read errors of n samples."""
    return _worker["job"](_worker["pool"], samples)
