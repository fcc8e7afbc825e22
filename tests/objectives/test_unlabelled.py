"""Runs without labels, by `train`'s own path: what they log and what they ship."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

import vitreous
from tests.conftest import picture, say
from vitreous.weights.bundle import load_bundle
from vitreous.weights.tasks import Features

HEADS = {"objective.prototypes": ["32"], "objective.head_width": ["24"], "objective.bottleneck": ["16"]}
SETTINGS = {
    "masked-patches": {},
    "mae": {"objective.decoder_width": ["16"], "objective.decoder_heads": ["2"], "objective.decoder_depth": ["1"]},
    "dino": HEADS,
    "dinov2": {**HEADS, "objective.centring": ["sinkhorn"], "objective.patch_prototypes": ["16"]},
}
OPTIONS = {
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
TARGETS = ("teacher_entropy", "prototype_entropy", "feature_deviation")
LOGGED = {"dino": TARGETS, "dinov2": ("dino", "ibot", "koleo", *TARGETS)}


@pytest.fixture(scope="module")
def flat(tmp_path_factory):
    """32 images in one folder, without classes."""
    home = tmp_path_factory.mktemp("data") / "flat"
    home.mkdir()
    for index in range(32):
        picture(index, (16, 16), index % 3).save(home / f"{index}.png")
    return home


def options_of(name, **changes):
    """Options of a short run."""
    return {"recipe": name, **OPTIONS, "settings": SETTINGS[name], **changes}


@pytest.mark.parametrize("name", SETTINGS)
def test_images_without_labels_train_a_model_that_embeds(flat, tmp_path, name):
    out = tmp_path / "run"
    summary = vitreous.train(str(flat), out=str(out), workers=0, device="cpu", **options_of(name))
    assert summary["steps"] == math.ceil(2 * summary_images(out) / 8)
    assert summary["val"]["leading"] == "rankme" and summary["val"]["images"] == 3
    lines = [json.loads(line) for line in (out / "metrics.jsonl").open()]
    for figure in ("loss", *LOGGED.get(name, ())):
        assert all(math.isfinite(line[f"train/{figure}"]) for line in lines if "train/loss" in line), figure
    assert 1 <= lines[-1]["val/rankme"] <= 3 and lines[-1]["step"] == summary["steps"]
    assert load_bundle(out / "model").task == Features()
    found = say("embed", str(out), str(flat), "--out", str(tmp_path / "vectors.npz"), "--device", "cpu")
    assert found.returncode == 0, found.stderr
    vectors = np.load(tmp_path / "vectors.npz")["embeddings"]
    assert vectors.shape == (32, 32) and np.isfinite(vectors).all() and vectors.std(0).max() > 0


def test_without_a_validation_split_training_images_are_measured(flat, tmp_path):
    out, options = tmp_path / "run", options_of("mae", evaluate_every=2)
    options["settings"] = {**SETTINGS["mae"], "data.hold_out": ["0"]}
    summary = vitreous.train(str(flat), out=str(out), workers=0, device="cpu", **options)
    assert summary["val"] is None and 1 <= summary["train"]["rankme"] <= 32 and summary["train"]["loss"] > 0
    measured = [line for line in map(json.loads, (out / "metrics.jsonl").open()) if "training_images/rankme" in line]
    assert [line["step"] for line in measured] == [2, 4, 6, 8]
    assert not any(name.startswith("val/") for line in measured for name in line)


def test_alarms_are_kept_with_the_run(flat, tmp_path, monkeypatch):
    monkeypatch.setattr("vitreous.objectives.unlabelled.ONE_DIRECTION", 1e9)
    out = tmp_path / "run"
    vitreous.train(str(flat), out=str(out), workers=0, device="cpu", **options_of("mae", evaluate_every=2))
    (kept,) = [json.loads(line) for line in (out / "warnings.jsonl").open()]
    assert kept["name"] == "one direction" and kept["step"] == 2 and "--lr" in kept["text"]


def summary_images(out):
    """Training images of a run."""
    from vitreous.training.folder import Folder

    return Folder(out).run().data.images
