"""--keep-best and --early-stop: the weights that are kept, when a run ends, and bit-identical results after a stop at
any step."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.conftest import TINY_RUN, make_folder, parse_json_output, run_cli
from vitreous.errors import Interrupted, UsageError
from vitreous.jobs.train import train
from vitreous.reports.evaluate import evaluate
from vitreous.tasks.report import Report
from vitreous.training.best import BestEvaluation
from vitreous.training.session import Session

pytestmark = pytest.mark.usefixtures("without_pages")  # training is repeated many times

#: top-1 of a run's evaluations; the third is the best
TOP1_VALUES = (0.3, 0.5, 0.8, 0.8, 0.6, 0.7, 0.2, 0.9)
NLL_VALUES = (1.0, 0.9, 0.8, 0.8, 0.9, 0.9, 1.2, 0.1)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("home") / "photos", {"train": 8, "val": 4, "test": 2})


@pytest.fixture
def fixed_evaluations(monkeypatch):
    """Replace the evaluations after steps 2, 4, 6, … by TOP1_VALUES; returns the list of evaluated steps."""
    steps = []
    real = Session.evaluate_model

    def evaluate_model(self, model, precision):
        report, metrics = real(self, model, precision)
        step = self.state.step
        if step % 2 or self.finishing:
            return report, metrics
        steps.append(step)
        scores = {"top1": TOP1_VALUES[step // 2 - 1], "nll": NLL_VALUES[step // 2 - 1]}
        return replace(report, metrics=report.metrics | scores), metrics | {f"val/{n}": v for n, v in scores.items()}

    build, finish = Session.build, Session.finish

    def remember(self):
        self.state, self.finishing = build(self), False
        return self.state

    def last(self, state):
        self.finishing = True
        return finish(self, state)

    monkeypatch.setattr(Session, "build", remember)
    monkeypatch.setattr(Session, "finish", last)
    monkeypatch.setattr(Session, "evaluate_model", evaluate_model)
    return steps


def make_options(steps=12, **more):
    return {
        **TINY_RUN,
        "epochs": None,
        "steps": steps,
        "accumulate": 1,
        "evaluate_every": 2,
        "save_every": 3,
        "keep": 2,
        "workers": 0,
        **more,
    }


def load_weights(out):
    return load_file(out / "model" / "weights.safetensors")


def are_weights_equal(a, b):
    return all(np.array_equal(a[name], b[name]) for name in a)


def load_averaged_weights(checkpoint):
    """The averaged weights of a checkpoint, keyed as in a bundle."""
    return {name.removeprefix("model."): tensor for name, tensor in load_file(checkpoint / "ema.safetensors").items()}


def test_keep_best_keeps_and_reports_the_best_weights(photos, tmp_path, fixed_evaluations):
    summary = train(str(photos), out=str(tmp_path / "run"), **make_options(keep_best=True))
    assert fixed_evaluations == [2, 4, 6, 8, 10, 12]
    selection = summary["selection"]
    assert (selection["weights"], selection["weights_step"], selection["stopped_early"]) == ("best", 6, False)
    assert selection["best"] == {
        "step": 6,
        "epoch": 2.0,
        "metric": "top-1",
        "value": 0.8,
        "nll": 0.8,
        "evaluations": 6,
        "evaluations_since": 3,
        "better": "higher",
    }
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["selection"] == selection
    checkpoints = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert checkpoints == ["step-00000006", "step-00000009", "step-00000012"]  # the last two, and the best
    averaged = load_averaged_weights(tmp_path / "run" / "checkpoints" / "step-00000006")
    assert are_weights_equal(averaged, {name: load_weights(tmp_path / "run")[name] for name in averaged})
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["val/top1"] for line in lines if "val/top1" in line] == list(TOP1_VALUES[:6])
    train(str(photos), out=str(tmp_path / "last"), **make_options(keep_last=True))
    last = load_averaged_weights(tmp_path / "last" / "checkpoints" / "step-00000012")
    assert are_weights_equal(
        last, {name: load_weights(tmp_path / "last")[name] for name in last}
    ) and not are_weights_equal(last, averaged)


def test_the_bundle_contains_the_best_weights_by_default(photos, tmp_path):
    """The bundle, evaluated again, has the primary metric of the best evaluation, without --keep-last, with or without
    EMA."""
    for name, ema in (("averaged", 0.9), ("plain", 0)):
        out = tmp_path / name
        summary = train(str(photos), out=str(out), **make_options(12, ema=ema, lr=0.05))
        selection, lines = summary["selection"], (out / "metrics.jsonl").read_text().splitlines()
        values = {line["step"]: line["val/top1"] for line in map(json.loads, lines) if "val/top1" in line}
        assert (
            len(values) == 6 and selection["best"]["value"] == max(values.values()) == values[selection["weights_step"]]
        )
        again = evaluate(out, split="val", precision="fp32")["val"]
        assert again["top1"] == selection["best"]["value"]
        checkpoint_file = (
            out
            / "checkpoints"
            / f"step-{selection['weights_step']:08d}"
            / ("ema.safetensors" if ema else "model.safetensors")
        )
        best_weights = {key.removeprefix("model."): value for key, value in load_file(checkpoint_file).items()}
        assert are_weights_equal(load_weights(out), {key: best_weights[key] for key in load_weights(out)})


def test_keep_best_and_keep_last_exclude_each_other(photos, tmp_path):
    words = ["train", str(photos), "--out", str(tmp_path / "run"), "--keep-best", "--keep-last"]
    result = run_cli(*words)
    assert result.returncode == 2
    assert result.stderr.endswith("error: --keep-best and --keep-last exclude each other\n  leave one of them out\n")


def test_keep_best_equals_keep_last_if_the_last_is_best(photos, tmp_path, fixed_evaluations):
    best = train(str(photos), out=str(tmp_path / "one"), **make_options(6, keep_best=True))
    last = train(str(photos), out=str(tmp_path / "other"), **make_options(6, keep_last=True))
    assert (best["selection"]["weights_step"], last["selection"]) == (6, None)
    assert (
        are_weights_equal(load_weights(tmp_path / "one"), load_weights(tmp_path / "other"))
        and best["val"] == last["val"]
    )


@pytest.mark.parametrize("keep_best", [False, True])
def test_early_stop_ends_a_run_without_improvement(photos, tmp_path, fixed_evaluations, keep_best):
    summary = train(str(photos), out=str(tmp_path / "run"), **make_options(16, early_stop=3, keep_last=not keep_best))
    assert fixed_evaluations == [2, 4, 6, 8, 10, 12] and summary["steps"] == 12 and summary["epochs"] == 4.0
    selection = summary["selection"]
    assert selection["stopped_early"] and (selection["weights"], selection["weights_step"]) == (
        ("best", 6) if keep_best else ("last", 12)
    )
    assert selection["best"]["evaluations_since"] == 3


class ProcessKilled(Exception):
    """Replaces the end of a killed process."""


@pytest.mark.parametrize("step", [1, 4, 6, 7, 12])
def test_a_killed_run_resumes_bit_identically(photos, tmp_path, fixed_evaluations, monkeypatch, step):
    """Killed before, at and after the best evaluation, and after the last step but before the bundle is written."""
    options = make_options(16, early_stop=3, keep_best=True)
    expected = train(str(photos), out=str(tmp_path / "whole"), **options)
    watch = Session.watch

    def killed(self, state):
        watch(self, state)
        if state.step == step + 1:
            raise ProcessKilled

    def unfinished(self, state):
        raise ProcessKilled

    with monkeypatch.context() as patch:
        patch.setattr(Session, *(("finish", unfinished) if step == 12 else ("watch", killed)))
        with pytest.raises(ProcessKilled):
            train(str(photos), out=str(tmp_path / "run"), **options)
    if not list((tmp_path / "run").glob("checkpoints/step-*")):
        assert step == 1
    summary = train(str(photos), out=str(tmp_path / "run"), resume=True)
    assert summary["selection"] == expected["selection"] and summary["val"] == expected["val"]
    assert are_weights_equal(load_weights(tmp_path / "whole"), load_weights(tmp_path / "run"))
    logged_metrics = [
        [
            {name: line[name] for name in line if name.startswith(("step", "val/", "train/"))}
            for line in map(json.loads, path.open())
        ]
        for path in (tmp_path / "whole" / "metrics.jsonl", tmp_path / "run" / "metrics.jsonl")
    ]
    assert logged_metrics[0] == logged_metrics[1]


def test_an_interrupted_evaluation_is_repeated_after_resuming(photos, tmp_path, fixed_evaluations, monkeypatch):
    options = make_options(16, early_stop=3, keep_best=True)
    expected = train(str(photos), out=str(tmp_path / "whole"), **options)
    evaluate_model = Session.evaluate_model

    def interrupt_evaluation(self, model, precision):
        if self.state.step == 6:
            self.signals.received = 15
            raise Interrupted("cut short")
        return evaluate_model(self, model, precision)

    with monkeypatch.context() as patch:
        patch.setattr(Session, "evaluate_model", interrupt_evaluation)
        with pytest.raises(Interrupted):
            train(str(photos), out=str(tmp_path / "run"), **options)
    summary = train(str(photos), out=str(tmp_path / "run"), resume=True)
    assert summary["selection"] == expected["selection"] and are_weights_equal(
        load_weights(tmp_path / "whole"), load_weights(tmp_path / "run")
    )


def test_a_damaged_best_checkpoint_falls_back_to_the_last_weights(photos, tmp_path, fixed_evaluations, monkeypatch):
    notes, out = [], tmp_path / "run"
    take = Session.load_best_weights

    def damaged(self, state):
        (out / "checkpoints" / "step-00000006" / "ema.safetensors").write_bytes(b"junk")
        self.listener.note = notes.append
        return take(self, state)

    monkeypatch.setattr(Session, "load_best_weights", damaged)
    summary = train(str(photos), out=str(out), **make_options(keep_best=True))
    assert (summary["selection"]["weights"], summary["selection"]["weights_step"]) == ("last", 12)
    assert any("the best checkpoint (step 6) is missing or damaged" in note for note in notes)


def test_the_command_prints_which_weights_were_kept(photos, tmp_path, fixed_evaluations):
    words = [w for k, v in make_options(16).items() if v is not None for w in (f"--{k}", str(v))]
    result = run_cli("train", str(photos), "--out", str(tmp_path / "run"), *words, "--keep-best", "--early-stop", "3")
    assert "best checkpoint: step 6 (epoch 2), top-1 80.00% on validation, best of 6 evaluations" in result.stdout
    assert "stopped early at step 12: 3 consecutive evaluations without improvement over step 6" in result.stdout
    evaluation = run_cli("evaluate", str(tmp_path / "run"), "--split", "val", "--json")
    assert parse_json_output(evaluation)["selected_on"] == ["select the best weights of the run"]
    assert parse_json_output(run_cli("evaluate", str(tmp_path / "run"), "--json"))["selected_on"] == []


def test_invalid_selection_options_are_rejected_before_the_run(photos, tmp_path):
    shutil.copytree(photos / "train", tmp_path / "alone" / "train")
    for words, message in (
        (["--keep-best", "--data.hold-out", "0"], "--keep-best requires validation images, but the run has none"),
        (
            ["--early-stop", "2", "--data.hold-out", "0"],
            "--early-stop requires validation images, but the run has none",
        ),
        (["--early-stop", "0"], "early_stop must be at least 1"),
        (["--keep-best", "--lr-grid", "0.1", "0.2"], "leave --keep-best and --early-stop out"),
    ):
        small = ["--model", "ViT-32x1/8", "--device", "cpu", "--workers", "0", "--out", str(tmp_path / "run")]
        result = run_cli("train", str(tmp_path / "alone"), *small, *words)
        assert result.returncode == 2 and message in result.stderr, result.stderr
        assert not (tmp_path / "run").exists()


def make_report(top1, nll=None, primary="top1", better="higher", **metrics):
    return Report(4, 0, {"top1": top1, "nll": nll, **metrics}, {}, [], None, primary, better)


def test_the_lower_nll_breaks_ties():
    best = BestEvaluation()
    assert best.to_dict() is None and BestEvaluation.from_dict(None) == best
    for step, (top1, nll) in enumerate([(0.5, 1.0), (0.5, 0.9), (0.5, 0.9), (0.4, 0.1), (0.5, None)], 1):
        best = best.update(make_report(top1, nll), step, step / 2)
    assert (best.step, best.evaluations_since, best.evaluations) == (2, 3, 5)
    assert BestEvaluation.from_dict(json.loads(json.dumps(best.to_dict()))) == best
    multilabel = BestEvaluation().update(make_report(None, 1.0, "map", map=0.25), 1, 1.0)
    assert (multilabel.metric, multilabel.value) == ("mAP", 0.25)
    distances = BestEvaluation()
    for step, value in enumerate([30.0, 12.0, 20.0], 1):
        distances = distances.update(make_report(None, None, "fid", "lower", fid=value), step, 1.0)
    distances = BestEvaluation.from_dict(json.loads(json.dumps(distances.to_dict())))
    assert (distances.step, distances.value, distances.evaluations_since) == (2, 12.0, 1)
    with pytest.raises(UsageError):
        train("digits", early_stop=0)
