"""Unlabelled runs of `train`: logged metrics and saved files."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest
import torch

import vitreous
from tests.conftest import make_image, run_cli
from vitreous.errors import CollapseError, UsageError
from vitreous.tasks.features import FeatureExtraction
from vitreous.training import throughput
from vitreous.weights.bundle import load_bundle

HEAD_SETTINGS = {"objective.prototypes": ["32"], "objective.head_width": ["24"], "objective.bottleneck": ["16"]}
OBJECTIVE_SETTINGS = {
    "masked-patches": {},
    "mae": {"objective.decoder_width": ["16"], "objective.decoder_heads": ["2"], "objective.decoder_depth": ["1"]},
    "dino": HEAD_SETTINGS,
    "dinov2": {**HEAD_SETTINGS, "objective.centring": ["sinkhorn"], "objective.patch_prototypes": ["16"]},
}
TRAIN_OPTIONS = {
    "model": "ViT-32x2/4",
    "image_size": 16,
    "precision": "fp32",
    "seed": 3,
    "save_every": 1,
    "log_every": 1,
    "batch_size": 8,
    "epochs": 2.0,
    "drop_path": 0.0,
}
TARGET_METRICS = ("teacher_entropy", "prototype_entropy", "feature_std")
LOGGED_METRICS = {"dino": TARGET_METRICS, "dinov2": ("dino", "ibot", "koleo", *TARGET_METRICS)}


@pytest.fixture(scope="module")
def unlabelled_images(tmp_path_factory):
    """Return a folder of 32 images without classes."""
    home = tmp_path_factory.mktemp("data") / "flat"
    home.mkdir()
    for index in range(32):
        make_image(index, (16, 16), index % 3).save(home / f"{index}.png")
    return home


def make_run_options(name, **changes):
    """Return options of a short run."""
    return {"recipe": name, **TRAIN_OPTIONS, "settings": OBJECTIVE_SETTINGS[name], **changes}


@pytest.mark.parametrize("name", OBJECTIVE_SETTINGS)
def test_unlabelled_training_produces_an_embedding_model(unlabelled_images, tmp_path, name):
    out = tmp_path / "run"
    summary = vitreous.train(str(unlabelled_images), out=str(out), workers=0, device="cpu", **make_run_options(name))
    assert summary["steps"] == math.ceil(2 * read_num_train_images(out) / 8)
    assert summary["val"]["primary"] == "rankme" and summary["val"]["images"] == 3
    lines = [json.loads(line) for line in (out / "metrics.jsonl").open()]
    for figure in ("loss", *LOGGED_METRICS.get(name, ())):
        assert all(math.isfinite(line[f"train/{figure}"]) for line in lines if "train/loss" in line), figure
    assert 1 <= lines[-1]["val/rankme"] <= 3 and lines[-1]["step"] == summary["steps"]
    assert load_bundle(out / "model").task == FeatureExtraction()
    result = run_cli(
        "embed", str(out), str(unlabelled_images), "--out", str(tmp_path / "vectors.npz"), "--device", "cpu"
    )
    assert result.returncode == 0, result.stderr
    vectors = np.load(tmp_path / "vectors.npz")["embeddings"]
    assert vectors.shape == (32, 32) and np.isfinite(vectors).all() and vectors.std(0).max() > 0


def test_without_a_validation_split_training_images_are_measured(unlabelled_images, tmp_path):
    out, options = tmp_path / "run", make_run_options("mae", evaluate_every=2)
    options["settings"] = {**OBJECTIVE_SETTINGS["mae"], "data.hold_out": ["0"]}
    summary = vitreous.train(str(unlabelled_images), out=str(out), workers=0, device="cpu", **options)
    assert summary["val"] is None and 1 <= summary["train"]["rankme"] <= 32 and summary["train"]["loss"] > 0
    measured = [line for line in map(json.loads, (out / "metrics.jsonl").open()) if "training_images/rankme" in line]
    assert [line["step"] for line in measured] == [0, 2, 4, 6, 8]
    assert not any(name.startswith("val/") for line in measured for name in line)


def test_warnings_are_stored_with_the_run(unlabelled_images, tmp_path, monkeypatch):
    monkeypatch.setattr("vitreous.objectives.unlabelled.MIN_RANKME", 1e9)
    out = tmp_path / "run"
    vitreous.train(
        str(unlabelled_images), out=str(out), workers=0, device="cpu", **make_run_options("mae", evaluate_every=2)
    )
    (warning,) = [json.loads(line) for line in (out / "warnings.jsonl").open()]
    assert warning["name"] == "one direction" and warning["step"] == 2 and "--lr" in warning["text"]


def test_stop_on_collapse_stops_the_run(unlabelled_images, tmp_path):
    """Stops with a checkpoint, no summary, exit code 7, and one message with the cause and the setting.

    Without the option the same run warns and completes.
    """
    arguments = (
        "train",
        str(unlabelled_images),
        "--recipe",
        "dino",
        "--model",
        "ViT-32x2/4",
        "--image-size",
        "16",
        "--device",
        "cpu",
    )
    arguments += ("--workers", "0", "--batch-size", "8", "--steps", "8", "--evaluate-every", "2", "--precision", "fp32")
    arguments += ("--objective.prototypes", "32", "--objective.koleo", "0", "--optimizer", "adamw", "--lr", "1")
    arguments += ("--schedules.momentum.start", "0", "--schedules.momentum.end", "0")  # the teacher equals the student
    stopped = run_cli(*arguments, "--out", str(tmp_path / "run"), "--stop-on-collapse")
    assert stopped.returncode == CollapseError.code == 7, stopped.stderr
    *_, error, hint = stopped.stderr.strip().splitlines()
    step = int(re.match(r"error: stopped at step (\d) of 8, saved: ", error)[1])
    assert hint.startswith("  start again in another --out: ") and "--lr" in hint and "Traceback" not in stopped.stderr
    assert (tmp_path / "run" / "checkpoints" / f"step-{step:08d}").is_dir()
    assert not (tmp_path / "run" / "summary.json").exists()
    assert {json.loads(line)["step"] for line in (tmp_path / "run" / "warnings.jsonl").open()} == {step}
    complete = run_cli(*arguments, "--out", str(tmp_path / "complete"))
    assert complete.returncode == 0 and error.split("saved: ")[1] in complete.stderr


def test_a_healthy_run_does_not_stop(unlabelled_images, tmp_path):
    out = tmp_path / "run"
    options = make_run_options("dino", stop_on_collapse=True, evaluate_every=2)
    options["settings"] = OBJECTIVE_SETTINGS["dino"]
    vitreous.train(str(unlabelled_images), out=str(out), workers=0, device="cpu", **options)
    assert (out / "summary.json").is_file() and not (out / "warnings.jsonl").exists()


def test_stop_on_collapse_is_rejected_for_supervised_runs(tmp_path):
    with pytest.raises(UsageError, match="stop_on_collapse requires a self-supervised objective, not supervised"):
        vitreous.train("digits", out=str(tmp_path / "run"), stop_on_collapse=True, progress=False)


def read_num_train_images(out):
    """Return the number of training images of a run."""
    from vitreous.training.folder import RunFolder

    return RunFolder(out).run().data.images


@pytest.mark.usefixtures("without_pages")
@pytest.mark.parametrize("recipe", ["mae", "masked-patches", "dino", "dinov2", "dinov3", "distil-features"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_lora_adapts_only_its_layers(unlabelled_images, tmp_path, recipe, precision, monkeypatch):
    """The bundle of a run with adapters differs from the initial weights only in the adapted matrices."""
    monkeypatch.setattr(throughput, "measure_peak_flops", lambda device, precision: 1e12)
    options = {"image_size": 16, "seed": 3, "device": "cpu", "workers": 0, "batch_size": 8, "progress": False}
    start = tmp_path / "start"
    vitreous.train(str(unlabelled_images), recipe="mae", steps=1, model="ViT-32x2/4", out=str(start), **options)
    teacher = {"teacher": str(start)} if recipe == "distil-features" else {}
    options |= {"init": str(start), "lora": 2, "lr": 1e-2, "steps": 4, "precision": precision, **teacher}
    vitreous.train(str(unlabelled_images), recipe=recipe, out=str(tmp_path / "run"), **options)
    before, after = (load_bundle(home / "model").model.state_dict() for home in (start, tmp_path / "run"))
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    assert changed == {f"encoder.blocks.{index}.attention.part.qkv.weight" for index in range(2)}
