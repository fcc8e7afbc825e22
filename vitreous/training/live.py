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

CURVE_LINES = 8  # lines of text of a curve
CURVE_MARGIN = 10  # characters at the left of a curve for the axis labels
MAX_CURVE_WIDTH = 72  # characters of a curve, labels included
MIN_TWO_CURVE_WIDTH = 96  # terminal width, in characters, from which two curves are shown side by side
#: bit of each of the 4 x 2 dots of a Braille character, whose code is U+2800 plus the bits
BRAILLE_DOTS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])


class LiveCurves:
    """Curves of the training loss and the main evaluation metric over steps, drawn by rich. A `MetricsSink` of the run.

    Without a terminal each evaluation is printed as a line of text instead.
    """

    def __init__(self, steps: int, display: ProgressDisplay) -> None:
        self.steps, self.display = steps, display
        self.lines: list[dict[str, Any]] = []

    def log_line(self, line: dict[str, Any]) -> None:
        """Add a line of metrics to the curves; without a terminal, print the metrics of an evaluation."""
        self.lines.append(line)
        if not self.display.terminal and "lr" not in line:
            metrics_text = "  ".join(
                f"{name} {format_value(x)}" for name, x in line.items() if "/" in name and is_measured_value(x)
            )
            self.display.line(f"step {line['step']:,}  {metrics_text}")

    def resume_from(self, step: int, lines: list[dict[str, Any]]) -> None:
        """Replace all lines of metrics by `lines`, those of the checkpoint from which the run continues."""
        self.lines = list(lines)

    def get_metric_name(self) -> str:
        """Return the name of the main evaluation metric in the lines so far; "" before the first evaluation."""
        names = [name for line in self.lines if "lr" not in line for name in line if "/" in name]
        metric_keys = [
            f"{prefix}/{name}"
            for name, metric in METRICS.items()
            if metric.is_primary
            for prefix in ("val", "training_images")
        ]
        return next((name for name in metric_keys if name in names), names[0] if names else "")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the curves: side by side if the terminal is wide enough, else below each other."""
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
    """Show live curves above the progress bar of a display during the block. The final curves remain on the screen."""
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
    """Return whether a value of a line of metrics is a finite number."""
    return isinstance(value, (int, float)) and bool(np.isfinite(value))


def extract_curve(lines: Sequence[dict[str, Any]], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps and values of a metric, two arrays (n,) float64, without lines that lack the metric."""
    pairs = [(line["step"], line[key]) for line in lines if is_measured_value(line.get(key))]
    steps, values = np.array(pairs, np.float64).reshape(-1, 2).T
    return steps, values


def format_value(value: float) -> str:
    """Format a number with four significant digits."""
    return f"{value:.4g}"


def draw_curve(title: str, steps: np.ndarray, values: np.ndarray, total: int, width: int) -> str:
    """Draw a curve in Braille dots as lines of text, at most `width` characters each.

    The title and the last value are above the curve, the range of values at the left, the steps from 0 to `total`
    below. `steps` and `values` have shape (n,), n > 0.
    """
    low, high = float(values.min()), float(values.max())
    num_columns, num_rows = 2 * (width - CURVE_MARGIN), 4 * CURVE_LINES  # of dots
    columns = np.round(steps / max(total, 1) * (num_columns - 1)).astype(np.int64).clip(0, num_columns - 1)
    used_columns = np.unique(columns)
    means = np.array([values[columns == column].mean() for column in used_columns])
    rows = np.round((high - means) / ((high - low) or 1.0) * (num_rows - 1)).astype(np.int64)
    canvas = np.zeros((CURVE_LINES, num_columns // 2), np.int64)
    previous_row = rows[0]
    for column in range(used_columns[0], used_columns[-1] + 1):
        row = round(float(np.interp(column, used_columns, rows)))
        for dot in range(min(previous_row, row), max(previous_row, row)):
            canvas[dot // 4, column // 2] |= BRAILLE_DOTS[dot % 4, column % 2]
        canvas[row // 4, column // 2] |= BRAILLE_DOTS[row % 4, column % 2]
        previous_row = row
    labels = [format_value(high), *[""] * (CURVE_LINES - 2), format_value(low)]
    lines = [
        f"{label:>{CURVE_MARGIN - 1}} {''.join(chr(0x2800 + dots) for dots in line_dots)}"
        for label, line_dots in zip(labels, canvas.tolist(), strict=True)
    ]
    axis_labels = f"{'0':<{num_columns // 2 - len(f'{total:,}')}}{total:,}"
    return "\n".join(
        [f"{'':{CURVE_MARGIN}}{title} {format_value(float(values[-1]))}", *lines, f"{'':{CURVE_MARGIN}}{axis_labels}"]
    )
