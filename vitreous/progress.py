"""Show progress: a bar in a terminal or a notebook, otherwise plain lines."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol, TextIO

from vitreous.errors import options_to_keywords
from vitreous.system.cores import ContentionMonitor
from vitreous.system.notebook import format_progress_html, open_updatable_cell

CELL_UPDATE_SECONDS = 0.5  # seconds between updates of the bar in a notebook
LINE_INTERVAL_SECONDS = 10.0  # seconds between progress lines if stderr is not a terminal
MIN_BAR_COLUMNS = 100  # in a narrower terminal, the text of the bar is below it
#: names of threads that the process does not wait for when it exits
ABANDONED_THREADS: set[str] = set()


class ProgressListener(Protocol):
    """The interface through which functions report to their caller: notes to print, and progress.

    `progress` receives the name of the work, the number of steps done and in total (None: unknown), and further text.
    """

    def note(self, text: str) -> None: ...
    def progress(self, label: str, done: int, total: int | None, text: str = "") -> None: ...


class NullListener:
    """A listener that ignores every event."""

    def note(self, text: str) -> None:
        """Ignore a note."""

    def progress(self, label: str, done: int, total: int | None, text: str = "") -> None:
        """Ignore progress."""


# environment variables that every launcher of torch.distributed sets
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def is_distributed_launch() -> bool:
    """Return whether `torchrun` or another launcher started this process. RANK alone does not suffice: other programs
    set it too."""
    return all(name in os.environ for name in LAUNCHER_VARIABLES)


def is_main_process() -> bool:
    """Return whether this process prints output: the one of rank 0, or the only process."""
    return not is_distributed_launch() or os.environ["RANK"] == "0"


def write_line(text: str, stream: TextIO | None) -> None:
    """Print a line, and flush the stream.

    If the stream is missing or closed, or the reader of a pipe has exited, this line and all later lines are dropped,
    and no error is raised.
    """
    if stream is None or getattr(stream, "closed", False):
        return
    try:
        print(text, file=stream, flush=True)
    except OSError as error:
        if stream is not sys.stderr and not isinstance(error, BrokenPipeError):
            raise  # such as a full disk, on which results would be lost
        redirect_to_null(stream)


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether a stream exists, is open, and is a terminal."""
    return stream is not None and not getattr(stream, "closed", False) and stream.isatty()


def redirect_to_null(stream: TextIO) -> None:
    """Redirect the file descriptor of a stream to the null device, so that further output is dropped."""
    if (descriptor := get_file_descriptor(stream)) is not None:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, descriptor)
        os.close(null)


def get_file_descriptor(stream: TextIO) -> int | None:
    """Return the file descriptor of a stream; None for an in-memory stream."""
    try:
        return stream.fileno()
    except (OSError, ValueError, AttributeError):
        return None


class ProgressDisplay:
    """A `ProgressListener` that prints notes and progress on stderr."""

    with_options = staticmethod(options_to_keywords)  # converts the options in notes: to Python keywords

    def __init__(self) -> None:
        self.terminal = is_terminal(sys.stderr) and os.environ.get("TERM") != "dumb"
        self.bar = None
        self.task = None
        self.cell: Callable[[str], None] | None = None  # updates the output cell of a notebook with HTML
        self.header: Any = None  # renderable that rich draws above the bar; None for none
        self.label = ""
        self.last_line = 0.0
        self.began = time.monotonic()
        self.initial_done = 0  # steps done at the first report of a label, such as in a resumed run
        self.contention_monitor = ContentionMonitor(self.note, siblings=is_distributed_launch())

    def note(self, text: str) -> None:
        """Print a note on stderr. Options in the text are printed as Python keywords, by `Console` unchanged."""
        self.close()
        write_line(f"note: {self.with_options(text)}", sys.stderr)

    def line(self, text: str) -> None:
        """Print a plain line on stderr."""
        self.close()
        write_line(text, sys.stderr)

    def progress(self, label: str, done: int, total: int | None, text: str = "") -> None:
        """Show progress and remaining time: a bar in a terminal or notebook, else a plain line every few seconds.

        Without a total, only the number of steps done is shown.
        """
        self.contention_monitor.poll()
        if self.terminal:
            self.draw(label, done, total, text)
            return
        now = time.monotonic()
        if label != self.label:
            self.label, self.began, self.last_line, self.initial_done = label, now, 0.0, done
            self.cell = open_updatable_cell() if total else None
        if self.cell is not None and total:
            if now - self.last_line >= CELL_UPDATE_SECONDS or done >= total:
                self.last_line = now
                self.cell(format_progress_html(label, done, total, text, self.seconds_left(now, done, total)))
            return
        if total is None:
            if now - self.last_line >= LINE_INTERVAL_SECONDS:
                self.last_line = now
                write_line(f"{label} {done:,}  {text}", sys.stderr)
        elif now - self.last_line >= LINE_INTERVAL_SECONDS or done >= total:
            self.last_line = now
            remaining = self.seconds_left(now, done, total)
            remaining_text = "" if remaining is None else f"  {remaining:.0f} s left"
            write_line(f"{label} {done / max(total, 1):4.0%}  {text}{remaining_text}", sys.stderr)

    def seconds_left(self, now: float, done: int, total: int) -> float | None:
        """Estimate the remaining seconds from the throughput so far; None before the first step and after the last."""
        if not self.initial_done < done < total:
            return None
        return (now - self.began) / (done - self.initial_done) * (total - done)

    def draw(self, label: str, done: int, total: int | None, text: str) -> None:
        """Draw the bar in a terminal. Its text is next to it or, in fewer than `MIN_BAR_COLUMNS` columns, below it."""
        from rich.console import Console as Terminal
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
        from rich.text import Text

        if self.bar is None or label != self.label:
            self.close()
            terminal = Terminal(stderr=True)
            is_narrow = terminal.width < MIN_BAR_COLUMNS
            columns = [TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()]
            if not is_narrow:
                columns.insert(3, TextColumn("{task.fields[text]}"))
            bar = self.bar = Progress(*columns, console=terminal, transient=self.header is not None)
            headers = [] if self.header is None else [self.header]
            bar.get_renderables = lambda: [
                *headers,
                bar.make_tasks_table(bar.tasks),
                *(Text(task.fields["text"]) for task in bar.tasks if is_narrow and task.fields["text"]),
            ]
            self.task = self.bar.add_task(label, total=total, text=text)
            self.label = label
            self.bar.start()
        self.bar.update(self.task, completed=done, text=text)  # type: ignore[arg-type]

    def close(self) -> None:
        """Stop drawing the bar, if there is one."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None
