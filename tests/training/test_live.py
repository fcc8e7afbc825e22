"""Curves in the terminal: what is drawn is what was measured, and a stream that is no terminal gets lines."""

from __future__ import annotations

import io
from itertools import pairwise

import numpy as np
import pytest
from rich.console import Console

from tests.conftest import TINY, make_folder, say
from vitreous.progress import ProgressDisplay
from vitreous.training.live import CURVE_LINES, CURVE_MARGIN, LiveCurves, draw_curve, show_live_curves

WIDTH, TOTAL = 60, 400
ACROSS, DOWN = 2 * (WIDTH - CURVE_MARGIN), 4 * CURVE_LINES
BITS = {(0, 0): 0x01, (1, 0): 0x02, (2, 0): 0x04, (0, 1): 0x08, (1, 1): 0x10, (2, 1): 0x20, (3, 0): 0x40, (3, 1): 0x80}


def dots(text: str) -> np.ndarray:
    """The dots (DOWN, ACROSS) bool of a drawing, by the table of Braille patterns in Unicode."""
    canvas = np.zeros((DOWN, ACROSS), bool)
    for row, line in enumerate(text.splitlines()[1 : 1 + CURVE_LINES]):
        for column, character in enumerate(line[CURVE_MARGIN:]):
            for (y, x), bit in BITS.items():
                canvas[4 * row + y, 2 * column + x] = (ord(character) - 0x2800) & bit
    return canvas


def test_a_straight_line_is_straight():
    canvas = dots(draw_curve("loss", np.arange(TOTAL + 1.0), np.arange(TOTAL + 1.0), TOTAL, WIDTH))
    columns = np.arange(ACROSS)
    assert canvas.any(0).all()
    middle = np.array([np.flatnonzero(canvas[:, column]).mean() for column in columns])
    assert np.abs(middle - (DOWN - 1) * (1 - columns / (ACROSS - 1))).max() <= 1


@pytest.mark.parametrize("seed", range(5))
def test_every_measured_value_is_a_dot_and_the_curve_is_unbroken(seed):
    rng = np.random.default_rng(seed)
    steps = np.unique(rng.integers(0, TOTAL, 20)).astype(np.float64)
    values = rng.normal(size=len(steps)) * 10.0 ** rng.integers(-3, 3)
    text = draw_curve("loss", steps, values, TOTAL, WIDTH)
    canvas = dots(text)
    columns = np.round(steps / TOTAL * (ACROSS - 1)).astype(int)
    rows = np.round((values.max() - values) / np.ptp(values) * (DOWN - 1)).astype(int)
    for column, row in zip(columns, rows, strict=True):
        if (columns == column).sum() == 1:
            assert canvas[row, column]
    drawn = np.flatnonzero(canvas.any(0))
    assert (drawn == np.arange(columns[0], columns[-1] + 1)).all()
    for before, after in pairwise(drawn):
        one, other = np.flatnonzero(canvas[:, before]), np.flatnonzero(canvas[:, after])
        assert one.max() + 1 >= other.min() and other.max() + 1 >= one.min()
    assert all(len(line) <= WIDTH for line in text.splitlines())


def test_one_point_and_a_constant_are_drawn():
    assert dots(draw_curve("loss", np.array([5.0]), np.array([1.0]), TOTAL, WIDTH)).sum() == 1
    canvas = dots(draw_curve("loss", np.arange(0.0, TOTAL), np.ones(TOTAL), TOTAL, WIDTH))
    assert canvas[0].sum() >= ACROSS - 1 and not canvas[1:].any()


def drawn_at(width: int, curves: LiveCurves) -> str:
    """The curves as a terminal of so many characters shows them."""
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(curves)
    return console.file.getvalue()


def test_the_leading_figure_lies_beside_the_loss_where_there_is_room():
    curves = LiveCurves(10, ProgressDisplay())
    assert drawn_at(120, curves).strip() == ""
    for step in range(1, 6):
        curves.lines.append({"step": step, "epoch": step, "lr": 0.1, "train/loss": 2.0 / step, "gradient_norm": 1.0})
    curves.lines.append({"step": 5, "epoch": 5, "val/nll": 1.0, "val/top1": 0.25, "seconds": 3.0})
    wide, narrow = drawn_at(120, curves), drawn_at(60, curves)
    assert "train/loss 0.4" in wide.splitlines()[0] and "val/top1 0.25" in wide.splitlines()[0]
    assert "val/top1" not in narrow.splitlines()[0] and "val/top1 0.25" in narrow
    for text, width in ((wide, 120), (narrow, 60)):
        assert all(len(line) <= width for line in text.splitlines())
    assert drawn_at(12, curves).strip() == ""
    curves.rewind(2, curves.lines[:2])
    assert "train/loss 1" in drawn_at(120, curves) and "val/top1" not in drawn_at(120, curves)


def test_losses_that_are_not_finite_or_missing_are_left_out():
    curves = LiveCurves(10, ProgressDisplay())
    curves.lines = [{"step": 1, "lr": 0.1, "train/loss": None}, {"step": 2, "lr": 0.1, "train/loss": float("nan")}]
    assert drawn_at(120, curves).strip() == ""
    curves.lines.append({"step": 3, "lr": 0.1, "train/loss": 1.5})
    assert "train/loss 1.5" in drawn_at(120, curves)


def test_curves_go_above_the_bar_and_the_last_ones_stay(monkeypatch):
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


def test_a_stream_that_is_no_terminal_gets_a_line_for_each_evaluation(tmp_path):
    photos = make_folder(tmp_path / "photos", {"train": 8, "val": 2})
    words = [w for k, v in {**TINY, "epochs": 1, "evaluate_every": 1}.items() for w in (f"--{k}", str(v))]
    result = say("train", str(photos), "--out", str(tmp_path / "run"), "--workers", "0", "--live", *words)
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stderr.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in lines] == ["1", "2"] and all("val/top1" in line for line in lines)
    assert not any(0x2800 <= ord(character) < 0x2900 for character in result.stderr)
