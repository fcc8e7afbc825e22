"""Notebook output of predictions, models and runs, and progress in notebooks."""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.inference.small_models import make_tiny_bundle, write_images
from vitreous import progress
from vitreous.config import to_builtins
from vitreous.inference.predict import load
from vitreous.progress import ProgressDisplay
from vitreous.recipes.registry import build_example_run
from vitreous.system.notebook import RawHTML, format_html_table, list_config_settings
from vitreous.tasks.classification import Prediction
from vitreous.tasks.predictions import Predictions

HOSTILE_NAME = '<script>alert("x")</script>&'


class TagParser(HTMLParser):
    """Parses a page: its tags, which must all be closed, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.opened, self.seen, self.text = [], [], ""
        self.feed(page)
        assert not self.opened

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.opened += [] if tag == "img" else [tag]

    def handle_endtag(self, tag):
        assert self.opened.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_a_table_escapes_all_but_markup():
    page = TagParser(
        format_html_table([(HOSTILE_NAME, RawHTML("<i>x</i>"))], (HOSTILE_NAME, ""), HOSTILE_NAME, HOSTILE_NAME)
    )
    assert "script" not in page.seen and page.seen.count("i") == 1 and page.text.count(HOSTILE_NAME) == 4


@pytest.fixture(scope="module")
def predictor(tmp_path_factory):
    run_folder = tmp_path_factory.mktemp("run")
    make_tiny_bundle(classes=("ant", HOSTILE_NAME, "cat")).save(run_folder / "model")
    (run_folder / "summary.json").write_text('{"val": {"top1": 0.875, "images": 16}, "test": null}')
    return load(run_folder, device="cpu", precision="fp32")


def test_predictions_render_as_a_table_with_images(predictor, tmp_path):
    predictions = predictor.predict([*write_images(tmp_path, 2), np.zeros((9, 9, 3), np.uint8)], top=2)
    assert isinstance(predictions, list) and predictions == list(predictions)
    page = TagParser(predictions._repr_html_())
    assert page.seen.count("img") == 2 and page.seen.count("meter") == 6 and "script" not in page.seen
    assert f"{predictions[0].probabilities[0]:.1%}" in page.text and predictions[2].path in page.text
    assert TagParser(predictions[0]._repr_html_()).seen.count("img") == 1
    (tmp_path / "torn.png").write_bytes(b"no picture")
    torn = predictor.predict([tmp_path / "torn.png"], bad_images="skip")
    assert "error: " in TagParser(torn._repr_html_()).text
    many = Predictions([Prediction(f"{n}.png") for n in range(60)])
    assert (
        "10 more are not shown" in TagParser(many._repr_html_()).text and "none" in TagParser(many._repr_html_()).text
    )


def test_predictors_render_their_model_card(predictor, tmp_path):
    page = TagParser(predictor._repr_html_())
    assert "script" not in page.seen and "ViT-24x2/4" in page.text and predictor.card.version in page.text
    assert "val top1" in page.text and "0.875" in page.text and "16 pixels" in page.text
    bundle = load(Path(predictor.origin) / "model")
    assert "top1" not in TagParser(bundle._repr_html_()).text  # a bundle has no metrics


def test_runs_render_every_setting():
    run = build_example_run("digits")
    rows, page = list_config_settings(to_builtins(run)), TagParser(run._repr_html_())
    assert ("optimizer.lr", run.optimizer.lr) in rows
    assert page.seen.count("tr") == len(rows) + 1 and all(name in page.text for name, _ in rows)


@pytest.fixture
def notebook_kernel(monkeypatch):
    """A fake of IPython in a notebook's kernel; returns the HTML updates of its cell."""
    shown = []
    shell = type("ZMQInteractiveShell", (), {})()
    handle = SimpleNamespace(update=shown.append)
    display = SimpleNamespace(HTML=lambda html: html, display=lambda html, display_id: handle)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell, display=display))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return shown


def test_progress_is_a_bar_in_the_cell(notebook_kernel, monkeypatch, capsys):
    monkeypatch.setattr(progress, "CELL_UPDATE_SECONDS", 0.0)
    display = ProgressDisplay()
    for done in (0, 1, 5, 10):
        display.progress("train", done, 10, f"loss {HOSTILE_NAME}")
    assert [f'value="{done}"' in page for done, page in zip((0, 1, 5, 10), notebook_kernel, strict=True)] == [True] * 4
    assert [" s left" in page for page in notebook_kernel] == [False, True, True, False] and "script>" not in "".join(
        notebook_kernel
    )
    monkeypatch.setattr(progress, "CELL_UPDATE_SECONDS", 1000.0)
    for done in range(100):
        display.progress("export", done, 99, "rows")
    assert len(notebook_kernel) == 6 and 'value="99"' in notebook_kernel[-1]  # the first and the last
    assert not capsys.readouterr().err
    display.close()


def test_progress_outside_notebooks_prints_lines(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    display = ProgressDisplay()
    display.progress("train", 10, 10, "loss 1")
    assert capsys.readouterr().err == "train 100%  loss 1\n"
