"""What people see: progress, notes and tables on stderr or stdout, plain where there is no terminal."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

from vitreous.errors import VitreousError

PLAIN_EVERY = 10.0  # seconds between two progress lines where stderr is no terminal


def speaks() -> bool:
    """Whether this process is the one of those that `torchrun` started that speaks to people."""
    return os.environ.get("RANK", "0") == "0"


class Console:
    """Hears a run (`note`, `progress`) and prints tables. With `quiet_stdout`, stdout belongs to one JSON document.

    `code`: what the command exits with when it is done, where its document tells of something that is not as it should be.
    """

    def __init__(self, quiet_stdout: bool) -> None:
        self.quiet_stdout = quiet_stdout
        self.terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self.bar = None
        self.task = None
        self.label = ""
        self.told = 0.0
        self.began = time.monotonic()
        self.code = 0

    def note(self, text: str) -> None:
        """One line of news on stderr."""
        self.close()
        print(f"note: {text}", file=sys.stderr, flush=True)

    def progress(self, label: str, done: int, total: int | None, text: str = "") -> None:
        """How far a piece of work is: a bar with time left, or a plain line now and then. Without a total: how much is done."""
        if self.terminal:
            self.draw(label, done, total, text)
            return
        now = time.monotonic()
        if label != self.label:
            self.label, self.began, self.told = label, now, 0.0
        if total is None:
            if now - self.told >= PLAIN_EVERY:
                self.told = now
                print(f"{label} {done:,}  {text}", file=sys.stderr, flush=True)
        elif now - self.told >= PLAIN_EVERY or done >= total:
            self.told = now
            left = (now - self.began) / max(done, 1) * (total - done)
            rest = f"  {left:.0f} s left" if now > self.began and done < total else ""
            print(f"{label} {done / max(total, 1):4.0%}  {text}{rest}", file=sys.stderr, flush=True)

    def draw(self, label: str, done: int, total: int | None, text: str) -> None:
        """The bar."""
        from rich.console import Console as Terminal
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        if self.bar is None or label != self.label:
            self.close()
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TaskProgressColumn(),
                TextColumn("{task.fields[text]}"),
                TimeRemainingColumn(),
            )
            self.bar = Progress(*columns, console=Terminal(stderr=True), transient=False)
            self.task = self.bar.add_task(label, total=total, text=text)
            self.label = label
            self.bar.start()
        self.bar.update(self.task, completed=done, text=text)  # type: ignore[arg-type]

    def close(self) -> None:
        """End the bar, if there is one."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def say(self, text: str = "") -> None:
        """One line for people: on stdout, or on stderr where stdout belongs to a document."""
        self.close()
        if speaks():
            print(text, file=sys.stderr if self.quiet_stdout else sys.stdout, flush=True)

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Columns as wide as they need; numbers to the right."""
        cells = [list(head), *(list(row) for row in rows)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
        numeric = [
            all(row[i] == "-" or row[i].replace(",", "").replace(".", "").rstrip("%GM").lstrip("-").isdigit() for row in cells[1:])
            for i in range(len(head))
        ]
        for row in cells:
            self.say("  ".join(c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, widths, numeric, strict=True)).rstrip())

    def error(self, error: VitreousError) -> None:
        """What was wrong, and the way out."""
        self.close()
        print(f"error: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"  {error.hint}", file=sys.stderr)
        sys.stderr.flush()
