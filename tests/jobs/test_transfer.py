"""The learning-rate grid matches an exhaustive search, reads no test images, and resumes after any interruption."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.conftest import TINY_RUN, make_folder, run_cli
from tests.listeners import NoteListener
from vitreous.data.holdout import draw_stratified_splits
from vitreous.data.layouts.named import open_digits
from vitreous.data.sources import open_data
from vitreous.errors import DataError, Interrupted, NonFiniteError, UsageError
from vitreous.jobs import transfer
from vitreous.jobs.train import train
from vitreous.jobs.transfer import TransferProtocol, TrialResult, choose_learning_rate, set_learning_rate
from vitreous.reports.evaluate import evaluate
from vitreous.reports.pages.report import write_report
from vitreous.training.folder import RunFolder
from vitreous.training.session import Session

pytestmark = [pytest.mark.usefixtures("without_pages"), pytest.mark.drawn]  # training is repeated many times

QUICK_OPTIONS = {**TINY_RUN, "workers": 0, "evaluate_every": 1000, "save_every": 5}
DIGITS_OPTIONS = {
    "model": "ViT-32x2/4",
    "epochs": 4,
    "batch_size": 16,
    "warmup_steps": 5,
    "optimizer": "adamw",
    "precision": "fp32",
    "ema": 0.9,
    "log_every": 20,
    "evaluate_every": 1000,
    "save_every": 1000,
    "device": "cpu",
    "workers": 0,
    "shards": 1,
}
TIMING_KEYS = {"seconds", "images_per_second", "data_wait", "flops_utilisation"}


def write_digits_folder(root: Path, counts: dict[str, int]) -> Path:
    """Some of scikit-learn's digits as root/SPLIT/CLASS/*.png, the same number of each class."""
    for name, count in counts.items():
        split = open_digits().splits[name]
        for label in range(10):
            folder = root / name / str(label)
            folder.mkdir(parents=True)
            for index, sample in enumerate(np.flatnonzero(split.labels == label)[:count]):
                Image.fromarray(split.pixels[sample]).save(folder / f"{index}.png")
    return root


def copy_with_holdout(root: Path, to: Path, share: float) -> Path:
    """A copy of a folder with a `val` split of a share of each class of `train`, as the protocol draws it."""
    data = open_data(root)
    splits = draw_stratified_splits(data.splits["train"].labels, 0, {"val": share})
    for name, samples in splits.items():
        for sample in samples:
            path = data.splits["train"].paths[sample]
            folder = to / name / path.parent.name
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, folder / path.name)
    return to


def read_weights(run: Path) -> bytes:
    return (run / "model" / "weights.safetensors").read_bytes()


def read_trials(out: Path) -> dict:
    return json.loads((out / "trials.json").read_text())


def test_lr_grid_matches_an_exhaustive_search(tmp_path):
    root = write_digits_folder(tmp_path / "digits", {"train": 20, "val": 5, "test": 5})
    rates = (0.0003, 0.01, 0.1)
    summary = train(str(root), out=str(tmp_path / "grid"), lr_grid=rates, **DIGITS_OPTIONS)

    apart = copy_with_holdout(root, tmp_path / "apart", 0.1)
    metrics = {
        rate: train(str(apart), out=str(tmp_path / str(rate)), lr=rate, **DIGITS_OPTIONS)["val"] for rate in rates
    }
    best = max(rates, key=lambda rate: (metrics[rate]["top1"], -metrics[rate]["nll"]))
    train(str(root), out=str(tmp_path / "last"), lr=best, **DIGITS_OPTIONS)

    table = read_trials(tmp_path / "grid")
    assert [(trial["lr"], trial["score"], trial["nll"]) for trial in table["trials"]] == [
        (r, metrics[r]["top1"], metrics[r]["nll"]) for r in rates
    ]
    assert len({trial["score"] for trial in table["trials"]}) == 3, "the trials must have different scores"
    assert table["choice"]["lr"] == best == RunFolder(tmp_path / "grid").run().optimizer.lr
    assert read_weights(tmp_path / "grid") == read_weights(tmp_path / "last")
    for rate in rates:
        assert read_weights(tmp_path / "grid" / "trials" / f"lr-{rate}") == read_weights(tmp_path / str(rate))
    assert summary["lr_grid"] == table and summary["test"] is None
    assert summary["val"] == json.loads((tmp_path / "last" / "summary.json").read_text())["val"]


