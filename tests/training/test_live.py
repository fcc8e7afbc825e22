"""Curves in the terminal: they show the measured values, and output that is not a terminal gets lines."""

from __future__ import annotations

import io
from itertools import pairwise

import numpy as np
import pytest
from rich.console import Console

from tests.conftest import TINY_RUN, make_folder, run_cli
from vitreous.progress import ProgressDisplay
from vitreous.training.live import CURVE_LINES, CURVE_MARGIN, LiveCurves, draw_curve, show_live_curves

TERMINAL_WIDTH, TOTAL_STEPS = 60, 400
CANVAS_WIDTH, CANVAS_HEIGHT = 2 * (TERMINAL_WIDTH - CURVE_MARGIN), 4 * CURVE_LINES
BRAILLE_BITS = {
    (0, 0): 0x01,
    (1, 0): 0x02,
    (2, 0): 0x04,
    (0, 1): 0x08,
    (1, 1): 0x10,
    (2, 1): 0x20,
    (3, 0): 0x40,
    (3, 1): 0x80,
}


def decode_dots(text: str) -> np.ndarray:
    """The dots (DOWN, ACROSS) bool of a drawing, decoded with Unicode's table of Braille patterns."""
    canvas = np.zeros((CANVAS_HEIGHT, CANVAS_WIDTH), bool)
    for row, line in enumerate(text.splitlines()[1 : 1 + CURVE_LINES]):
        for column, character in enumerate(line[CURVE_MARGIN:]):
            for (y, x), bit in BRAILLE_BITS.items():
                canvas[4 * row + y, 2 * column + x] = (ord(character) - 0x2800) & bit
    return canvas


def test_a_straight_line_is_straight():
    canvas = decode_dots(
        draw_curve("loss", np.arange(TOTAL_STEPS + 1.0), np.arange(TOTAL_STEPS + 1.0), TOTAL_STEPS, TERMINAL_WIDTH)
    )
    columns = np.arange(CANVAS_WIDTH)
    assert canvas.any(0).all()
    middle = np.array([np.flatnonzero(canvas[:, column]).mean() for column in columns])
    assert np.abs(middle - (CANVAS_HEIGHT - 1) * (1 - columns / (CANVAS_WIDTH - 1))).max() <= 1


@pytest.mark.parametrize("seed", range(5))
def test_every_value_is_drawn_on_an_unbroken_curve(seed):
    rng = np.random.default_rng(seed)
    steps = np.unique(rng.integers(0, TOTAL_STEPS, 20)).astype(np.float64)
    values = rng.normal(size=len(steps)) * 10.0 ** rng.integers(-3, 3)
    text = draw_curve("loss", steps, values, TOTAL_STEPS, TERMINAL_WIDTH)
    canvas = decode_dots(text)
    columns = np.round(steps / TOTAL_STEPS * (CANVAS_WIDTH - 1)).astype(int)
    rows = np.round((values.max() - values) / np.ptp(values) * (CANVAS_HEIGHT - 1)).astype(int)
    for column, row in zip(columns, rows, strict=True):
        if (columns == column).sum() == 1:
            assert canvas[row, column]
    drawn = np.flatnonzero(canvas.any(0))
    assert (drawn == np.arange(columns[0], columns[-1] + 1)).all()
    for left, right in pairwise(drawn):
        left_dots, right_dots = np.flatnonzero(canvas[:, left]), np.flatnonzero(canvas[:, right])
        assert left_dots.max() + 1 >= right_dots.min() and right_dots.max() + 1 >= left_dots.min()
    assert all(len(line) <= TERMINAL_WIDTH for line in text.splitlines())


def test_single_points_and_constants_are_drawn():
    assert decode_dots(draw_curve("loss", np.array([5.0]), np.array([1.0]), TOTAL_STEPS, TERMINAL_WIDTH)).sum() == 1
    canvas = decode_dots(
        draw_curve("loss", np.arange(0.0, TOTAL_STEPS), np.ones(TOTAL_STEPS), TOTAL_STEPS, TERMINAL_WIDTH)
    )
    assert canvas[0].sum() >= CANVAS_WIDTH - 1 and not canvas[1:].any()


def render_curves(width: int, curves: LiveCurves) -> str:
    """Render the curves for a terminal of `width` characters."""
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(curves)
    return console.file.getvalue()


def test_the_primary_metric_is_next_to_the_loss_on_wide_terminals():
    curves = LiveCurves(10, ProgressDisplay())
    assert render_curves(120, curves).strip() == ""
    for step in range(1, 6):
        curves.lines.append({"step": step, "epoch": step, "lr": 0.1, "train/loss": 2.0 / step, "gradient_norm": 1.0})
    curves.lines.append({"step": 5, "epoch": 5, "val/nll": 1.0, "val/top1": 0.25, "seconds": 3.0})
    wide, narrow = render_curves(120, curves), render_curves(60, curves)
    assert "train/loss 0.4" in wide.splitlines()[0] and "val/top1 0.25" in wide.splitlines()[0]
    assert "val/top1" not in narrow.splitlines()[0] and "val/top1 0.25" in narrow
    for text, width in ((wide, 120), (narrow, 60)):
        assert all(len(line) <= width for line in text.splitlines())
    assert render_curves(12, curves).strip() == ""
    curves.resume_from(2, curves.lines[:2])
    assert "train/loss 1" in render_curves(120, curves) and "val/top1" not in render_curves(120, curves)


def test_non_finite_and_missing_losses_are_skipped():
    curves = LiveCurves(10, ProgressDisplay())
    curves.lines = [{"step": 1, "lr": 0.1, "train/loss": None}, {"step": 2, "lr": 0.1, "train/loss": float("nan")}]
    assert render_curves(120, curves).strip() == ""
    curves.lines.append({"step": 3, "lr": 0.1, "train/loss": 1.5})
    assert "train/loss 1.5" in render_curves(120, curves)


def test_curves_are_above_the_progress_bar_and_remain_at_the_end(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr("sys.stderr", stream := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    display = ProgressDisplay()
    with show_live_curves(4, display) as curves:
        for step in range(1, 5):
            curves.log_line({"step": step, "epoch": step, "lr": 0.1, "train/loss": 4.0 / step})
            display.progress("train", step, 4, f"loss {4 / step}")
        assert display.header is curves and "val/" not in stream.getvalue()
    last = stream.getvalue().rpartition("train/loss")
    assert last[2].splitlines()[0].split()[0] == "1" and "train" not in last[2].partition("\n")[2]
    assert display.header is None


def test_without_a_terminal_each_evaluation_prints_a_line(tmp_path):
    photos = make_folder(tmp_path / "photos", {"train": 8, "val": 2})
    words = [w for k, v in {**TINY_RUN, "epochs": 1, "evaluate_every": 1}.items() for w in (f"--{k}", str(v))]
    result = run_cli("train", str(photos), "--out", str(tmp_path / "run"), "--workers", "0", "--live", *words)
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stderr.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in lines] == ["1", "2"] and all("val/top1" in line for line in lines)
    assert not any(0x2800 <= ord(character) < 0x2900 for character in result.stderr)
