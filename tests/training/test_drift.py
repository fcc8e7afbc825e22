"""The drift guard: a run from weights stops when its features become worse than at the start."""

from __future__ import annotations

import json
import signal
from dataclasses import replace

import pytest
import torch

from tests.conftest import make_image
from vitreous.cli.train import format_checkpoint_selection
from vitreous.errors import Interrupted, UsageError
from vitreous.jobs.train import train
from vitreous.progress import NullListener
from vitreous.recipes.derive import DRIFT_LIMIT
from vitreous.tasks.report import Report
from vitreous.training.drift import DriftGuard
from vitreous.training.folder import RunFolder
from vitreous.training.session import Session
from vitreous.weights.adopt import open_weights
from vitreous.weights.bundle import load_bundle

pytestmark = pytest.mark.usefixtures("without_pages")

TRAIN_OPTIONS = {
    "recipe": "dino",
    "model": "ViT-32x2/4",
    "image_size": 16,
    "precision": "fp32",
    "seed": 3,
    "device": "cpu",
    "workers": 0,
    "epochs": 12.0,
    "batch_size": 8,
    "evaluate_every": 2,
}


@pytest.fixture
def unlabelled_images(tmp_path):
    """Return a folder of 40 images without classes."""
    home = tmp_path / "flat"
    home.mkdir()
    for index in range(40):
        make_image(index, (16, 16), index % 3).save(home / f"{index}.png")
    return home


def make_report(value: float) -> Report:
    """Return a report whose main metric is RankMe."""
    return Report(8, 0, {"rankme": value}, {}, [], None, "rankme")


@pytest.fixture
def measured_values(monkeypatch):
    """Replace RankMe of the evaluation after step s by the s-th of the returned values; other steps are measured."""
    values: dict[int, float] = {}
    evaluate_on, build = Session.evaluate_on, Session.build

    def remember_state(self):
        self.state = build(self)
        return self.state

    def evaluate(self, images, model, precision):
        report, metrics = evaluate_on(self, images, model, precision)
        value = values.get(self.state.step, report.metrics["rankme"])
        changed = {name: value if name.endswith("rankme") else metric for name, metric in metrics.items()}
        return replace(report, metrics=report.metrics | {"rankme": value}), changed

    monkeypatch.setattr(Session, "build", remember_state)
    monkeypatch.setattr(Session, "evaluate_on", evaluate)
    return values


def test_guard_counts_consecutive_evaluations_below_the_limit():
    guard = DriftGuard().start(make_report(10.0))
    for step, value in enumerate([8.9, 9.0, 8.5, 8.0], 1):
        guard = guard.update(make_report(value), step, 0.1)
    assert (guard.steps, guard.values) == ((3, 4), (8.5, 8.0))  # 9.0 is not below the limit of 9
    assert DriftGuard.from_dict(json.loads(json.dumps(guard.to_dict()))) == guard
    assert DriftGuard.from_dict(None) == DriftGuard()
    assert DriftGuard().update(make_report(1.0), 1, 0.1).steps == ()  # nothing was measured at the start


