"""What people see: progress, notes and tables on stderr or stdout, plain where there is no terminal."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from vitreous.cores import Neighbours
from vitreous.errors import VitreousError

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
PLAIN_EVERY = 10.0  # seconds between two progress lines where stderr is no terminal


def speaks() -> bool:
    """Whether this process is the one of those that `torchrun` started that speaks to people."""
    return os.environ.get("RANK", "0") == "0"


def write_line(text: str, stream: TextIO) -> None:
    """Print a line. Where the reader of a pipe has gone away, the line and all that follow are dropped, and the work goes on."""
    try:
        print(text, file=stream, flush=True)
    except BrokenPipeError:
        discard(stream)


def discard(stream: TextIO) -> None:
    """Connect the descriptor of a stream to the null device."""
    if (descriptor := descriptor_of(stream)) is not None:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, descriptor)
        os.close(null)


@contextmanager
def reserve_stdout() -> Iterator[TextIO]:
    """Keep stdout for the caller, who gets a stream to it; everything else that is written there meanwhile goes to stderr.

    This holds for `print`, for streams that a library has kept, and for C code and child processes, which write to file descriptor 1.
    """
    own, kept = sys.stdout, None
    if descriptor_of(own) == 1:
        own.flush()
        kept = os.dup(1)
        os.dup2(2, 1)
    stream = own if kept is None else open(kept, "w", encoding=own.encoding, errors=own.errors)  # noqa: SIM115
    sys.stdout = sys.stderr
    try:
        yield stream
    finally:
        sys.stdout = own
        if kept is not None:
            own.flush()
            os.dup2(kept, 1)
            stream.close()


def descriptor_of(stream: TextIO) -> int | None:
    """The file descriptor of a stream; None for one in memory."""
    try:
        return stream.fileno()
    except (OSError, ValueError, AttributeError):
        return None


def as_json(document: Any) -> str:
    """A document as one line of JSON that a terminal shows as it is: what is not printable, file names may have it, is escaped."""
    text = json.dumps(document, ensure_ascii=False)
    return text if text.isprintable() else "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


def readable_bytes(count: float) -> str:
    """Bytes in the largest of B, KiB, MiB, GiB, TiB of which there is one: `1.5 GiB`."""
    power = min(max(int(abs(count)).bit_length() - 1, 0) // 10, len(UNITS) - 1)
    return f"{count / 1024**power:.{int(power > 0)}f} {UNITS[power]}"


class Console:
    """Hears a run (`note`, `progress`) and prints tables.

    `document_to`: the stream that belongs to one JSON document, with `--json`; lines for people then go to stderr. `code`: what the
    command exits with when it is done, where its document tells of something that is not as it should be.
    """

    def __init__(self, document_to: TextIO | None = None) -> None:
        self.document_to = document_to
        self.terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self.bar = None
        self.task = None
        self.label = ""
        self.told = 0.0
        self.began = time.monotonic()
        self.code = 0
        self.neighbours = Neighbours(self.note, siblings="RANK" in os.environ)

    def note(self, text: str) -> None:
        """One line of news on stderr."""
        self.close()
        write_line(f"note: {text}", sys.stderr)

    def line(self, text: str) -> None:
        """One plain line on stderr."""
        self.close()
        write_line(text, sys.stderr)

    def progress(self, label: str, done: int, total: int | None, text: str = "") -> None:
        """How far a piece of work is: a bar with time left, or a plain line now and then. Without a total: how much is done."""
        self.neighbours.poll()
        if self.terminal:
            self.draw(label, done, total, text)
            return
        now = time.monotonic()
        if label != self.label:
            self.label, self.began, self.told = label, now, 0.0
        if total is None:
            if now - self.told >= PLAIN_EVERY:
                self.told = now
                write_line(f"{label} {done:,}  {text}", sys.stderr)
        elif now - self.told >= PLAIN_EVERY or done >= total:
            self.told = now
            left = (now - self.began) / max(done, 1) * (total - done)
            rest = f"  {left:.0f} s left" if now > self.began and done < total else ""
            write_line(f"{label} {done / max(total, 1):4.0%}  {text}{rest}", sys.stderr)

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
            write_line(text, sys.stdout if self.document_to is None else sys.stderr)

    def document(self, document: Any) -> None:
        """The JSON document, where one was asked for."""
        self.close()
        if self.document_to is not None and speaks():
            write_line(as_json(document), self.document_to)

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
        write_line(f"error: {error.message}" + (f"\n  {error.hint}" if error.hint else ""), sys.stderr)
