"""What a stopped, a finished and a foreign run say to a user; tests/reliability has what they end in."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.conftest import TINY, say
from vitreous.jobs.train import train

pytestmark = pytest.mark.usefixtures("without_pages")  # training is repeated many times


@pytest.mark.parametrize(
    "number,code", [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
)
def test_a_signal_saves_and_says_how_to_go_on(folder, tmp_path, number, code):
    out = tmp_path / "run"
    words = [sys.executable, "-m", "vitreous", "train", str(folder), "--out", str(out), "--workers", "0"]
    words += [
        w
        for k, v in {**TINY, "epochs": 400, "save_every": 10_000, "evaluate_every": 50}.items()
        for w in (f"--{k.replace('_', '-')}", str(v))
    ]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    deadline = time.time() + 200
    while time.time() < deadline and not (out / "metrics.jsonl").exists():
        time.sleep(0.05)
    process.send_signal(number)
    _, errors = process.communicate(timeout=200)
    assert process.returncode == code, errors
    assert "continue with --resume" in errors and "Traceback" not in errors
    step = int(errors.split("stopped at step ")[1].split()[0])
    assert (out / "checkpoints" / f"step-{step:08d}").is_dir()
    lines = [json.loads(line) for line in (out / "metrics.jsonl").open()]
    assert lines[-1]["step"] == step


@pytest.fixture
def finished(folder, tmp_path):
    out = tmp_path / "run"
    train(str(folder), out=str(out), workers=0, **TINY)
    return out


def test_a_finished_run_is_left_alone(folder, finished):
    before = {p: p.stat().st_mtime_ns for p in finished.rglob("*") if p.is_file()}
    again = train(str(folder), out=str(finished), resume=True)
    assert again == json.loads((finished / "summary.json").read_text())
    assert before == {p: p.stat().st_mtime_ns for p in finished.rglob("*") if p.is_file()}


def test_a_run_is_never_overwritten_and_keeps_its_settings(folder, finished):
    result = say("train", str(folder), "--out", str(finished))
    assert result.returncode == 2 and "use --resume to continue it, or another --out" in result.stderr
    result = say(
        "train", str(folder), "--out", str(finished), "--resume", "--lr", "0.5", "--optimizer.betas", "0.8", "0.9"
    )
    assert result.returncode == 2
    assert "optimizer.lr" in result.stderr and "-> 0.5" in result.stderr and "optimizer.betas" in result.stderr
    result = say("train", str(folder), "--out", str(folder), "--resume")
    assert result.returncode == 2 and "is not a run folder: it has no config.yaml" in result.stderr


def test_a_finished_run_goes_on_with_more_epochs_and_refuses_other_changes(folder, finished):
    words = ("train", str(folder), "--out", str(finished), "--resume")
    assert say(*words, "--epochs", "4").returncode == 2
    result = say(*words, "--override", "--lr", "0.5")
    assert result.returncode == 2 and "is complete" in result.stderr and "raise --epochs" in result.stderr
    steps = json.loads((finished / "summary.json").read_text())["steps"]
    result = say(*words, "--override", "--epochs", "4")
    assert result.returncode == 0, result.stderr
    assert json.loads((finished / "summary.json").read_text())["steps"] > steps
    logged = [json.loads(line)["step"] for line in (finished / "metrics.jsonl").open() if "train/loss" in line]
    assert logged == list(range(1, logged[-1] + 1))
    assert "epochs: 4" in (finished / "config.yaml").read_text()


def test_changed_data_are_refused(folder, finished):
    (finished / "summary.json").unlink()
    next((folder / "train" / "ant").iterdir()).unlink()
    result = say("train", str(folder), "--out", str(finished), "--resume")
    assert result.returncode == 3 and "has changed since" in result.stderr


HOLD = """
import fcntl, sys
with open(sys.argv[1], "a+") as file:
    fcntl.lockf(file, fcntl.LOCK_EX)
    file.write("4711")
    file.flush()
    print(flush=True)
    sys.stdin.read()
"""


def test_a_folder_in_use_is_refused(folder, tmp_path):
    pytest.importorskip("fcntl")
    out = tmp_path / "run"
    train(str(folder), out=str(out), workers=0, **TINY)
    (out / "summary.json").unlink()
    words = [sys.executable, "-c", HOLD, str(out / ".lock")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline()
        result = say("train", str(folder), "--out", str(out), "--resume")
        process.communicate()
    assert result.returncode == 2 and "in use by process" in result.stderr
