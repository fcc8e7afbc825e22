"""Live training curves in the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from vitreous.progress import ProgressDisplay
from vitreous.tasks.metrics import METRICS

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

CURVE_LINES, CURVE_MARGIN, MAX_CURVE_WIDTH = (
    8,
    10,
    72,
)  # of a curve: lines of text, characters of its axis labels, and maximum characters
MIN_TWO_CURVE_WIDTH = 96  # terminal width, in characters, from which two curves are shown side by side
BRAILLE_DOTS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])  # of a Braille character, from U+2800


class LiveCurves:
    """The training loss and the main evaluation metric against steps; a sink of metrics, drawn by rich.

    On a display without a terminal each evaluation is printed as a line of text instead.
    """

    def __init__(self, steps: int, display: ProgressDisplay) -> None:
        self.steps, self.display = steps, display
        self.lines: list[dict[str, Any]] = []

    def log_line(self, line: dict[str, Any]) -> None:
        """Add a line of metrics."""
        self.lines.append(line)
        if not self.display.terminal and "lr" not in line:
            metrics_text = "  ".join(
                f"{name} {format_value(x)}" for name, x in line.items() if "/" in name and is_measured_value(x)
            )
            self.display.line(f"step {line['step']:,}  {metrics_text}")

    def rewind(self, step: int, lines: list[dict[str, Any]]) -> None:
        """Reset to the lines of metrics from which a run continues."""
        self.lines = list(lines)

    def get_metric_name(self) -> str:
        """The name of the main metric of the evaluations; empty before the first."""
        names = [name for line in self.lines if "lr" not in line for name in line if "/" in name]
        metric_keys = [
            f"{prefix}/{name}"
            for name, metric in METRICS.items()
            if metric.is_primary
            for prefix in ("val", "training_images")
        ]
        return next((name for name in metric_keys if name in names), names[0] if names else "")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw one curve, or two side by side if there is room."""
        from rich.table import Table
        from rich.text import Text

        keys = [key for key in ("train/loss", self.get_metric_name()) if key and len(extract_curve(self.lines, key)[0])]
        is_side_by_side = len(keys) > 1 and options.max_width >= MIN_TWO_CURVE_WIDTH
        width = min(MAX_CURVE_WIDTH, options.max_width // (2 if is_side_by_side else 1) - 2)
        if not keys or width < 2 * CURVE_MARGIN:
            return
        table = Table.grid(padding=(0, 2))
        curves = [
            Text(draw_curve(key, *extract_curve(self.lines, key), self.steps, width), style=colour, no_wrap=True)
            for key, colour in zip(keys, ("cyan", "green"), strict=False)
        ]
        for row in [curves] if is_side_by_side else [[curve] for curve in curves]:
            table.add_row(*row)
        yield table


@contextmanager
def show_live_curves(steps: int, display: ProgressDisplay) -> Iterator[LiveCurves]:
    """Show curves above the bar of a display while the block runs; the last ones stay."""
    curves = LiveCurves(steps, display)
    display.close()
    display.header = curves if display.terminal else None
    try:
        yield curves
    finally:
        display.close()
        if display.header is not None:
            from rich.console import Console

            Console(stderr=True).print(display.header)
            display.header = None


def is_measured_value(value: Any) -> bool:
    """Return whether a value of a line of metrics was measured."""
    return isinstance(value, (int, float)) and bool(np.isfinite(value))


def extract_curve(lines: Sequence[dict[str, Any]], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Return steps and values (n,) float64 of a key of the metrics, without missing values."""
    pairs = [(line["step"], line[key]) for line in lines if is_measured_value(line.get(key))]
    steps, values = np.array(pairs, np.float64).reshape(-1, 2).T
    return steps, values


def format_value(value: float) -> str:
    """Format a number with four significant digits."""
    return f"{value:.4g}"


def draw_curve(title: str, steps: np.ndarray, values: np.ndarray, total: int, width: int) -> str:
    """Draw a curve in Braille dots as lines of text, at most `width` characters each.

    Title and last value are at the top, the range at the left, steps from 0 to `total` below. `steps` and `values`
    (n,), n > 0.
    """
    low, high = float(values.min()), float(values.max())
    across, down = 2 * (width - CURVE_MARGIN), 4 * CURVE_LINES
    columns = np.round(steps / max(total, 1) * (across - 1)).astype(np.int64).clip(0, across - 1)
    spots = np.unique(columns)
    means = np.array([values[columns == spot].mean() for spot in spots])
    rows = np.round((high - means) / ((high - low) or 1.0) * (down - 1)).astype(np.int64)
    canvas = np.zeros((CURVE_LINES, across // 2), np.int64)
    previous_row = rows[0]
    for column in range(spots[0], spots[-1] + 1):
        row = round(float(np.interp(column, spots, rows)))
        for dot in range(min(previous_row, row), max(previous_row, row)):
            canvas[dot // 4, column // 2] |= BRAILLE_DOTS[dot % 4, column % 2]
        canvas[row // 4, column // 2] |= BRAILLE_DOTS[row % 4, column % 2]
        previous_row = row
    labels = [format_value(high), *[""] * (CURVE_LINES - 2), format_value(low)]
    lines = [
        f"{label:>{CURVE_MARGIN - 1}} {''.join(chr(0x2800 + cell) for cell in row)}"
        for label, row in zip(labels, canvas.tolist(), strict=True)
    ]
    ends = f"{'0':<{across // 2 - len(f'{total:,}')}}{total:,}"
    return "\n".join(
        [f"{'':{CURVE_MARGIN}}{title} {format_value(float(values[-1]))}", *lines, f"{'':{CURVE_MARGIN}}{ends}"]
    )