class NoteListener(NullListener):
    """Collects notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


FALLING_VALUES = {0: 10.0, 2: 9.5, 4: 9.8, 6: 8.0, 8: 9.1, 10: 8.5, 12: 8.0}
DRIFT_TEXT = "drift guard: RankMe was 10 at the start (limit 9), now 8.5 at step 10, 8 at step 12"


def test_run_stops_at_a_fall_and_keeps_its_best_checkpoint(unlabelled_images, tmp_path, measured_values):
    measured_values |= FALLING_VALUES
    listener, out = NoteListener(), tmp_path / "run"
    summary = train(str(unlabelled_images), listener, out=str(out), drift_guard=0.1, **TRAIN_OPTIONS)
    selection = summary["selection"]
    assert summary["steps"] == 12 < RunFolder(out).run().steps
    assert (selection["weights"], selection["weights_step"], selection["stopped_early"]) == ("best", 4, True)
    assert selection["drift"] == DRIFT_TEXT
    assert f"{DRIFT_TEXT}; the run stops, and keeps step 4" in listener.notes
    assert list(format_checkpoint_selection(summary)) == [
        "best checkpoint: step 4 (epoch 0.8889), RankMe 9.8 on validation, best of 6 evaluations",
        f"stopped early at step 12: {DRIFT_TEXT}",
    ]
    bundle, checkpoint = load_bundle(out / "model"), open_weights(out / "checkpoints" / "step-00000004")
    kept = checkpoint.read_state()
    assert all(torch.equal(tensor, kept[name]) for name, tensor in bundle.model.state_dict().items())
    first_line = json.loads((out / "metrics.jsonl").read_text().splitlines()[0])
    assert (first_line["step"], first_line["val/rankme"]) == (0, 10.0)


def test_a_resumed_run_stops_at_the_same_step(unlabelled_images, tmp_path, measured_values, monkeypatch):
    measured_values |= FALLING_VALUES
    whole = train(str(unlabelled_images), NullListener(), out=str(tmp_path / "a"), drift_guard=0.1, **TRAIN_OPTIONS)
    evaluate = Session.evaluate

    def interrupt(self, state):
        evaluate(self, state)
        if state.step == 10:
            self.signals.received = signal.SIGINT

    monkeypatch.setattr(Session, "evaluate", interrupt)
    with pytest.raises(Interrupted):
        train(str(unlabelled_images), NullListener(), out=str(tmp_path / "b"), drift_guard=0.1, **TRAIN_OPTIONS)
    monkeypatch.setattr(Session, "evaluate", evaluate)
    resumed = train(listener=NullListener(), resume=True, out=str(tmp_path / "b"))
    assert resumed["selection"] == whole["selection"] and resumed["steps"] == whole["steps"]
    models = [load_bundle(tmp_path / name / "model").model.state_dict() for name in ("a", "b")]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


def test_a_run_without_a_fall_ships_its_last_weights(unlabelled_images, tmp_path, measured_values):
    measured_values |= {step: 9.5 if step else 10.0 for step in range(0, 40, 2)}
    options = {**TRAIN_OPTIONS, "epochs": 3.0}
    summary = train(str(unlabelled_images), NullListener(), out=str(tmp_path / "run"), drift_guard=0.1, **options)
    assert summary["selection"] is None and summary["steps"] == RunFolder(tmp_path / "run").run().steps


def test_the_guard_is_on_for_runs_from_weights_only(unlabelled_images, tmp_path):
    options = {**TRAIN_OPTIONS, "epochs": 0.5}
    train(str(unlabelled_images), NullListener(), out=str(tmp_path / "a"), **options)
    del options["model"]
    train(str(unlabelled_images), NullListener(), out=str(tmp_path / "b"), init=str(tmp_path / "a"), **options)
    options |= {"drift_guard": 0.0}
    train(str(unlabelled_images), NullListener(), out=str(tmp_path / "c"), init=str(tmp_path / "a"), **options)
    guards = [RunFolder(tmp_path / name).run().drift_guard for name in "abc"]
    assert guards == [0.0, DRIFT_LIMIT, 0.0]


def test_invalid_options_are_rejected(unlabelled_images, tmp_path):
    for options, message in (
        ({"drift_guard": 1.5}, "drift_guard must be at least 0 and below 1"),
        ({"drift_guard": 0.1, "drift_patience": 0}, "drift_patience at least 1"),
    ):
        with pytest.raises(UsageError, match=message):
            train(str(unlabelled_images), NullListener(), out=str(tmp_path / "run"), **TRAIN_OPTIONS, **options)
    with pytest.raises(UsageError, match="drift_guard requires a self-supervised objective, not supervised"):
        train("digits", NullListener(), out=str(tmp_path / "run"), drift_guard=0.1)
