"""The one thread that computes: it takes the pictures that wait, leaves out those that nobody waits for, and answers
them together.

It never waits long for a batch to fill: only while pictures are being decoded, and for a small part of what a batch
takes.
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

DEFAULT_BATCH_SIZE = 8  # pictures of a batch, of engines without `chunk_size`
MAX_WAIT_SHARE = 0.1  # of a batch's time, that pictures which are being decoded are waited for
HANG_SECONDS = 5.0  # seconds beyond ten times the usual after which a batch is given up for lost
COMPUTE_NICENESS = (
    10  # steps that the computing thread stands back: whoever asks how the server does is answered while it computes
)


@dataclass(eq=False)
class BatchItem:
    """Work for the computing thread. Images of the same `work` are computed together unless `alone`.

    `work`: a batch of images (B, C, *image), or a list of images of several sizes -> (B, ...); where `alone` one input
    -> its result.
    """

    work: Callable[[Any], Any]
    input: Any
    deadline: float
    answer: asyncio.Future[Any] = field(repr=False)
    _: KW_ONLY
    alone: bool = False


class Batcher:
    """`decoding` tells how many pictures will soon be here. `observe` hears of each batch: pictures, seconds."""

    def __init__(
        self, decoding: Callable[[], int], observe: Callable[[int, float], None], size: int = DEFAULT_BATCH_SIZE
    ) -> None:
        self.decoding, self.observe, self.size = decoding, observe, size
        self.jobs: deque[BatchItem] = deque()
        self.arrived = threading.Condition()
        self.usual = self.per_image = 0.0  # seconds of a batch and of a picture in it, running means
        self.began: float | None = None
        self.alive = 0.0  # when long work last showed that it goes on
        self.expired = self.cancelled = self.failures = 0
        self.closed = False
        self.loop = asyncio.get_running_loop()
        self.thread = threading.Thread(target=self.run, name="compute", daemon=True)
        self.thread.start()

    async def compute(self, work: Callable[[Any], Any], input: Any, deadline: float, alone: bool = False) -> Any:
        """The result for one input, `work` as in BatchItem. Raises Refusal where the deadline passes first, and what
        `work` raises or, alone, returns as an exception."""
        job = BatchItem(work, input, deadline, self.loop.create_future(), alone=alone)
        with self.arrived:
            self.jobs.append(job)
            self.arrived.notify()
        return await job.answer

    @property
    def lost(self) -> str:
        """Why there will be no more answers; an empty string where all is well."""
        began = self.began
        if not self.thread.is_alive() and not self.closed:
            return "the computing thread ended"
        if began is not None and time.monotonic() - max(began, self.alive) > HANG_SECONDS + 10 * self.usual:
            return "a batch takes too long"
        return "computing failed three times in a row" if self.failures >= 3 else ""

    def run(self) -> None:
        """Take and answer, until closed."""
        if sys.platform == "linux":
            with suppress(OSError):
                own = threading.get_native_id()
                os.setpriority(os.PRIO_PROCESS, own, min(19, os.getpriority(os.PRIO_PROCESS, own) + COMPUTE_NICENESS))
        while (batch := self.take()) is not None:
            if not batch:
                continue
            self.began = began = time.monotonic()
            try:
                inputs, work = [job.input for job in batch], batch[0].work
                answers = [work(inputs[0])] if batch[0].alone else list(work(stack_same_size(inputs)))
                self.failures = 0
            except Exception as error:  # one batch must not end the thread
                self.failures += 1
                answers = [error] * len(batch)
            self.began = None
            seconds = time.monotonic() - began
            if not batch[0].alone:
                self.usual = update_running_mean(self.usual, seconds)
                self.per_image = update_running_mean(self.per_image, seconds / len(batch))
            self.schedule_in_loop(self.deliver_results, batch, answers, seconds)

    def take(self) -> list[BatchItem] | None:
        """The next batch, perhaps empty; None when closed."""
        with self.arrived:
            while not self.jobs and not self.closed:
                self.arrived.wait()
            if self.closed:
                return None
            if not self.jobs[0].alone:
                until = time.monotonic() + MAX_WAIT_SHARE * self.usual
                while len(self.jobs) < self.size and self.decoding() > 0 and (left := until - time.monotonic()) > 0:
                    self.arrived.wait(left)
            batch, dropped, now = list[BatchItem](), list[BatchItem](), time.monotonic()
            postponed = deque[BatchItem]()
            while self.jobs and len(batch) < (1 if batch and batch[0].alone else self.size):
                job = self.jobs.popleft()
                if job.answer.cancelled() or job.deadline <= now:
                    dropped.append(job)
                elif batch and (job.alone or job.work != batch[0].work):
                    postponed.append(job)
                else:
                    batch.append(job)
            self.jobs.extendleft(reversed(postponed))
        if dropped:
            self.schedule_in_loop(self.expire_jobs, dropped)
        return batch

    def beat(self) -> None:
        """Show that the batch which is being computed goes on, in whatever thread; else it is given up as hung."""
        self.alive = time.monotonic()

    def schedule_in_loop(self, callback: Callable[..., None], *arguments: Any) -> None:
        """Run something in the event loop, if it still runs."""
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(callback, *arguments)

    def expire_jobs(self, jobs: list[BatchItem]) -> None:
        """Drop jobs that are late or cancelled."""
        for job in jobs:
            late = job.deadline <= self.loop.time()
            self.expired, self.cancelled = self.expired + late, self.cancelled + (not late)
            if not job.answer.done():
                job.answer.set_exception(
                    Refusal(504, "deadline", "not answered before the deadline", "ask again, with a longer one")
                )

    def deliver_results(self, jobs: list[BatchItem], answers: list[Any], seconds: float) -> None:
        """The answers of a batch."""
        if not jobs[0].alone:
            self.observe(len(jobs), seconds)
        for job, one in zip(jobs, answers, strict=True):
            if job.answer.done():
                continue
            if isinstance(one, Exception):
                job.answer.set_exception(one)
            else:
                job.answer.set_result(one)

    def close(self) -> None:
        """Take no more work."""
        with self.arrived:
            self.closed = True
            self.arrived.notify()


def update_running_mean(mean: float, value: float) -> float:
    """An exponential moving average."""
    return 0.8 * mean + 0.2 * value if mean else value
