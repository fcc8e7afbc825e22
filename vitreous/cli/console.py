"""Console output of commands: progress, notes and errors on stderr; tables, or the JSON document, on stdout."""

from __future__ import annotations

import codecs
import io
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from vitreous.errors import Interrupted, VitreousError
from vitreous.progress import ProgressDisplay, get_file_descriptor, is_main_process, is_terminal, write_line
from vitreous.tasks.metrics import METRICS, Metric

NUMBER_CELL = re.compile(r"-|-*[\d,.]*\d[\d,.]*[%GM]*")  # a cell of a numeric column, which is right-aligned
MIN_TEXT_COLUMN = 12  # characters to which a text column of a table may be shortened in a narrow terminal
ENCODING_ERROR_HANDLER = "vitreous.replace"  # name under which `replace_character` is registered
ASCII_REPLACEMENTS = {"…": "...", "–": "-", "—": "-", "×": "x", "→": "->", "·": "*"}
BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def prepare_streams() -> None:
    """Make stdin, stdout and stderr usable, even if they are closed or not UTF-8.

    A closed stream is opened on the null device, so that no other file gets its descriptor. Characters that the
    encoding lacks are replaced.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    codecs.register_error(ENCODING_ERROR_HANDLER, replace_character)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
        stream = getattr(sys, name)
        if mode == "w" and isinstance(stream, io.TextIOWrapper) and not stream.encoding.lower().startswith("utf"):
            stream.reconfigure(errors=ENCODING_ERROR_HANDLER)


def replace_character(error: UnicodeError) -> tuple[str, int]:
    """Handle an encoding error by replacing characters: those of `ASCII_REPLACEMENTS` by ASCII, others by a JSON
    escape.

    Returns the replacement, and the position at which encoding continues.
    """
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    return "".join(ASCII_REPLACEMENTS.get(c, json.dumps(c)[1:-1]) for c in text), error.end


@contextmanager
def reserve_stdout() -> Iterator[TextIO]:
    """Return a context whose stream writes to stdout, while all other output to stdout goes to stderr.

    Other output is that of `print`, of libraries that keep a reference to `sys.stdout`, and of C code and child
    processes, which write to file descriptor 1.
    """
    original, duplicate = sys.stdout, None
    if get_file_descriptor(original) == 1:
        original.flush()
        duplicate = os.dup(1)
        os.dup2(2, 1)
    stream = original if duplicate is None else open(duplicate, "w", encoding=original.encoding, errors=original.errors)  # noqa: SIM115
    sys.stdout = sys.stderr
    try:
        yield stream
    finally:
        sys.stdout = original
        if duplicate is not None:
            original.flush()
            os.dup2(duplicate, 1)
            stream.close()


def format_json_line(document: Any) -> str:
    """Format a document as one line of JSON in which unprintable characters are escaped."""
    text = json.dumps(document, ensure_ascii=False)
    return text if text.isprintable() else "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


def format_byte_count(count: float) -> str:
    """Format a number of bytes in the largest unit that gives at least 1, from B to TiB: `1.5 GiB`."""
    power = min(max(int(abs(count)).bit_length() - 1, 0) // 10, len(BYTE_UNITS) - 1)
    return f"{count / 1024**power:.{int(power > 0)}f} {BYTE_UNITS[power]}"


class Console(ProgressDisplay):
    """The output of a command: print its notes, progress and tables, and its JSON document.

    `document_to` is the stream for the JSON document of `--json`, None without `--json`. If it is set, all other output
    goes to stderr. `code` is the exit code of a command that finishes; it is not 0 if the document reports a problem.
    """

    with_options = staticmethod(str)  # notes already contain options in command-line form

    def __init__(self, document_to: TextIO | None = None) -> None:
        super().__init__()
        self.document_to = document_to
        self.code = 0

    def print_line(self, text: str = "") -> None:
        """Print a line on stdout, or on stderr if stdout is reserved for a document."""
        self.close()
        if is_main_process():
            write_line(text, sys.stdout if self.document_to is None else sys.stderr)

    def document(self, document: Any) -> None:
        """Print the JSON document if --json is set."""
        self.close()
        if self.document_to is not None and is_main_process():
            write_line(format_json_line(document), self.document_to)

    def table(self, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Print a table with a header line. Numeric columns are right-aligned; None is printed as `-`. In a terminal,
        the widest text columns are shortened to its width."""
        cells = [list(header), *(["-" if cell is None else str(cell) for cell in row] for row in rows)]
        columns = [list(texts) for texts in zip(*cells, strict=True)]
        widths = [max(map(len, texts)) for texts in columns]
        is_numeric = [all(NUMBER_CELL.fullmatch(text) for text in texts[1:]) for texts in columns]
        if self.document_to is None and is_terminal(sys.stdout):
            widths = shorten_columns(widths, is_numeric, shutil.get_terminal_size().columns)
        aligned = [
            [text.rjust(width) if numeric else truncate_cell(text, width).ljust(width) for text in texts]
            for texts, width, numeric in zip(columns, widths, is_numeric, strict=True)
        ]
        for line in zip(*aligned, strict=True):
            self.print_line("  ".join(line).rstrip())

    def error(self, error: VitreousError) -> None:
        """Print the message and the hint of an error on stderr; the prefix `error:` is omitted for interruptions."""
        self.close()
        prefix = "" if isinstance(error, Interrupted) else "error: "
        write_line(f"{prefix}{error.message}" + (f"\n  {error.hint}" if error.hint else ""), sys.stderr)


