"""Runs without labels, by `train`'s own path: to the same bits after SIGKILL, the same for 1, 2 and 4 processes and
under FSDP, in float32 and bfloat16; and what they ship."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import vitreous
from tests.conftest import picture, say
from tests.training.test_ranks import carry_out, job, outcome  # noqa: F401  a fixture
from vitreous.weights.bundle import load_bundle
from vitreous.weights.sharded import tensors_in
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
    assert summary["steps"] == math.ceil(2 * summary_images(out) / 8) and summary["val"] is None
    lines = [json.loads(line) for line in (out / "metrics.jsonl").open()]
    for figure in ("loss", *LOGGED.get(name, ())):
        assert all(math.isfinite(line[f"train/{figure}"]) for line in lines), figure
    assert load_bundle(out / "model").task == Features()
    found = say("embed", str(out), str(flat), "--out", str(tmp_path / "vectors.npz"), "--device", "cpu")
    assert found.returncode == 0, found.stderr
    vectors = np.load(tmp_path / "vectors.npz")["embeddings"]
    assert vectors.shape == (32, 32) and np.isfinite(vectors).all() and vectors.std(0).max() > 0


def summary_images(out):
    """Training images of a run."""
    from vitreous.training.folder import Folder

    return Folder(out).run().data.images


@pytest.mark.parametrize("name", SETTINGS)
def test_a_killed_run_goes_on_to_the_same_bits(flat, tmp_path, name, carry_out):  # noqa: F811
    options = options_of(name)
    codes, errors = carry_out(
        job(flat, tmp_path / "whole", 1, options=options),
        job(flat, tmp_path / "killed", 1, options=options, kill=[0, 4]),
        job(flat, tmp_path / "killed", 1, options={"resume": True}),
    )
    assert codes == [[0], [-9], [0]], errors
    assert outcome(tmp_path / "whole") == outcome(tmp_path / "killed")
    if name.startswith("dino"):
        held = load_file(max((tmp_path / "whole" / "checkpoints").glob("step-*")) / "frozen.safetensors")
        assert {"centre", "teacher_head.prototypes.weight", "teacher.projection.weight"} <= held.keys()


@pytest.mark.parametrize("name", SETTINGS)
def test_any_number_of_processes_agrees(flat, tmp_path, name, carry_out):  # noqa: F811
    options = options_of(name, optimizer="sgd", lr=0.05)
    ways = {"one": 1, "two": 2, "four": 4}
    jobs = [job(flat, tmp_path / way, world, options=options) for way, world in ways.items()]
    jobs.append(job(flat, tmp_path / "fsdp", 2, options={**options, "parallel": "fsdp"}))
    codes, errors = carry_out(*jobs)
    assert codes == [[0], [0] * 2, [0] * 4, [0] * 2], errors
    one = states(tmp_path / "one")
    for way in ("two", "four", "fsdp"):
        other = states(tmp_path / way)
        assert one.keys() == other.keys()
        assert all(torch.allclose(one[key], other[key], atol=1e-5) for key in one), way
    curves = [
        [line["train/loss"] for line in map(json.loads, (tmp_path / way / "metrics.jsonl").open())]
        for way in (*ways, "fsdp")
    ]
    assert all(curve == pytest.approx(curves[0], rel=1e-4) for curve in curves)


def states(out):
    """Tensors of the last checkpoint, by part and name."""
    place = max((out / "checkpoints").glob("step-*"))
    return {f"{part}/{n}": t for part in ("model", "frozen") for n, t in tensors_in(place, part).items()}


@pytest.mark.processor
@pytest.mark.parametrize("name", SETTINGS)
def test_bfloat16_stays_near_float32(flat, tmp_path, name):
    curves = {}
    for precision in ("fp32", "bf16"):
        out = tmp_path / precision
        changes = {"precision": precision, "epochs": 1.0}
        vitreous.train(str(flat), out=str(out), workers=0, device="cpu", **options_of(name, **changes))
        curves[precision] = [json.loads(line)["train/loss"] for line in (out / "metrics.jsonl").open()]
    assert curves["bf16"] == pytest.approx(curves["fp32"], rel=2e-2)
