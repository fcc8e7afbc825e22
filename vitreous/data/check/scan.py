"""Every sample of a split looked at, in processes of their own: one that dies or hangs costs the file that it was at,
not the check."""

from __future__ import annotations

import gc
import multiprocessing
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np

from vitreous.data.check.record import RECORD, UNREADABLE, survey
from vitreous.data.split import Split
from vitreous.errors import ResourceError

SPAN = 64  # samples that a process is given at a time
HANG = 60.0  # seconds at one file after which its process is ended
STILLBORN = 5  # processes in a row that may end before they looked at anything

Job = tuple[np.dtype, Callable[..., None]]  # the record of a sample, and what fills in those of a span
Progress = Callable[[int], None]  # hears how many samples are done


@dataclass
class Seen:
    """What was seen of a split: `records`, one a sample, and the reason for each sample that cannot be read."""

    records: np.ndarray
    reasons: dict[int, str] = field(default_factory=dict)


def scan(split: Split, workers: int, progress: Progress = lambda done: None, job: Job = (RECORD, survey)) -> Seen:
    """Look at every sample once, in so many processes; 0: in this one, which a decoder that crashes takes along.

    What is returned does not depend on `workers`. Memory: one record a sample, shared by the processes, and the
    reasons. Raises ResourceError where processes cannot live at all.
    """
    if not workers:
        seen = Seen(np.zeros(len(split), job[0]))
        for start, stop in spans(len(split)):
            job[1](split, (start, stop), seen.records, lambda sample: None, partial(note, seen))
            progress(stop)
        return seen
    return Crew(split, workers, progress, job).work()


def spans(count: int) -> Iterator[tuple[int, int]]:
    """[0, count) in pieces."""
    return ((low, min(low + SPAN, count)) for low in range(0, count, SPAN))


def note(seen: Seen, sample: int, reason: str) -> None:
    """Keep why a sample cannot be read; equal reasons are kept once."""
    seen.reasons[sample] = sys.intern(reason)


@dataclass
class Hand:
    """One process, its end of the pipe, and the samples [start, stop) that it was given; `at` is the last that it
    began, shared with it."""

    process: Any
    pipe: Connection
    at: Any
    start: int = 0
    stop: int = 0
    last: int = -1  # what `at` was when it was looked at before, and when that was
    since: float = 0.0
    hung: bool = False


class Crew:
    """The processes that look at one split, and what they have seen."""

    def __init__(self, split: Split, workers: int, progress: Progress, job: Job) -> None:
        self.split, self.workers, self.progress, self.job = split, workers, progress, job
        self.context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
        self.buffer = self.context.RawArray("B", max(1, len(split)) * job[0].itemsize)
        self.seen = Seen(np.frombuffer(self.buffer, job[0], len(split)))
        self.waiting = deque(spans(len(split)))
        self.hands: list[Hand] = []
        self.done = self.stillborn = 0

    def work(self) -> Seen:
        """Give out spans until none is left. Whatever ends this ends the processes."""
        try:
            for _ in range(min(self.workers, len(self.waiting))):
                self.hire()
            while self.hands:
                for pipe in wait([hand.pipe for hand in self.hands], timeout=1.0):
                    self.hear(next(hand for hand in self.hands if hand.pipe is pipe))
                self.look_after()
                self.progress(self.done)
        finally:
            for hand in self.hands:
                hand.process.kill()
            for hand in self.hands:
                hand.process.join()
        return self.seen

    def hire(self) -> None:
        """Start a process, and give it a span."""
        pipe, other = self.context.Pipe()
        at = self.context.RawValue("q", -1)
        process = self.context.Process(target=labour, args=(self.split, self.buffer, self.job, at, other), daemon=True)
        self.hands.append(hand := Hand(process, pipe, at))
        process.start()
        other.close()
        self.give(hand)

    def give(self, hand: Hand) -> None:
        """The next span, or the end."""
        if not self.waiting:
            self.hands.remove(hand)
            with suppress(OSError):
                hand.pipe.send(None)
            hand.process.join()
            return
        hand.start, hand.stop = self.waiting.popleft()
        hand.at.value, hand.last, hand.since = hand.start - 1, hand.start - 1, time.monotonic()
        with suppress(OSError):  # it died meanwhile: its pipe will tell
            hand.pipe.send((hand.start, hand.stop))

    def hear(self, hand: Hand) -> None:
        """Why a sample cannot be read, that a span is done, or that the process is no more."""
        try:
            message = hand.pipe.recv()
        except (EOFError, OSError):
            self.bury(hand)
            return
        if message is not None:
            note(self.seen, *message)
            return
        self.stillborn = 0
        self.done += hand.stop - hand.start
        self.give(hand)

    def bury(self, hand: Hand) -> None:
        """Name the file that a process ended at, and have another process do the rest of its span."""
        hand.process.join()
        self.hands.remove(hand)
        code, at = hand.process.exitcode, hand.at.value
        left = [(hand.start, hand.stop)]
        if at >= hand.start:
            how = f"takes longer than {HANG:g} s" if hand.hung else f"ends the process that reads it ({ending(code)})"
            self.seen.records[at] = np.zeros((), self.job[0])
            self.seen.records["state"][at] = UNREADABLE
            note(self.seen, at, how)
            self.done += 1
            left = [(hand.start, at), (at + 1, hand.stop)]
        self.stillborn = 0 if at >= hand.start else self.stillborn + 1
        if self.stillborn > STILLBORN:
            raise ResourceError(
                f"processes end before they read an image ({ending(code)})", "try fewer --workers, or --workers 0"
            )
        self.waiting.extendleft(span for span in left if span[0] < span[1])
        if self.waiting:
            self.hire()

    def look_after(self) -> None:
        """End the processes that have been at one file for too long."""
        now = time.monotonic()
        for hand in self.hands:
            if hand.at.value != hand.last:
                hand.last, hand.since = hand.at.value, now
            elif now - hand.since > HANG:
                hand.hung = True
                hand.process.kill()


def ending(code: int) -> str:
    """How a process ended, by its exit code."""
    return signal.Signals(-code).name if code < 0 and -code in set(signal.Signals) else f"exit code {code}"


def labour(split: Split, buffer: Any, job: Job, at: Any, pipe: Connection) -> None:
    """In a process of the crew: look at spans of samples until there are none; Ctrl-C is left to the main process."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()  # to look for garbage among what the main process left would copy all of it
    records = np.frombuffer(buffer, job[0], len(split))
    try:
        while span := pipe.recv():
            job[1](
                split, span, records, partial(setattr, at, "value"), lambda sample, reason: pipe.send((sample, reason))
            )
            pipe.send(None)
    except (EOFError, OSError):
        return
