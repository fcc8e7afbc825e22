"""Messages for stopped, complete and changed runs; tests/reliability compares their results."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.conftest import TINY_RUN, run_cli
from vitreous.jobs.train import train

pytestmark = pytest.mark.usefixtures("without_pages")  # training is repeated many times


@pytest.mark.parametrize(
    "number,code", [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
)
def test_a_signal_saves_and_prints_how_to_resume(photo_folder, tmp_path, number, code):
    out = tmp_path / "run"
    words = [sys.executable, "-m", "vitreous", "train", str(photo_folder), "--out", str(out), "--workers", "0"]
    words += [
        w
        for k, v in {**TINY_RUN, "epochs": 400, "save_every": 10_000, "evaluate_every": 50}.items()
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
def finished_run(photo_folder, tmp_path):
    out = tmp_path / "run"
    train(str(photo_folder), out=str(out), workers=0, **TINY_RUN)
    return out


def test_resuming_a_finished_run_changes_nothing(photo_folder, finished_run):
    modified_times = {p: p.stat().st_mtime_ns for p in finished_run.rglob("*") if p.is_file()}
    again = train(str(photo_folder), out=str(finished_run), resume=True)
    assert again == json.loads((finished_run / "summary.json").read_text())
    assert modified_times == {p: p.stat().st_mtime_ns for p in finished_run.rglob("*") if p.is_file()}


def test_runs_are_not_overwritten_and_keep_their_settings(photo_folder, finished_run):
    result = run_cli("train", str(photo_folder), "--out", str(finished_run))
    assert result.returncode == 2 and "use --resume to continue the run, or another --out" in result.stderr
    result = run_cli(
        "train",
        str(photo_folder),
        "--out",
        str(finished_run),
        "--resume",
        "--lr",
        "0.5",
        "--optimizer.betas",
        "0.8",
        "0.9",
    )
    assert result.returncode == 2
    assert "optimizer.lr" in result.stderr and "-> 0.5" in result.stderr and "optimizer.betas" in result.stderr
    result = run_cli("train", str(photo_folder), "--out", str(photo_folder), "--resume")
    assert result.returncode == 2 and "is not a run folder: it has no config.yaml" in result.stderr


def test_a_finished_run_resumes_only_with_more_epochs(photo_folder, finished_run):
    words = ("train", str(photo_folder), "--out", str(finished_run), "--resume")
    assert run_cli(*words, "--epochs", "4").returncode == 2
    result = run_cli(*words, "--override", "--lr", "0.5")
    assert result.returncode == 2 and "is complete" in result.stderr and "raise --epochs" in result.stderr
    steps = json.loads((finished_run / "summary.json").read_text())["steps"]
    result = run_cli(*words, "--override", "--epochs", "4")
    assert result.returncode == 0, result.stderr
    assert json.loads((finished_run / "summary.json").read_text())["steps"] > steps
    logged = [json.loads(line)["step"] for line in (finished_run / "metrics.jsonl").open() if "train/loss" in line]
    assert logged == list(range(1, logged[-1] + 1))
    assert "epochs: 4" in (finished_run / "config.yaml").read_text()


def test_changed_data_are_rejected(photo_folder, finished_run):
    (finished_run / "summary.json").unlink()
    next((photo_folder / "train" / "ant").iterdir()).unlink()
    result = run_cli("train", str(photo_folder), "--out", str(finished_run), "--resume")
    assert result.returncode == 3 and "has changed since" in result.stderr


LOCK_SCRIPT = """
import fcntl, sys
with open(sys.argv[1], "a+") as file:
    fcntl.lockf(file, fcntl.LOCK_EX)
    file.write("4711")
    file.flush()
    print(flush=True)
    sys.stdin.read()
"""


def test_a_folder_in_use_is_rejected(photo_folder, tmp_path):
    pytest.importorskip("fcntl")
    out = tmp_path / "run"
    train(str(photo_folder), out=str(out), workers=0, **TINY_RUN)
    (out / "summary.json").unlink()
    words = [sys.executable, "-c", LOCK_SCRIPT, str(out / ".lock")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline()
        result = run_cli("train", str(photo_folder), "--out", str(out), "--resume")
        process.communicate()
    assert result.returncode == 2 and "in use by process" in result.stderr
