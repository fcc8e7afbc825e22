"""The computing thread: it takes waiting images, drops cancelled images, and computes the others as a batch.

It waits for a batch to fill only while images are being decoded, and only for a small fraction of a batch's time.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from vitreous.apps.server.responses import Refusal
from vitreous.inference.pipeline import stack_same_size

DEFAULT_BATCH_SIZE = 8  # images per batch for engines without a preferred number (`chunk_size`)
MAX_WAIT_SHARE = 0.1  # maximum wait for images being decoded, as a fraction of a batch's time
HANG_SECONDS = 5.0  # seconds; a batch counts as hung after this plus ten times the usual time
COMPUTE_NICENESS = 10  # niceness of the computing thread, so that health checks are served while it computes


@dataclass(eq=False)
class BatchItem:
    """One input to compute in the computing thread. Inputs with the same `compute` are batched, unless `is_unbatched`.

    `compute` maps a batch of images (B, C, *image), or a list of images of several sizes, to (B, ...). If
    `is_unbatched`, it maps one input to its result. `deadline` is a time of the event loop's clock.
    """

    compute: Callable[[Any], Any]
    input: Any
    deadline: float
    result: asyncio.Future[Any] = field(repr=False)
    _: KW_ONLY
    is_unbatched: bool = False


class Batcher:
    """Collect images into batches, and compute them in a thread. `decoding` returns the number of images being decoded.
    `observe(images, seconds)` is called after each batch. `size` is the maximum number of images in a batch."""

    def __init__(
        self, decoding: Callable[[], int], observe: Callable[[int, float], None], size: int = DEFAULT_BATCH_SIZE
    ) -> None:
        self.decoding, self.observe, self.size = decoding, observe, size
        self.jobs: deque[BatchItem] = deque()
        self.jobs_available = threading.Condition()
        self.batch_seconds = self.per_image = 0.0  # seconds per batch and per image, running means
        self.batch_start_time: float | None = None
        self.alive = 0.0  # time of the last `report_progress`
        self.expired = self.cancelled = self.failures = 0
        self.closed = False
        self.loop = asyncio.get_running_loop()
        self.thread = threading.Thread(target=self.run, name="compute", daemon=True)
        self.thread.start()

    async def compute(self, work: Callable[[Any], Any], input: Any, deadline: float, alone: bool = False) -> Any:
        """Compute `work` for one input in the computing thread, and return its result. `work` and `alone` are `compute`
        and `is_unbatched` of `BatchItem`. Raises Refusal if the deadline passes first, and the exceptions that `work`
        raises or, if `alone`, returns."""
        job = BatchItem(work, input, deadline, self.loop.create_future(), is_unbatched=alone)
        with self.jobs_available:
            self.jobs.append(job)
            self.jobs_available.notify()
        return await job.result

    @property
    def get_failure_reason(self) -> str:
        """Return why the computing thread has failed for good; an empty string if it has not."""
        batch_start = self.batch_start_time
        if not self.thread.is_alive() and not self.closed:
            return "the computing thread has stopped"
        if (
            batch_start is not None
            and time.monotonic() - max(batch_start, self.alive) > HANG_SECONDS + 10 * self.batch_seconds
        ):
            return "a batch exceeds the time limit"
        return "three consecutive batches failed" if self.failures >= 3 else ""

    def run(self) -> None:
        """Compute batches until closed. This is the computing thread."""
        if sys.platform == "linux":
            with suppress(OSError):
                thread_id = threading.get_native_id()
                os.setpriority(
                    os.PRIO_PROCESS, thread_id, min(19, os.getpriority(os.PRIO_PROCESS, thread_id) + COMPUTE_NICENESS)
                )
        while (batch := self.take_batch()) is not None:
            if not batch:
                continue
            self.batch_start_time = batch_start = time.monotonic()
            try:
                inputs, work = [job.input for job in batch], batch[0].compute
                results = [work(inputs[0])] if batch[0].is_unbatched else list(work(stack_same_size(inputs)))
                self.failures = 0
            except Exception as error:  # one batch must not end the thread
                self.failures += 1
                results = [error] * len(batch)
            self.batch_start_time = None
            seconds = time.monotonic() - batch_start
            if not batch[0].is_unbatched:
                self.batch_seconds = update_running_mean(self.batch_seconds, seconds)
                self.per_image = update_running_mean(self.per_image, seconds / len(batch))
            self.schedule_in_loop(self.deliver_results, batch, results, seconds)

    def take_batch(self) -> list[BatchItem] | None:
        """Wait for work, and return the next batch. It is empty if all waiting work has expired or was cancelled, and
        None when closed."""
        with self.jobs_available:
            while not self.jobs and not self.closed:
                self.jobs_available.wait()
            if self.closed:
                return None
            if not self.jobs[0].is_unbatched:
                wait_end = time.monotonic() + MAX_WAIT_SHARE * self.batch_seconds
                while (
                    len(self.jobs) < self.size
                    and self.decoding() > 0
                    and (remaining := wait_end - time.monotonic()) > 0
                ):
                    self.jobs_available.wait(remaining)
            batch, dropped, now = list[BatchItem](), list[BatchItem](), time.monotonic()
            postponed = deque[BatchItem]()
            while self.jobs and len(batch) < (1 if batch and batch[0].is_unbatched else self.size):
                job = self.jobs.popleft()
                if job.result.cancelled() or job.deadline <= now:
                    dropped.append(job)
                elif batch and (job.is_unbatched or job.compute != batch[0].compute):
                    postponed.append(job)
                else:
                    batch.append(job)
            self.jobs.extendleft(reversed(postponed))
        if dropped:
            self.schedule_in_loop(self.expire_jobs, dropped)
        return batch

    def report_progress(self) -> None:
        """Report progress of the current batch, from any thread. A long batch without progress counts as hung."""
        self.alive = time.monotonic()

    def schedule_in_loop(self, callback: Callable[..., None], *arguments: Any) -> None:
        """Schedule a callback in the event loop, unless the loop has ended."""
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(callback, *arguments)

    def expire_jobs(self, jobs: list[BatchItem]) -> None:
        """Count dropped jobs as expired or cancelled, and refuse those that a request still waits for."""
        for job in jobs:
            is_expired = job.deadline <= self.loop.time()
            self.expired, self.cancelled = self.expired + is_expired, self.cancelled + (not is_expired)
            if not job.result.done():
                job.result.set_exception(
                    Refusal(504, "deadline", "the deadline expired", "retry with a longer deadline")
                )

    def deliver_results(self, jobs: list[BatchItem], results: list[Any], seconds: float) -> None:
        """Deliver the results of a batch to the waiting requests, in the event loop."""
        if not jobs[0].is_unbatched:
            self.observe(len(jobs), seconds)
        for job, result in zip(jobs, results, strict=True):
            if job.result.done():
                continue
            if isinstance(result, Exception):
                job.result.set_exception(result)
            else:
                job.result.set_result(result)

    def close(self) -> None:
        """End the computing thread after its current batch."""
        with self.jobs_available:
            self.closed = True
            self.jobs_available.notify()


def update_running_mean(mean: float, value: float) -> float:
    """Update an exponential moving average with a new value; the first value is the average."""
    return 0.8 * mean + 0.2 * value if mean else value
