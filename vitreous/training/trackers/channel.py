"""Call a tracker in a separate thread, through a bounded queue, so that the tracker never blocks the run."""

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

MAX_QUEUED_CALLS = 1_000  # maximum number of queued calls, after which the tracker is disabled
MARK_SECONDS = 1.0  # minimum seconds between two writes of a tracker's progress
LAST_WRITE_SECONDS = 1.0  # maximum seconds for a disabled tracker to write its progress
TRACKERS_FILE = "trackers.json"  # file in the run folder: each tracker's ID of the run, and the mark of its last line

#: order of a line in metrics.jsonl: its step, and 1 for an evaluation, which follows the training metrics of the step
Mark = tuple[int, int]


def line_mark(line: MetricsLine) -> Mark:
    """Return the mark of a line of metrics: its position in the order of metrics.jsonl."""
    return line["step"], int("lr" not in line)


class TrackerProgress:
    """The progress of each tracker: its ID of the run and the last line that it received. Stored in trackers.json;
    thread-safe."""

    def __init__(self, folder: Path) -> None:
        self.path, self.lock = folder / TRACKERS_FILE, threading.Lock()
        text = self.path.read_text("utf-8") if self.path.is_file() else ""
        self.entries: dict[str, dict[str, Any]] = parse_json_line(text) or {}

    def get_run_id(self, name: str) -> str:
        """Return a tracker's ID of the run; "" if there is none."""
        return self.entries.get(name, {}).get("id", "")

    def mark(self, name: str) -> Mark:
        """Return the mark of the last line that a tracker has received; (-1, 0) if it has received none."""
        step, is_evaluation = self.entries.get(name, {}).get("at", (-1, 0))
        return step, is_evaluation

    def write(self, name: str, run_id: str, mark: Mark) -> None:
        """Store the progress of a tracker. If the disk is full, it is not stored, and a resumed run sends some lines
        twice."""
        with self.lock, suppress(OSError):
            self.entries[name] = {"id": run_id, "at": list(mark)}
            write_text_atomic(self.path, json.dumps(self.entries, indent=2) + "\n")


class TrackerChannel:
    """Sends calls to one tracker in a separate thread. `problem` is the reason why the tracker was disabled, or ""."""

    def __init__(
        self, name: str, make_tracker: Callable[[], Tracker], progress: TrackerProgress, folder: RunFolder
    ) -> None:
        self.name, self.make_tracker, self.progress, self.folder = name, make_tracker, progress, folder
        self.queue: Queue[tuple[str, tuple[Any, ...]]] = Queue(MAX_QUEUED_CALLS)
        self.problem = ""
        self.thread = threading.Thread(target=self.run, name=f"tracker {name}", daemon=True)

    def enqueue(self, call: str, *arguments: Any) -> None:
        """Queue a call of the tracker's method `call` without blocking. If the queue is full, disable the tracker."""
        if self.problem:
            return
        try:
            self.queue.put_nowait((call, arguments))
        except Full:
            self.problem = f"the tracker does not respond, and {MAX_QUEUED_CALLS:,} calls are queued"

    def start(self, step: int, lines: Sequence[MetricsLine]) -> None:
        """Start the thread, open the run, which continues from `step`, and send the `lines` that the tracker has not
        received."""
        self.enqueue("start", step, lines)
        if self.name not in self.progress.entries:  # stored before the first call, so that a resumed run tries again
            self.progress.write(self.name, "", self.progress.mark(self.name))
        self.thread.start()

    def close(self, deadline: float) -> None:
        """Wait for the last call until the clock (`time.monotonic`) reaches `deadline`."""
        if self.thread.ident is None:
            return
        self.enqueue("")
        remaining = deadline - time.monotonic()
        self.thread.join(max(0.0, min(remaining, LAST_WRITE_SECONDS) if self.problem else remaining))
        if not self.thread.is_alive():
            return
        ABANDONED_THREADS.add(self.thread.name)
        if not self.problem:
            self.problem = f"the tracker did not respond in time, and {self.queue.qsize():,} calls are queued"

    def run(self) -> None:
        """Execute queued calls until the last one, or until a call raises, which disables the tracker."""
        try:
            self.tracker = self.make_tracker()
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
        """Call the tracker's `start`, and send the lines that it has not received."""
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
        """Send a line of metrics, unless the tracker already has it."""
        if line_mark(line) <= self.skipped:
            return
        self.tracker.log_line(line)
        self.reached = max(self.reached, line_mark(line))
        if time.monotonic() - self.written >= MARK_SECONDS:
            self.written = time.monotonic()
            self.progress.write(self.name, self.tracker_run_id, self.reached)
