"""Commands without a model, run or labels: the error message suggests the intended command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import TINY_RUN, make_folder, make_image, run_cli
from vitreous.cli.console import Console
from vitreous.errors import Interrupted, UsageError
from vitreous.jobs.plan import resolve_data_option
from vitreous.jobs.train import train
from vitreous.recipes.options import TrainOptions
from vitreous.weights.model_paths import find_newest_run, is_image_source

NO_RUN_HINT = "there is no run in this folder; train one with vitreous train DATA"


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    """A folder with data, a new image, and two runs; `runs/b` is the newer one."""
    two_runs = tmp_path_factory.mktemp("home")
    make_folder(two_runs / "photos", {"train": 4, "val": 2, "test": 2})
    (two_runs / "new").mkdir()
    make_image(0).save(two_runs / "new" / "cat.png")
    for name in ("a", "b"):
        run = two_runs / "runs" / name
        (run / "model").mkdir(parents=True)
        for file in ("config.yaml", "command.txt"):
            (run / file).write_text("")
        os.utime(run / "model", (1000 + (name == "b"), 1000 + (name == "b")))
    return two_runs


@pytest.mark.parametrize(
    "words, message",
    [
        (
            "predict new/cat.png",
            "no model given: new/cat.png is not a model\n  try vitreous predict runs/b new/cat.png",
        ),
        ("embed new", "no model given: new contains images\n  try vitreous embed runs/b new"),
        ("evaluate photos", "no model given: photos contains images\n  try vitreous evaluate runs/b photos"),
        ("evaluate photos --json", "no model given: photos contains images\n  try vitreous evaluate runs/b photos"),
        (
            "inspect new/cat.png",
            "no model given: new/cat.png is not a model\n  try vitreous inspect runs/b new/cat.png",
        ),
        ("predict @list.txt", "no model given: @list.txt is not a model\n  try vitreous predict runs/b @list.txt"),
        ("serve new", "no model given: new contains images\n  try vitreous serve runs/b"),
        ("export photos", "no model given: photos contains images\n  try vitreous export runs/b"),
        ("sample new --out x.png", "no model given: new contains images\n  try vitreous sample runs/b …"),
        ("serve", "no model given\n  try vitreous serve runs/b"),
        ("predict --json", "no model given\n  try vitreous predict runs/b …"),
    ],
)
def test_images_given_as_the_model_suggest_the_newest_run(two_runs, words, message):
    result = run_cli(*words.split(), cwd=two_runs)
    assert result.returncode == 2
    assert result.stderr == f"error: {message}; runs/b is the newest run in this folder\n"
    if "--json" in words:
        assert json.loads(result.stdout)["error"]["code"] == 2


def test_a_dataset_folder_with_a_config_file_is_data(two_runs, tmp_path):
    """YOLO datasets have a config.yaml too."""
    make_folder(tmp_path / "data", {"train": 1})
    (tmp_path / "data" / "config.yaml").write_text("names: {0: ant}")
    assert is_image_source(str(tmp_path / "data"))
    assert resolve_data_option(TrainOptions(str(tmp_path / "data"))).data == str(tmp_path / "data")


@pytest.mark.parametrize("words", ["predict new/cat.png runs/a", "evaluate photos runs/a"])
def test_a_model_after_the_images_suggests_the_right_order(two_runs, words):
    verb, images, run = words.split()
    result = run_cli(verb, images, run, cwd=two_runs)
    assert result.returncode == 2
    expected = f"error: the model must come first: {images} contains images\n  try vitreous {verb} {run} {images}\n"
    assert result.stderr == expected


def test_without_any_run_the_message_suggests_training(tmp_path):
    make_image(0).save(tmp_path / "cat.png")
    result = run_cli("predict", "cat.png", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr == (
        f"error: no model given: cat.png is not a model\n  {NO_RUN_HINT}, then vitreous predict RUN …\n"
    )
    result = run_cli("predict", "runs/x", "cat.png", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (2, "error: no run at runs/x\n  train one with `vitreous train`\n")


def test_the_newest_run_is_found_and_weights_are_not_images(two_runs, tmp_path, monkeypatch):
    assert find_newest_run(two_runs) == os.path.join("runs", "b") and find_newest_run(tmp_path) == ""
    monkeypatch.chdir(tmp_path)
    for name in ("moco.pth.tar", "model.safetensors", "vit.npz", "model.onnx"):
        Path(name).write_bytes(b"x")
        assert not is_image_source(name), name
    (tmp_path / "hub").mkdir()
    for name in ("config.json", "model.safetensors", "example.jpg"):
        (tmp_path / "hub" / name).write_bytes(b"x")
    assert not is_image_source("hub") and not is_image_source("missing")
    assert all(map(is_image_source, ("a.JPG", "clip.mp4", "list.csv", "rows.parquet", "x.nii.gz", "-")))


@pytest.fixture(scope="module")
def complete_run(two_runs):
    """A complete trained run in `runs/real`."""
    train(str(two_runs / "photos"), out=str(two_runs / "runs" / "real"), workers=0, **{**TINY_RUN, "epochs": 1})
    return two_runs / "runs" / "real"


def test_a_run_is_resumed_by_its_folder_name(two_runs, complete_run):
    result = run_cli("train", "--resume", "runs/real", cwd=two_runs)
    assert result.returncode == 0 and "note: runs/real is already complete" in result.stderr, result.stderr
    assert run_cli("train", "--resume", "runs/real", "--out", "runs/real", cwd=two_runs).returncode == 0
    assert train(str(complete_run), resume=True)["run"] == str(complete_run)
    result = run_cli("train", "--resume", "runs/real", "--out", "runs/a", cwd=two_runs)
    assert result.returncode == 2
    assert result.stderr == ("error: --resume runs/real and --out runs/a are different runs\n  leave one of them out\n")


def test_a_run_folder_is_not_a_dataset(two_runs, complete_run):
    result = run_cli("train", "runs/real", cwd=two_runs)
    assert result.returncode == 2
    assert result.stderr == (
        "error: runs/real is a run, not a dataset\n  to continue the run: vitreous train --resume runs/real; to start from "
        "its weights: vitreous train DATA --init runs/real\n"
    )
    with pytest.raises(UsageError, match="is a run, not a dataset"):
        train(str(complete_run))


def test_a_run_prints_no_formats_and_no_missing_split(two_runs, complete_run):
    words = [w for k, v in {**TINY_RUN, "epochs": 1}.items() for w in (f"--{k}", str(v))]
    result = run_cli("train", "photos/train", "--out", "runs/plain", "--workers", "0", *words, cwd=two_runs)
    assert result.returncode == 0, result.stderr
    printed = result.stdout + result.stderr
    assert "no such split" not in printed and "can be written as" not in printed and "top-5" not in printed
    assert "validation:" not in printed and "test:" not in printed


def test_a_flat_folder_error_suggests_self_supervised_recipes(tmp_path):
    for index in range(4):
        make_image(index).save(tmp_path / f"{index}.png")
    result = run_cli("train", str(tmp_path))
    assert result.returncode == 3
    assert result.stderr.startswith(f"error: {tmp_path} is a flat folder: 4 images and no class folders")
    commands = [line.strip() for line in result.stderr.splitlines()[2:]]
    assert result.stderr.splitlines()[1].endswith("; or train without labels:")
    assert commands == [f"vitreous train {tmp_path} --recipe {name}" for name in ("mae", "dino", "dinov2", "dit")]


def test_an_interruption_is_not_printed_as_an_error(capsys):
    Console().error(Interrupted("stopped at step 3 of 9, saved", "continue with --resume --out run"))
    assert capsys.readouterr().err == "stopped at step 3 of 9, saved\n  continue with --resume --out run\n"


@pytest.mark.slow
def test_watch_waits_for_a_run_and_ends_without_an_error(two_runs, complete_run):
    """From before the run exists until Ctrl-C."""
    words = [sys.executable, "-m", "vitreous", "watch", "runs/later", "--port", "0"]
    process = subprocess.Popen(words, cwd=two_runs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr.readline().startswith(
            "note: waiting for a run in runs/later (the newest run in this folder is "
        )
        (two_runs / "runs" / "later").mkdir()
        (two_runs / "runs" / "later" / "command.txt").write_text("vitreous train")
        time.sleep(0.7)
        (two_runs / "runs" / "later" / "config.yaml").write_text((complete_run / "config.yaml").read_text())
        assert process.stdout.readline().startswith("watching runs/later at http://127.0.0.1:")
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130 and process.stderr.read().endswith("stopped\n")
    finally:
        process.kill()