def shorten_columns(widths: Sequence[int], is_numeric: Sequence[bool], columns: int) -> list[int]:
    """Return the widths of the columns of a table such that lines with two spaces between columns have at most
    `columns` characters. Only the widest text columns are shortened, to no less than `MIN_TEXT_COLUMN`."""
    widths = list(widths)
    while sum(widths) + 2 * (len(widths) - 1) > columns:
        candidates = [index for index, numeric in enumerate(is_numeric) if not numeric and index]
        widest = max(candidates, key=lambda index: widths[index], default=0)
        if widths[widest] <= MIN_TEXT_COLUMN:
            break
        widths[widest] -= 1
    return widths


def truncate_cell(text: str, width: int) -> str:
    """Shorten a text to `width` characters, of which the last is `…`."""
    return text if len(text) <= width else f"{text[: width - 1].rstrip()}…"


def format_split_metrics(name: str, summary: Mapping[str, Any] | None) -> str:
    """Format the metrics of the split `name` (`Report.summary`) as one line, with the primary metric first."""
    from vitreous.tasks.report import get_primary_key

    if summary is None:
        return f"{name}: not evaluated"
    primary = get_primary_key(summary)
    texts = [format_metric(summary, primary, "95 % interval ")]
    secondary = METRICS[primary].secondary if primary in METRICS else None
    texts += [format_metric(summary, key) for key in secondary or () if summary.get(key) is not None]
    return f"{name}: {', '.join(texts)}, {summary['images']} images"


def format_metric(summary: Mapping[str, Any], key: str, prefix: str = "") -> str:
    """Format label, value and confidence interval of the metric `key`; `prefix` precedes the interval."""
    metric = METRICS.get(key) or Metric(key, key, ".4g")
    value, ends = summary.get(key), summary["interval"].get(key)
    text = "not measured" if value is None else format(value, metric.format_spec)
    return f"{metric.label} {text}" + format_interval_suffix(ends, metric.short_form, prefix)


def format_interval_suffix(ends: Sequence[float] | None, form: str = ".1%", prefix: str = "") -> str:
    """Format an interval in parentheses after a space; an empty string for None. `form` is the format of its ends."""
    return f" ({prefix}{ends[0]:{form}} to {ends[1]:{form}})" if ends else ""


def format_percentage(value: float | None, digits: int = 1) -> str:
    """Format a fraction in [0, 1] as a percentage; `-` for None."""
    return "-" if value is None else f"{value:.{digits}%}"
