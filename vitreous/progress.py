"""How far a piece of work is, for people: a bar where stderr is a terminal or the output a notebook's, else plain
lines."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol, TextIO

from vitreous.errors import options_to_keywords
from vitreous.system.cores import ContentionMonitor
from vitreous.system.notebook import format_progress_html, open_updatable_cell

CELL_UPDATE_SECONDS = 0.5  # seconds between two drawings of a bar in a notebook
LINE_INTERVAL_SECONDS = 10.0  # seconds between two progress lines where stderr is no terminal
MIN_BAR_COLUMNS = 100  # of a terminal: with fewer, the text of a bar is printed below it
#: names of threads that still run when their work was given up; a process that ends does not wait for them
ABANDONED_THREADS: set[str] = set()


class ProgressListener(Protocol):
    """Receives the progress events of a piece of work: notes, and how much of it is done (`total` None: unknown)."""

    def note(self, text: str) -> None: ...
    def progress(self, label: str, done: int, total: int | None, text: str = "") -> None: ...


class NullListener:
    """A listener that ignores every event."""

    def note(self, text: str) -> None:
        """Ignore a note."""

    def progress(self, label: str, done: int, total: int | None, text: str = "") -> None:
        """Ignore progress."""


LAUNCHER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)  # what every launcher of torch.distributed sets


def is_distributed_launch() -> bool:
    """Whether `torchrun` or another launcher has started this process; RANK alone is other programs' too."""
    return all(name in os.environ for name in LAUNCHER_VARIABLES)


def is_main_process() -> bool:
    """Whether this process prints for people: of those that a launcher has started, the first."""
    return not is_distributed_launch() or os.environ["RANK"] == "0"


def write_line(text: str, stream: TextIO | None) -> None:
    """Print a line. Where the stream is missing or closed, or the reader of a pipe has gone away, the line and all that
    follow are dropped, and the work goes on."""
    if stream is None or getattr(stream, "closed", False):
        return
    try:
        print(text, file=stream, flush=True)
    except OSError as error:
        if stream is not sys.stderr and not isinstance(error, BrokenPipeError):
            raise  # a full disk that takes results
        redirect_to_null(stream)


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a stream is there, open, and a terminal."""
    return stream is not None and not getattr(stream, "closed", False) and stream.isatty()


def redirect_to_null(stream: TextIO) -> None:
    """Connect the descriptor of a stream to the null device."""
    if (descriptor := get_file_descriptor(stream)) is not None:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, descriptor)
        os.close(null)


def get_file_descriptor(stream: TextIO) -> int | None:
    """The file descriptor of a stream; None for one in memory."""
    try:
        return stream.fileno()
    except (OSError, ValueError, AttributeError):
        return None


class ProgressDisplay:
    """Shows a run on stderr: what it notes, and its progress. It hears what the loop tells its listener."""

    with_options = staticmethod(options_to_keywords)  # how notes name options

    def __init__(self) -> None:
        self.terminal = is_terminal(sys.stderr) and os.environ.get("TERM") != "dumb"
        self.bar = None
        self.task = None
        self.cell: Callable[[str], None] | None = None  # of a notebook
        self.header: Any = None  # what rich draws above the bar, as long as there is one
        self.label = ""
        self.last_line = 0.0
        self.began = time.monotonic()
        self.first = 0  # done when the label began: a resumed run, or its first steps
        self.neighbours = ContentionMonitor(self.note, siblings=is_distributed_launch())

    def note(self, text: str) -> None:
        """One line of news on stderr, with options as keywords: `vitreous.cli` prints them as options."""
        self.close()
        write_line(f"note: {self.with_options(text)}", sys.stderr)

    def line(self, text: str) -> None:
        """One plain line on stderr."""
        self.close()
        write_line(text, sys.stderr)

    def progress(self, label: str, done: int, total: int | None, text: str = "") -> None:
        """How far a piece of work is: a bar with time left, or a plain line now and then. Without a total: how much is
        done."""
        self.neighbours.poll()
        if self.terminal:
            self.draw(label, done, total, text)
            return
        now = time.monotonic()
        if label != self.label:
            self.label, self.began, self.last_line, self.first = label, now, 0.0, done
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
            left = self.seconds_left(now, done, total)
            rest = "" if left is None else f"  {left:.0f} s left"
            write_line(f"{label} {done / max(total, 1):4.0%}  {text}{rest}", sys.stderr)

    def seconds_left(self, now: float, done: int, total: int) -> float | None:
        """Seconds that are left at the rate so far; None where there is no rate yet, or nothing left."""
        if not self.first < done < total:
            return None
        return (now - self.began) / (done - self.first) * (total - done)

    def draw(self, label: str, done: int, total: int | None, text: str) -> None:
        """The bar, with its text after it or, in a terminal of fewer than `MIN_BAR_COLUMNS`, below it."""
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
            above = [] if self.header is None else [self.header]
            bar.get_renderables = lambda: [
                *above,
                bar.make_tasks_table(bar.tasks),
                *(Text(task.fields["text"]) for task in bar.tasks if is_narrow and task.fields["text"]),
            ]
            self.task = self.bar.add_task(label, total=total, text=text)
            self.label = label
            self.bar.start()
        self.bar.update(self.task, completed=done, text=text)  # type: ignore[arg-type]

    def close(self) -> None:
        """End the bar, if there is one."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None