def test_lr_grid_opens_no_test_images(photo_folder, tmp_path):
    """Nor does the forked worker, whose file accesses are recorded too."""
    words = [w for k, v in {**QUICK_OPTIONS, "workers": 1}.items() for w in (f"--{k.replace('_', '-')}", str(v))]
    log = [os.open(tmp_path / "opened", os.O_WRONLY | os.O_APPEND | os.O_CREAT)]

    def record_opened(event, arguments):
        if event == "open" and log and isinstance(arguments[0], (str, bytes)):
            os.write(log[0], os.fsencode(arguments[0]) + b"\n")

    sys.addaudithook(record_opened)
    try:
        result = run_cli(
            "train", str(photo_folder), *words, "--lr-grid", "0.001", "0.01", "--out", str(tmp_path / "run"), "--json"
        )
    finally:
        os.close(log.pop())  # an audit hook cannot be removed: this one records nothing from now on
    assert result.returncode == 0, result.stderr
    opened = (tmp_path / "opened").read_text().splitlines()
    for split, expected in (("train", 36), ("val", 12), ("test", 0)):
        assert len({p for p in opened if p.startswith(f"{photo_folder}/{split}/")}) == expected, split
    assert json.loads(result.stdout)["test"] is None and "evaluate" in result.stderr


def read_outcome(out: Path) -> dict:
    """Everything of a protocol that must not depend on interruptions."""
    table = read_trials(out)
    trials = [{k: v for k, v in trial.items() if k != "seconds"} for trial in table["trials"]]
    outcome: dict = {"rows": trials, "choice": table["choice"], "protocol": table["protocol"]}
    for run in [out, *sorted((out / "trials").iterdir())]:
        lines = [json.loads(line) for line in (run / "metrics.jsonl").open()]
        metrics = [{k: v for k, v in line.items() if k not in TIMING_KEYS} for line in lines]
        outcome[run.name if run != out else "run"] = (read_weights(run), (run / "config.yaml").read_text(), metrics)
        assert (run / "checkpoints").exists() == (run == out)
    return outcome


class ProcessKilled(Exception):
    """Replaces the end of the process."""


def interrupt_at(step):
    """Send a signal at a step of the second trial's session."""

    def arm(monkeypatch, runs=[]):  # noqa: B006
        runs.clear()
        log = Session.log

        def watch(self, state):
            log(self, state)
            if state.step == step:
                runs.append(self)
                if len(runs) == 2:
                    self.signals.received = signal.SIGTERM

        monkeypatch.setattr(Session, "log", watch)

    return arm


def signal_after_first_trial(monkeypatch):
    """Send a signal after the last step of the first trial, too late for the session to stop."""
    finish = Session.finish

    def watch(self, state):
        summary = finish(self, state)
        self.signals.received = signal.SIGTERM
        return summary

    monkeypatch.setattr(Session, "finish", watch)


def kill_at_call(name):
    """End the process before a function of the protocol is called."""

    def arm(monkeypatch):
        def kill_process(*_, **__):
            raise ProcessKilled

        monkeypatch.setattr(f"vitreous.jobs.{name}", kill_process)

    return arm


def signal_in_last_run(monkeypatch):
    log = Session.log

    def watch(self, state):
        log(self, state)
        if state.step == 3 and self.run.data.hold_out == 0:
            self.signals.received = signal.SIGTERM

    monkeypatch.setattr(Session, "log", watch)


@pytest.fixture(scope="module")
def uninterrupted_run(tmp_path_factory):
    root = make_folder(tmp_path_factory.mktemp("transfer") / "photos", {"train": 12, "test": 4})
    out = root.parent / "whole"
    train(str(root), out=str(out), lr_grid=(0.001, 0.01), **QUICK_OPTIONS)
    return root, read_outcome(out)


@pytest.mark.parametrize(
    "arm",
    [
        interrupt_at(4),
        signal_after_first_trial,
        signal_in_last_run,
        kill_at_call("trial.to_yaml"),
        kill_at_call("trial.remove_checkpoints"),
        kill_at_call("transfer.read_trial_result"),
        kill_at_call("transfer.report.write_report"),
    ],
    ids=[
        "mid trial 2",
        "after trial 1",
        "last run",
        "before trial 1",
        "before pruning",
        "before choosing",
        "before the last run",
    ],
)
def test_resumed_lr_grid_is_bit_identical(uninterrupted_run, tmp_path, monkeypatch, arm):
    root, expected = uninterrupted_run
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        arm(patch)
        with pytest.raises((Interrupted, ProcessKilled)) as caught:
            train(str(root), out=str(out), lr_grid=(0.001, 0.01), **QUICK_OPTIONS)
    if caught.type is Interrupted:
        assert caught.value.code == 143 and caught.value.hint == f"continue with --resume --out {out}"
    complete = {p: p.read_bytes() for p in out.glob("trials/*/summary.json")}
    train(str(root), out=str(out), resume=True)
    assert read_outcome(out) == expected
    assert all(path.read_bytes() == content for path, content in complete.items()), "a complete trial was repeated"


