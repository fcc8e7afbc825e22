"""`vitreous.train` from Python: silenced progress, checked keywords, and rejected modules."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import vitreous
from tests.conftest import make_folder
from tests.jobs.test_data_path import TINY_OPTIONS
from vitreous.config import OptionAliases, get_field_markers
from vitreous.errors import UsageError
from vitreous.progress import ProgressDisplay
from vitreous.recipes.options import TrainOptions

pytestmark = pytest.mark.drawn


@pytest.fixture
def photos(tmp_path):
    return make_folder(tmp_path / "photos", {"train": 4, "test": 2}, classes=("ant", "bee"))


def test_progress_is_shown_and_can_be_silenced(photos, tmp_path, capsys):
    vitreous.train(photos, out=tmp_path / "shown", **TINY_OPTIONS)  # path objects are accepted too
    shown = capsys.readouterr()
    assert re.search(r"^train 100%", shown.err, re.MULTILINE) and "note: " in shown.err and not shown.out
    vitreous.train(str(photos), out=str(tmp_path / "silent"), progress=False, **TINY_OPTIONS)
    silent = capsys.readouterr()
    assert (silent.out, silent.err) == ("", "")
    for out in ("shown", "silent"):
        assert "<svg" in (tmp_path / out / "report.html").read_text()


def test_a_terminal_shows_a_progress_bar(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    display = ProgressDisplay()
    assert display.terminal
    display.progress("train", 1, 4, "loss 0.5")
    assert display.bar is not None and display.bar.tasks[0].completed == 1 and display.bar.tasks[0].total == 4
    display.close()
    assert display.bar is None and "train" in capsys.readouterr().err


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_progress_bar_fits_common_terminal_widths(columns, monkeypatch, capsys):
    """With 80 columns, the text leaves room for the bar and the remaining time."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    for name, value in {"TERM": "xterm", "COLUMNS": str(columns), "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    text = "epoch 66.7/100  loss 0.547  1202 images/s  val top-1 97.8%"
    display = ProgressDisplay()
    display.progress("train", 3, 3, text)
    display.close()
    lines = re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", capsys.readouterr().err).replace("\r", "\n").splitlines()
    bar, below = lines[-2:] if columns < 100 else (lines[-1], "")
    assert re.match(r"train ━{10,} 100% ", bar) and bar.rstrip().endswith("0:00:00") and len(bar) <= columns
    assert below.rstrip() == text if columns < 100 else text in bar


def test_remaining_time_is_estimated_from_observed_progress(monkeypatch, capsys):
    """A resumed run that starts at 600 of 1,000 and does 100 in 50 s has 300 left, which take 150 s."""
    now = 100.0
    monkeypatch.setattr("vitreous.progress.time.monotonic", lambda: now)
    display = ProgressDisplay()
    monkeypatch.setattr(display.contention_monitor, "poll", lambda: None)
    for done, now in ((600, 105.0), (700, 155.0), (1000, 300.0)):  # noqa: B007
        display.progress("train", done, 1000)
    lines = capsys.readouterr().err.splitlines()
    assert [" left" in line for line in lines] == [False, True, False]
    assert lines[1].endswith("150 s left")


def test_listener_replaces_the_progress_display(photos, tmp_path, capsys):
    class Listener:
        heard: list[str] = []  # noqa: RUF012

        def note(self, text: str) -> None:
            self.heard.append(text)

        def progress(self, label: str, done: int, total: int, text: str = "") -> None:
            self.heard.append(label)

    vitreous.train(photos, out=tmp_path / "run", listener=Listener(), **TINY_OPTIONS)
    assert "train" in Listener.heard and capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "options, message",
    [
        ({"epoch": 3}, r"train has no option epoch\n  perhaps you meant epochs"),
        ({"learning_rate": 0.1}, r"no option learning_rate\n  perhaps you meant lr"),
        ({"num_workers": 1, "batchsize": 3}, r"no option num_workers, batchsize\n  perhaps you meant workers"),
        ({"Progress": False}, r"perhaps you meant progress"),
        ({"epochs": "many"}, "train: epochs cannot be 'many'"),
        ({"precision": "fp8"}, "train: precision cannot be 'fp8'"),
        (
            {"model": torch.nn.Linear(2, 2)},
            r"train\(model=…\) must be a name, not a module \(Linear\)\n  give a name .* model='ViT-S/16'.*vitreous\.save",
        ),
        ({"init": torch.nn.Linear(2, 2)}, r"train\(init=…\) must be a name, not a module"),
    ],
)
def test_invalid_options_are_rejected_with_a_hint(tmp_path, options, message, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=message):
        vitreous.train("digits", **options)
    assert not list(tmp_path.iterdir())


def test_each_option_alias_maps_to_one_option():
    names = [name for mark in get_field_markers(TrainOptions, OptionAliases).values() for name in mark.names]
    assert len(names) == len(set(names)) == 20
    assert not set(names) & set(TrainOptions.__dataclass_fields__)


@pytest.mark.parametrize("verb", ["load", "evaluate", "inspect", "export"])
def test_modules_passed_as_runs_are_rejected(verb):
    with pytest.raises(
        UsageError, match=r"must be a path or a name, not a module \(Linear\)\n  save it with vitreous\.save"
    ):
        getattr(vitreous, verb)(torch.nn.Linear(2, 2))
    with pytest.raises(UsageError, match="must be a path or a name, not a int"):
        getattr(vitreous, verb)(7)


def test_module_passed_as_data_is_rejected():
    with pytest.raises(UsageError, match=r"train\(data\) must be a path or a name, not a module"):
        vitreous.train(torch.nn.Linear(2, 2))
    with pytest.raises(UsageError, match=r"train\(data\)"):
        vitreous.train([Path("a")])
