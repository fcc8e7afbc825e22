"""A tracker in a separate thread, behind a bounded queue, so that it never blocks the run."""

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

MAX_QUEUED_CALLS = 1_000  # queued calls; if a tracker does not respond, further calls are dropped
MARK_SECONDS = 1.0  # seconds between two writes of a tracker's progress
LAST_WRITE_SECONDS = 1.0  # maximum seconds for a disabled tracker to write its progress
TRACKERS_FILE = "trackers.json"  # in the run folder: each tracker's ID of the run, and its last line

Mark = tuple[int, int]  # of a line: its step, and 1 for an evaluation, which follows the training metrics


def line_mark(line: MetricsLine) -> Mark:
    """Return the position of a line in the order of metrics.jsonl."""
    return line["step"], int("lr" not in line)


class TrackerProgress:
    """The progress of each tracker, in trackers.json; thread-safe."""

    def __init__(self, folder: Path) -> None:
        self.path, self.lock = folder / TRACKERS_FILE, threading.Lock()
        text = self.path.read_text("utf-8") if self.path.is_file() else ""
        self.entries: dict[str, dict[str, Any]] = parse_json_line(text) or {}

    def get_run_id(self, name: str) -> str:
        """Return a tracker's ID of the run; empty if there is none."""
        return self.entries.get(name, {}).get("id", "")

    def mark(self, name: str) -> Mark:
        """Return the mark of the last line that a tracker has received."""
        step, line_kind = self.entries.get(name, {}).get("at", (-1, 0))
        return step, line_kind

    def write(self, name: str, identity: str, mark: Mark) -> None:
        """Write the progress of a tracker. If the disk is full, some lines are sent twice after a resumption."""
        with self.lock, suppress(OSError):
            self.entries[name] = {"id": identity, "at": list(mark)}
            write_text_atomic(self.path, json.dumps(self.entries, indent=2) + "\n")


class TrackerChannel:
    """Sends calls to one tracker. `disabled_reason` is the reason why the tracker was disabled, or empty."""

    def __init__(self, name: str, make: Callable[[], Tracker], progress: TrackerProgress, folder: RunFolder) -> None:
        self.name, self.make, self.progress, self.folder = name, make, progress, folder
        self.queue: Queue[tuple[str, tuple[Any, ...]]] = Queue(MAX_QUEUED_CALLS)
        self.problem = ""
        self.thread = threading.Thread(target=self.run, name=f"tracker {name}", daemon=True)

    def enqueue(self, call: str, *arguments: Any) -> None:
        """Queue a call; never blocks."""
        if self.problem:
            return
        try:
            self.queue.put_nowait((call, arguments))
        except Full:
            self.problem = f"it does not respond, and {MAX_QUEUED_CALLS:,} calls are queued"

    def start(self, step: int, lines: Sequence[MetricsLine]) -> None:
        """Open the run, which continues from `step`, and send those of its earlier lines that the tracker has not
        received."""
        self.enqueue("start", step, lines)
        if self.name not in self.progress.entries:
            self.progress.write(
                self.name, "", self.progress.mark(self.name)
            )  # even after a failure, a resumed run tries it again
        self.thread.start()

    def close(self, end: float) -> None:
        """Wait for the last call until the clock (`time.monotonic`) shows `end`."""
        if self.thread.ident is None:
            return
        self.enqueue("")
        remaining = end - time.monotonic()
        self.thread.join(max(0.0, min(remaining, LAST_WRITE_SECONDS) if self.problem else remaining))
        if not self.thread.is_alive():
            return
        ABANDONED_THREADS.add(self.thread.name)
        if not self.problem:
            self.problem = f"it did not respond in time, and {self.queue.qsize():,} calls are queued"

    def run(self) -> None:
        """Make calls until the last one, or the first one that raises."""
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
        except (Exception, SystemExit) as error:  # libraries may raise anything
            text = str(error).strip().splitlines()
            self.problem = self.problem or f"{type(error).__name__}: {text[0] if text else 'no reason given'}"[:300]
        finally:
            if hasattr(self, "tracker_run_id"):
                self.progress.write(self.name, self.tracker_run_id, self.reached)

    def open(self, step: int, lines: Sequence[MetricsLine]) -> None:
        """Call the tracker's `start`, and send the lines that it lacks."""
        config, end_mark = read_yaml(self.folder.config.read_text("utf-8")), (step, 1)
        mark = self.progress.mark(self.name)
        self.reached = self.skipped = min(mark, end_mark) if self.tracker.rewinds else mark
        self.written = time.monotonic()
        self.tracker_run_id = self.tracker.start(
            RunInfo(self.folder.path, self.progress.get_run_id(self.name), step, config)
        )
        self.progress.write(self.name, self.tracker_run_id, self.reached)
        for line in lines:
            self.send(line)

    def send(self, line: MetricsLine) -> None:
        """Send a line, unless the tracker already has it."""
        if line_mark(line) <= self.skipped:
            return
        self.tracker.log_line(line)
        self.reached = max(self.reached, line_mark(line))
        if time.monotonic() - self.written >= MARK_SECONDS:
            self.written = time.monotonic()
            self.progress.write(self.name, self.tracker_run_id, self.reached)
