"""Draw `terminal.svg`: a run of `vitreous train digits` in a terminal, played faster than it was recorded.

`python docs/figures/build.py terminal` trains the digits model in a pseudo-terminal, and stores the output with the
time of each write in WORK/terminal/recording.json; a later build reuses that file. The recording is played `SPEED`
times as fast, as the title bar of the figure states, and pauses are limited to `LONGEST_PAUSE` seconds of playing time.
The script of the run (`RUN`) disables the measurement of other load on the cores, which would print a note.

The figure is an SVG animated by CSS: GitHub plays it in an `<img>`, and text is sharp at every width. Renderers without
animations, and readers who prefer reduced motion, see the last screen.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import shutil
import struct
import sys
import termios
import time
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

OUTPUTS = ("terminal.svg",)
DATASETS: tuple[str, ...] = ()

RUN = """from vitreous.cli.main import main
from vitreous.system.cores import ContentionMonitor
ContentionMonitor.poll = lambda self: None
main()"""
ARGUMENTS = ("train", "digits", "--out", "runs/digits")
COLUMNS, ROWS = 78, 21
SPEED = 14
LONGEST_PAUSE = 0.6  # maximum pause in seconds of playing time
KEY_EVERY = 0.05  # seconds between two typed characters
LAST_SCREEN = 3.5  # seconds for which the last screen is shown at the end
FIRST_SCREEN = 1.0  # seconds for which the last screen is shown at the start, so that the first frame is not empty

PROMPT = "\x1b[1;32m$\x1b[0m "
#: sizes of a character cell and of the window frame, in units of the SVG
CELL_WIDTH, CELL_HEIGHT, FONT_SIZE, MARGIN, TITLE_HEIGHT = 10.0, 22.0, 16.5, 16.0, 38.0
THEME = TerminalTheme(
    (22, 27, 34),
    (225, 230, 236),
    [
        *((72, 79, 88), (255, 123, 114), (86, 211, 100), (227, 179, 65)),
        *((121, 192, 255), (218, 170, 255), (86, 212, 221), (201, 209, 217)),
    ],
)
FONTS = "ui-monospace,SFMono-Regular,'SF Mono',Menlo,Consolas,'DejaVu Sans Mono','Liberation Mono',monospace"


def build(context: Any) -> None:
    """Record the run, if there is no recording yet, and draw the figure.

    Args:
        context: the `Context` of build.py.
    """
    folder = context.work / "terminal"
    recording = folder / "recording.json"
    if not recording.exists():
        folder.mkdir(parents=True, exist_ok=True)
        recording.write_text(json.dumps(record_run(folder)))
    screens = time_screens(json.loads(recording.read_text()))
    (context.out / OUTPUTS[0]).write_text(draw_svg(screens))


def record_run(folder: Path) -> list[tuple[float, str]]:
    """Train in a pseudo-terminal of `COLUMNS` x `ROWS`, and return (seconds since the start, text) of each write.

    Raises:
        SystemExit: the run failed.
    """
    shutil.rmtree(folder / "runs", ignore_errors=True)
    process, descriptor = pty.fork()
    if process == 0:
        os.chdir(folder)
        environment = dict(os.environ, TERM="xterm-256color", COLUMNS=str(COLUMNS), LINES=str(ROWS))
        os.execve(sys.executable, [sys.executable, "-c", RUN, *ARGUMENTS], environment)
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    start_time, writes, pending = time.monotonic(), [], b""
    while True:
        try:
            pending += os.read(descriptor, 65536)
        except OSError:  # on Linux, the end of the output of a pseudo-terminal
            break
        text = pending.decode(errors="ignore")  # the bytes of a character may be split between two reads
        pending = pending[len(text.encode()) :]
        writes.append((time.monotonic() - start_time, text))
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    if code:
        raise SystemExit(
            f"vitreous {' '.join(ARGUMENTS)} ended with exit code {code}:\n{writes[-1][1] if writes else ''}"
        )
    return writes


class Screen:
    """The lines of a terminal. It supports the few control sequences that the progress bar of rich prints.

    Lines contain ANSI colours, and are wrapped at `COLUMNS` by `visible_rows`.
    """

    TOKEN = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|(\r)|(\n)|([^\x1b\r\n]+)")

    def __init__(self, lines: list[str]) -> None:
        self.lines, self.line, self.at_start = lines, len(lines) - 1, True

    def feed_output(self, text: str) -> None:
        """Process output of the program: text and control sequences.

        Raises:
            ValueError: a control sequence is not supported.
        """
        for parameters, command, carriage_return, newline, plain in self.TOKEN.findall(text):
            if carriage_return:
                self.at_start = True
            elif newline:
                self.line += 1
                if self.line == len(self.lines):
                    self.lines.append("")
            elif command == "A":
                self.line -= int(parameters or 1)
            elif command == "K":
                self.lines[self.line] = ""
            elif command == "m" or plain:
                if self.at_start and plain:
                    self.lines[self.line] = ""
                self.at_start = self.at_start and not plain
                self.lines[self.line] += plain or f"\x1b[{parameters}m"
            elif parameters != "?25":  # ESC[?25h and ESC[?25l show and hide the cursor
                raise ValueError(f"terminal.py cannot play the control sequence ESC[{parameters}{command}")

    def visible_rows(self) -> list[str]:
        """Return the last `ROWS` rows as markup of rich, at most `COLUMNS` characters each."""
        rows = [row for line in self.lines for row in wrap_line(line)]
        return rows[-ROWS:]


def wrap_line(line: str) -> list[str]:
    """Wrap a line with ANSI colours into rows of `COLUMNS` characters, as markup of rich."""
    text = Text.from_ansi(line)
    return [row.markup for row in text.divide(range(COLUMNS, len(text), COLUMNS))]


def time_screens(writes: list[tuple[float, str]]) -> list[tuple[float, list[str]]]:
    """Return (seconds of playing time, rows) of each screen: the last screen, the typing of the command, the
    recording."""
    command = "vitreous " + " ".join(ARGUMENTS)
    screens = [(0.4, [PROMPT_MARKUP])]
    screens += [(KEY_EVERY, [PROMPT_MARKUP + command[:end]]) for end in range(1, len(command) + 1)]
    screen, previous_moment = Screen([PROMPT + command, ""]), 0.0
    for moment, text in writes:
        pause = min((moment - previous_moment) / SPEED, LONGEST_PAUSE)
        screens[-1] = (screens[-1][0] + pause, screens[-1][1])
        screen.feed_output(text)
        rows, previous_moment = screen.visible_rows(), moment
        if rows != screens[-1][1]:
            screens.append((0.0, rows))
    rows = [*screens[-1][1][:-1], PROMPT_MARKUP]
    return [(FIRST_SCREEN, rows), *screens, (LAST_SCREEN, rows)]


PROMPT_MARKUP = wrap_line(PROMPT)[0]


def draw_svg(screens: list[tuple[float, list[str]]]) -> str:
    """Return the animated SVG. Every content of a row is a separate element, and CSS shows one of them at a time."""
    total = sum(seconds for seconds, _ in screens)
    last = screens[-1][1]
    styles, drawn = [], []
    for number, (row, content, spans) in enumerate(row_intervals(screens)):
        is_last = row < len(last) and last[row] == content
        name = f"s{number}"
        styles.append(css_rule(name, spans, total, is_last))
        drawn.append(f'<g id="{name}">{"".join(draw_row(row, content))}</g>')
    width, height = COLUMNS * CELL_WIDTH + 2 * MARGIN, TITLE_HEIGHT + ROWS * CELL_HEIGHT + MARGIN
    dots = "".join(
        f'<circle cx="{MARGIN + 6 + 20 * index}" cy="19" r="6" fill="{colour}"/>'
        for index, colour in enumerate(("#ff5f57", "#febc2e", "#28c840"))
    )
    style = (
        f"text{{font-family:{FONTS};font-size:{FONT_SIZE}px;fill:{to_hex(THEME.foreground_color)};white-space:pre}}"
        f".b{{font-weight:700}}.t{{font-size:14px;fill:#9aa4af}}g{{animation:{total:.2f}s step-end infinite}}"
        + "".join(styles)
        + "@media(prefers-reduced-motion:reduce){g{animation:none!important}}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" role="img"><title>vitreous {" ".join(ARGUMENTS)}</title><style>{style}</style>'
        f'<rect x=".5" y=".5" width="{width - 1:g}" height="{height - 1:g}" rx="10" '
        f'fill="{to_hex(THEME.background_color)}" stroke="#484f58"/>{dots}'
        f'<text class="t" x="{width - MARGIN:g}" y="24" text-anchor="end">{SPEED}x speed</text>'
        + "\n".join(drawn)
        + "</svg>\n"
    )


def row_intervals(screens: list[tuple[float, list[str]]]) -> Iterator[tuple[int, str, list[tuple[float, float]]]]:
    """Yield (row, content, intervals) for every content of every row; it is shown in these intervals, in seconds."""
    spans_by_content: dict[tuple[int, str], list[tuple[float, float]]] = {}
    begin = 0.0
    for seconds, rows in screens:
        for row, content in enumerate(rows):
            if not content:
                continue
            spans = spans_by_content.setdefault((row, content), [])
            if spans and abs(spans[-1][1] - begin) < 1e-9:
                spans[-1] = (spans[-1][0], begin + seconds)
            elif seconds:
                spans.append((begin, begin + seconds))
        begin += seconds
    for (row, content), spans in spans_by_content.items():
        if spans:
            yield row, content, spans


def css_rule(name: str, spans: list[tuple[float, float]], total: float, is_last: bool) -> str:
    """Return the CSS that shows an element in its intervals `spans`; without animations, it is shown if `is_last`."""
    frames = {0.0: False}
    for begin, end in spans:
        frames |= {100 * begin / total: True, 100 * end / total: False}
    steps = "".join(
        f"{moment:.2f}%{{visibility:{'visible' if shown else 'hidden'}}}" for moment, shown in sorted(frames.items())
    )
    static = "" if is_last else "visibility:hidden;"
    return f"#{name}{{{static}animation-name:{name}}}@keyframes {name}{{{steps}}}"


def draw_row(row: int, content: str) -> Iterator[str]:
    """Yield the SVG elements of a row: text, stretched to the width of its cells for any font, and the bar as
    rectangles."""
    console = Console(width=COLUMNS, color_system="truecolor")
    column, top = 0, TITLE_HEIGHT + row * CELL_HEIGHT
    for segment in Text.from_markup(content).render(console):
        style = segment.style
        colour = to_hex(style.color.get_truecolor(THEME)) if style and style.color else ""
        for run in re.findall(r"[━╸╺]+|(?: ?[^\s━╸╺]+)+|\s+", segment.text):
            left, length = MARGIN + column * CELL_WIDTH, cell_len(run)
            fill = f' fill="{colour}"' if colour else ""
            if run[0] in "━╸╺":
                yield f'<rect x="{left:g}" y="{top + 9:g}" width="{length * CELL_WIDTH:g}" height="4" rx="2"{fill}/>'
            elif run.strip():
                lead = len(run) - len(run.lstrip())
                left, width = left + lead * CELL_WIDTH, (length - lead) * CELL_WIDTH
                weight = ' class="b"' if style and style.bold else ""
                colouring = f' style="fill:{colour}"' if colour else ""
                yield (
                    f'<text{weight} x="{left:g}" y="{top + 16:g}" textLength="{width:g}" '
                    f'lengthAdjust="spacingAndGlyphs"{colouring}>{escape(run.strip(), quote=False)}</text>'
                )
            column += length


def to_hex(colour: Any) -> str:
    """Convert a colour (red, green, blue), 0 to 255 each, to CSS: `#ff8000`."""
    return "#{:02x}{:02x}{:02x}".format(*colour)
