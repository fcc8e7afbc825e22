"""A tracker in a thread of its own, behind a bounded queue: whatever it does, the run goes on."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Full, Queue
from typing import Any

from vitreous.config import read_yaml
from vitreous.progress import ABANDONED_THREADS
from vitreous.system.disk import write_text_atomic
from vitreous.training.folder import RunFolder, parse_json_line
from vitreous.training.trackers.base import MetricsLine, RunInfo, Tracker

MAX_QUEUED_CALLS = 1_000  # calls that may wait; of a tracker that does not answer, further ones are dropped
MARK_SECONDS = 1.0  # seconds between two writings of how far a tracker is
LAST_WRITE_SECONDS = 1.0  # seconds at most that a tracker which was given up has to write down how far it is
TRACKERS_FILE = "trackers.json"  # in the run folder: identity of the run at each tracker, and the last line that it has

Mark = tuple[int, int]  # of a line: its step, and 1 for an evaluation, which comes after the training figures


def line_mark(line: MetricsLine) -> Mark:
    """The place of a line in the order of metrics.jsonl."""
    return line["step"], int("lr" not in line)


class TrackerProgress:
    """What each tracker has of a run, in trackers.json; safe for several threads."""

    def __init__(self, folder: Path) -> None:
        self.path, self.lock = folder / TRACKERS_FILE, threading.Lock()
        text = self.path.read_text("utf-8") if self.path.is_file() else ""
        self.entries: dict[str, dict[str, Any]] = parse_json_line(text) or {}

    def identity(self, name: str) -> str:
        """What a tracker calls the run; empty where it does not know it."""
        return self.entries.get(name, {}).get("id", "")

    def mark(self, name: str) -> Mark:
        """The last line that a tracker has."""
        step, kind = self.entries.get(name, {}).get("at", (-1, 0))
        return step, kind

    def write(self, name: str, identity: str, mark: Mark) -> None:
        """Write down how far a tracker is. A full disk costs lines that are sent twice after a resume, no more."""
        with self.lock, suppress(OSError):
            self.entries[name] = {"id": identity, "at": list(mark)}
            write_text_atomic(self.path, json.dumps(self.entries, indent=2) + "\n")


class TrackerChannel:
    """Sends calls to one tracker. `problem` is empty, or says why the tracker was given up."""

    def __init__(self, name: str, make: Callable[[], Tracker], progress: TrackerProgress, folder: RunFolder) -> None:
        self.name, self.make, self.progress, self.folder = name, make, progress, folder
        self.queue: Queue[tuple[str, tuple[Any, ...]]] = Queue(MAX_QUEUED_CALLS)
        self.problem = ""
        self.thread = threading.Thread(target=self.work, name=f"tracker {name}", daemon=True)

    def enqueue(self, call: str, *arguments: Any) -> None:
        """Have a call made, now or later; never waits."""
        if self.problem:
            return
        try:
            self.queue.put_nowait((call, arguments))
        except Full:
            self.problem = f"it does not answer, and {MAX_QUEUED_CALLS:,} calls wait"

    def start(self, step: int, lines: Sequence[MetricsLine]) -> None:
        """Open the run, which goes on from `step`, and send those of its lines until there that the tracker has not."""
        self.enqueue("start", step, lines)
        if self.name not in self.progress.entries:
            self.progress.write(self.name, "", self.progress.mark(self.name))  # whatever comes, a resumed run tries it
        self.thread.start()

    def close(self, end: float) -> None:
        """Wait for the last call until the clock (`time.monotonic`) shows `end`."""
        if self.thread.ident is None:
            return
        self.enqueue("")
        left = end - time.monotonic()
        self.thread.join(max(0.0, min(left, LAST_WRITE_SECONDS) if self.problem else left))
        if not self.thread.is_alive():
            return
        ABANDONED_THREADS.add(self.thread.name)
        if not self.problem:
            self.problem = f"it did not answer in time, and {self.queue.qsize():,} calls wait"

    def work(self) -> None:
        """Make calls until the last, or the first that raises."""
        try:
            self.tracker = self.make()
            while not self.problem:
                call, arguments = self.queue.get()
                if not call:
                    break
                if call == "start":
                    self.open(*arguments)
                elif call == "log_line":
                    self.send(*arguments)
                else:
                    getattr(self.tracker, call)(*arguments)
        except (Exception, SystemExit) as error:  # of a library that may raise anything
            text = str(error).strip().splitlines()
            self.problem = self.problem or f"{type(error).__name__}: {text[0] if text else 'no reason given'}"[:300]
        finally:
            if hasattr(self, "identity"):
                self.progress.write(self.name, self.identity, self.reached)

    def open(self, step: int, lines: Sequence[MetricsLine]) -> None:
        """Make the call `start`, and catch up."""
        config, last = read_yaml(self.folder.config.read_text("utf-8")), (step, 1)
        mark = self.progress.mark(self.name)
        self.reached = self.skipped = min(mark, last) if self.tracker.rewinds else mark
        self.written = time.monotonic()
        self.identity = self.tracker.start(RunInfo(self.folder.path, self.progress.identity(self.name), step, config))
        self.progress.write(self.name, self.identity, self.reached)
        for line in lines:
            self.send(line)

    def send(self, line: MetricsLine) -> None:
        """A line, unless the tracker has it from before."""
        if line_mark(line) <= self.skipped:
            return
        self.tracker.log_line(line)
        self.reached = max(self.reached, line_mark(line))
        if time.monotonic() - self.written >= MARK_SECONDS:
            self.written = time.monotonic()
            self.progress.write(self.name, self.identity, self.reached)