def test_sigterm_saves_and_prints_the_resume_command(uninterrupted_run, tmp_path):
    root, _ = uninterrupted_run
    out = tmp_path / "run"
    words = [
        w
        for k, v in {**QUICK_OPTIONS, "epochs": 400, "save_every": 10_000}.items()
        for w in (f"--{k.replace('_', '-')}", str(v))
    ]
    command = [
        sys.executable,
        "-m",
        "vitreous",
        "train",
        str(root),
        *words,
        "--lr-grid",
        "0.001",
        "0.01",
        "--out",
        str(out),
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    deadline = time.time() + 200
    while time.time() < deadline and not (out / "trials" / "lr-0.001" / "metrics.jsonl").exists():
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 143 and "Traceback" not in errors, errors
    assert f"continue with --resume --out {out}" in errors and "in trial 1 of 2" in errors
    assert len(list((out / "trials" / "lr-0.001" / "checkpoints").iterdir())) == 1


def make_protocol(*grid: float) -> TransferProtocol:
    return TransferProtocol(grid, held_out_share=0.1, images=90, held_out=10, lr=0.003, matrix_lr=0.02)


def test_ties_are_broken_by_nll_then_smaller_learning_rate():
    grid = make_protocol(0.1, 0.2, 0.3, 0.4)
    trials = [
        TrialResult(0.1, "", 0.8, 0.1),
        TrialResult(0.2, "", 0.9, 0.5),
        TrialResult(0.3, "", 0.9, 0.4),
        TrialResult(0.4, "", 0.9, None),
    ]
    assert (
        choose_learning_rate(trials, grid).lr == 0.3
        and "lower NLL" in choose_learning_rate(trials, grid).reason
        and "lr 0.2" in choose_learning_rate(trials, grid).reason
    )
    trials[1] = replace(trials[1], nll=0.4)
    assert choose_learning_rate(trials, grid).lr == 0.2 and "smaller" in choose_learning_rate(trials, grid).reason
    assert choose_learning_rate(trials[::-1], grid).lr == 0.2


def test_choice_at_the_edge_of_the_grid_is_reported():
    grid = make_protocol(0.1, 0.2, 0.3)

    def find_best(index):
        return choose_learning_rate(
            [TrialResult(rate, "", float(i == index), 1.0) for i, rate in enumerate(grid.grid)], grid
        )

    assert "smallest of the grid" in find_best(0).warning and "largest of the grid" in find_best(2).warning
    assert find_best(1).warning is None
    assert (
        choose_learning_rate([], make_protocol(0.1)).lr == 0.1
        and choose_learning_rate([], make_protocol(0.1)).warning is None
    )


def test_muon_matrix_lr_scales_with_lr(photo_folder, tmp_path):
    train(str(photo_folder), out=str(tmp_path / "run"), lr_grid=(0.004,), **{**QUICK_OPTIONS, "optimizer": "muon"})
    run, (grid, _) = RunFolder(tmp_path / "run").run(), transfer.read_protocol(RunFolder(tmp_path / "run"))
    assert run.optimizer.lr == 0.004 and grid.lr != 0.004
    assert run.optimizer.matrix_lr / run.optimizer.lr == pytest.approx(grid.matrix_lr / grid.lr)
    assert set_learning_rate(run, grid, grid.lr).optimizer.matrix_lr == grid.matrix_lr
    assert not (tmp_path / "run" / "trials").exists(), "a single learning rate needs no trial"


def test_diverged_trial_ranks_last(photo_folder, tmp_path):
    listener = NoteListener()
    settings = {**QUICK_OPTIONS, "optimizer": "adamw"}
    summary = train(str(photo_folder), listener, out=str(tmp_path / "run"), lr_grid=(0.001, 0.002, 1e30), **settings)
    trials = summary["lr_grid"]["trials"]
    assert trials[2]["score"] is None and "step" in trials[2]["failure"]
    assert summary["lr_grid"]["choice"]["lr"] in (0.001, 0.002)
    assert any("lr 1e+30 (3 of 3)" in note for note in listener.notes)
    write_report(tmp_path / "run" / "report.html", RunFolder(tmp_path / "run"))
    assert trials[2]["failure"].split(";")[0] in (tmp_path / "run" / "report.html").read_text()


def test_lr_grid_fails_when_every_trial_diverges(photo_folder, tmp_path):
    settings = {**QUICK_OPTIONS, "optimizer": "adamw"}
    for again in ({"lr_grid": (1e29, 1e30), **settings}, {"resume": True}):
        with pytest.raises(NonFiniteError, match="in all 2 trials"):
            train(str(photo_folder), out=str(tmp_path / "run"), **again)


def test_final_run_trains_on_held_out_images(tmp_path):
    root = make_folder(tmp_path / "photos", {"": 20})
    summary = train(str(root), out=str(tmp_path / "run"), lr_grid=(0.001, 0.01), **QUICK_OPTIONS)
    run = RunFolder(tmp_path / "run").run()
    trial = RunFolder(tmp_path / "run" / "trials" / "lr-0.01").run()
    assert run.data.images == 60 and trial.data.images == 54
    assert summary["lr_grid"]["protocol"]["held_out"] == 6 and summary["val"] is None
    with pytest.raises(DataError, match="no val split"):
        evaluate(tmp_path / "run", split="val")
    assert evaluate(tmp_path / "run" / "trials" / "lr-0.01", split="val")["val"]["images"] == 6


def test_the_data_are_split_without_loss_or_overlap(tmp_path):
    for data in (open_digits(), open_data(make_folder(tmp_path / "photos", {"train": 20, "test": 5}))):
        held, back = data.with_holdout(0.2, 0), data.with_holdout(0.0, 0)
        total = len(data.splits["train"]) + len(data.splits["val"])
        assert len(back.splits["train"]) == total and "val" not in back.splits
        assert len(held.splits["train"]) + len(held.splits["val"]) == total
        assert back.splits["test"] is data.splits["test"] is held.splits["test"]
        assert len({data.fingerprint(), held.fingerprint(), back.fingerprint()}) == 3
    names = {name: {split.name(sample) for sample in range(len(split))} for name, split in held.splits.items()}
    assert names["train"] | names["val"] == {back.splits["train"].name(sample) for sample in range(total)}
    assert not names["train"] & names["val"]
    with_val = open_data(make_folder(tmp_path / "own", {"train": 20, "val": 5}))
    assert with_val.with_holdout(0.0, 0).splits["val"] is with_val.splits["val"]
    assert len(with_val.with_holdout(0.1, 0).splits["val"]) == 6


@pytest.mark.parametrize("size", [(16, 16), (80, 80)], ids=["in memory", "from files"])
def test_trial_repeated_from_its_config_is_identical(tmp_path, size):
    root = make_folder(tmp_path / "photos", {"train": 12}, size=size)
    held = open_data(root).with_holdout(0.1, 0)
    for split in ("train", "val"):
        Path(held.splits[split].paths[1]).write_bytes(b"not an image")
    settings = {**QUICK_OPTIONS, "bad_images": "skip", "image_size": 16, "epochs": 1}
    train(str(root), out=str(tmp_path / "run"), lr_grid=(0.001, 0.01), **settings)
    trial_folder = tmp_path / "run" / "trials" / "lr-0.01"
    trial = RunFolder(trial_folder).run()
    assert RunFolder(tmp_path / "run").run().data.images == 34
    assert trial.data.images == 32 and trial.data.cache == (size == (16, 16))
    again = train(str(root), out=str(tmp_path / "again"), config=str(trial_folder / "config.yaml"), bad_images="skip")
    assert read_weights(tmp_path / "again") == read_weights(trial_folder)
    metrics = json.loads((trial_folder / "summary.json").read_text())["val"]
    assert again["val"] == metrics and metrics["images"] == 3 and metrics["unreadable"] == 1


def test_options_that_conflict_with_lr_grid_are_rejected(photo_folder, tmp_path):
    def get_error_message(**options):
        with pytest.raises(UsageError) as caught:
            train(str(photo_folder), **options)
        return str(caught.value)

    assert "lr_grid" in get_error_message(lr_grid=(0.1,), lr=0.1)
    assert "above 0" in get_error_message(lr_grid=(0.1, -1.0))
    assert "add lr_grid" in get_error_message(ray="auto")
    assert "leave these settings out" in get_error_message(lr_grid=(), settings={"data.hold-out": ["0.5"]})
    out = str(tmp_path / "run")
    train(str(photo_folder), out=out, lr_grid=(0.01,), **QUICK_OPTIONS)
    (tmp_path / "run" / "summary.json").unlink()
    assert "uses the grid 0.01" in get_error_message(out=out, resume=True, lr_grid=(0.02,))
    assert "trials differ only in learning rate" in get_error_message(out=out, resume=True, override=True)
    plain = str(tmp_path / "plain")
    train(str(photo_folder), out=plain, **QUICK_OPTIONS)
    assert "was started without lr_grid" in get_error_message(out=plain, resume=True, lr_grid=())


def test_classes_too_small_to_split_are_rejected(tmp_path):
    root = make_folder(tmp_path / "photos", {"train": 3})
    with pytest.raises(DataError, match="too few to compare learning rates"):
        train(str(root), out=str(tmp_path / "run"), lr_grid=(), **QUICK_OPTIONS)


def test_dry_run_reports_the_cost_of_the_grid(photo_folder, tmp_path):
    words = [w for k, v in QUICK_OPTIONS.items() for w in (f"--{k.replace('_', '-')}", str(v))]
    result = run_cli("train", str(photo_folder), *words, "--lr-grid", "--dry-run", "--json", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    plan = json.loads(result.stdout)
    assert plan["trials"] == 4 and plan["lr_grid"] == [0.001, 0.003, 0.01, 0.03] and plan["held_out"] == 3
    assert plan["total_minutes"] >= plan["minutes"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["photos"]


def test_the_report_has_the_grid(uninterrupted_run, tmp_path):
    root, _ = uninterrupted_run
    out = tmp_path / "run"
    shutil.copytree(root.parent / "whole", out)
    write_report(out / "report.html", RunFolder(out))
    page = (out / "report.html").read_text()
    for trial in read_trials(out)["trials"]:
        assert (
            f"{trial['lr']:g}" in page
            and f"{100 * trial['score']:.2f} %" in page
            and f"{trial['folder']}/config.yaml" in page
        )
    assert "all images" in page and "vitreous evaluate" in page


def test_multilabel_trials_are_scored_by_map(tmp_path):
    root = make_folder(tmp_path / "photos", {"train": 15})
    rows = [
        f"{path},{path.parent.name}{'|bee' if number % 3 == 0 else ''}"
        for number, path in enumerate(sorted(root.rglob("*.png")))
    ]
    (tmp_path / "table.csv").write_text("\n".join(["path,label", *rows]) + "\n")
    summary = train(str(tmp_path / "table.csv"), out=str(tmp_path / "run"), lr_grid=(0.001, 0.01), **QUICK_OPTIONS)
    for trial in summary["lr_grid"]["trials"]:
        val = json.loads((tmp_path / "run" / trial["folder"] / "summary.json").read_text())["val"]
        assert trial["score"] == val["map"] and val["top1"] is None and val["images"] == 4
    write_report(tmp_path / "run" / "report.html", RunFolder(tmp_path / "run"))
    page = (tmp_path / "run" / "report.html").read_text()
    assert re.search(r"<th><span class=\"term\"><button [^>]*>mAP</button>[^\n]*</span></span> \(held out\)</th>", page)


def test_missing_ray_error_contains_the_install_command(photo_folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match="pip install 'vitreous\\[ray\\]'"):
        train(str(photo_folder), out=str(tmp_path / "run"), lr_grid=(0.001, 0.01), ray="local", **QUICK_OPTIONS)


@pytest.mark.slow
def test_ray_trials_are_bit_identical(uninterrupted_run, tmp_path):
    root, expected_run = uninterrupted_run
    train(str(root), out=str(tmp_path / "run"), lr_grid=(0.001, 0.01), ray="local", **QUICK_OPTIONS)
    assert read_outcome(tmp_path / "run") == expected_run


@pytest.mark.slow
def test_interrupted_ray_trials_resume_bit_identical(uninterrupted_run, tmp_path):
    root, _ = uninterrupted_run
    out, settings = tmp_path / "run", {**QUICK_OPTIONS, "epochs": 50.0, "save_every": 1000}
    words = [w for k, v in settings.items() for w in (f"--{k.replace('_', '-')}", str(v))]
    command = [
        sys.executable,
        "-m",
        "vitreous",
        "train",
        str(root),
        *words,
        "--lr-grid",
        "0.001",
        "0.01",
        "--out",
        str(out),
        "--ray",
        "local",
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    deadline = time.time() + 200
    while time.time() < deadline and not list(out.glob("trials/*/metrics.jsonl")):
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 143 and f"continue with --resume --out {out}" in errors, errors
    assert not (out / "report.html").exists() and list(out.glob("trials/*/checkpoints/step-*"))
    train(str(root), out=str(out), resume=True, ray="local")
    train(str(root), out=str(tmp_path / "one"), lr_grid=(0.001, 0.01), **settings)
    assert read_outcome(out) == read_outcome(tmp_path / "one")
    assert not list((out / "trials").glob(".*"))
