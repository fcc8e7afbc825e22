"""The contract of objectives, checked with two test objectives: trained by `train` on unlabelled images."""

from __future__ import annotations

import json
import math
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import vitreous
from tests.conftest import make_image, run_cli
from tests.objectives import toys
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.data.options import DataOptions
from vitreous.data.split import ArraySplit
from vitreous.errors import DataError, UsageError
from vitreous.models.config import MlpConfig, ViTConfig
from vitreous.recipes.recipe import DatasetInfo
from vitreous.tasks.features import FeatureExtraction
from vitreous.training.batches import RunInputs
from vitreous.training.folder import RunFolder
from vitreous.training.loop import run_training_loop, training_progress_at
from vitreous.training.session import Session
from vitreous.weights.bundle import load_bundle

GOLDEN_FILE = Path(__file__).with_name("golden.json")
TOY_RECIPES = {"tiny-dino": toys.tiny_dino, "tiny-pixels": toys.tiny_pixels}
TRAIN_OPTIONS = {
    "model": "ViT-32x2/4",
    "image_size": 16,
    "precision": "fp32",
    "seed": 3,
    "save_every": 1,
    "log_every": 1,
}


@pytest.fixture(autouse=True)
def toy_objectives(monkeypatch):
    """Register the toy objectives and their recipes."""
    toys.register_toys(monkeypatch.setattr)
    yield
    toys.unregister_toys()


@pytest.fixture
def unlabelled_images(tmp_path):
    """Return a folder of 32 images without classes."""
    home = tmp_path / "flat"
    home.mkdir()
    for index in range(32):
        make_image(index, (16, 16), index % 3).save(home / f"{index}.png")
    return home


@pytest.mark.parametrize("name", TOY_RECIPES)
def test_unlabelled_training_produces_an_embedding_model(unlabelled_images, tmp_path, name):
    out = tmp_path / "run"
    summary = vitreous.train(
        str(unlabelled_images), recipe=name, out=str(out), workers=0, device="cpu", **TRAIN_OPTIONS
    )
    assert summary["steps"] == math.ceil(3 * read_num_train_images(out) / 8) and summary["val"] is None
    lines = [json.loads(line) for line in (out / "metrics.jsonl").open()]
    logged = {"tiny-dino": "train/entropy", "tiny-pixels": "train/worst"}[name]
    assert all(math.isfinite(line["train/loss"]) and math.isfinite(line[logged]) for line in lines)
    assert load_bundle(out / "model").task == FeatureExtraction()
    with pytest.raises(UsageError, match="features, not classes"):
        vitreous.load(str(out))
    result = run_cli(
        "embed", str(out), str(unlabelled_images), "--out", str(tmp_path / "vectors.npz"), "--device", "cpu"
    )
    assert result.returncode == 0, result.stderr
    vectors = np.load(tmp_path / "vectors.npz")["embeddings"]
    assert vectors.shape == (32, 32) and np.isfinite(vectors).all() and vectors.std(0).max() > 0


def read_num_train_images(out):
    """Return the number of training images of a run."""
    return RunFolder(out).run().data.images


def create_session(name, tmp_path, **changes):
    """Return a session on random images in memory, and its state."""
    pixels = np.random.default_rng(0).integers(0, 256, (24, 16, 16, 3), dtype=np.uint8)
    split = ArraySplit(pixels, np.zeros((24, 0), np.float32))
    model = ViTConfig(image=(16, 16), patch=(4, 4), classes=0, width=32, depth=2, heads=2, mlp=MlpConfig(hidden=64))
    run = TOY_RECIPES[name](model, DatasetInfo(24, (16, 16), 3), None)
    data = DataOptions("synthetic", (), len(split), "", cache=True)
    run = replace(run, data=data, preprocess=ImagePreprocess((16, 16)), model=model, **changes)
    cached = torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy())
    session = Session(run, RunInputs(split, None, cached), RunFolder(tmp_path))
    return session, session.build()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_teacher_follows_its_schedule_in_float32(tmp_path, precision):
    session, state = create_session("tiny-dino", tmp_path, precision=precision)
    objective = state.objective
    assert {p.dtype for p in objective.teacher.parameters()} == {torch.float32}
    expected = {name: p.clone() for name, p in objective.teacher.named_parameters()}

    def follow_teacher(state):
        momentum = training_progress_at(state.run, state.step - 1).values["momentum"]  # momentum of the completed step
        for name, p in objective.model.named_parameters():
            expected[name] = expected[name].lerp(p.detach().float(), 1 - momentum)

    run_training_loop(state, session.batches(state), [(1, follow_teacher)])
    for name, p in objective.teacher.named_parameters():
        assert torch.allclose(p, expected[name], atol=1e-6), name
    assert objective.centre.abs().max() > 0 and state.progress.values["momentum"] == 1.0
    assert not any(
        torch.equal(p, q)
        for p, q in zip(objective.teacher.parameters(), objective.model.parameters(), strict=True)
        if p.ndim > 1
    )
    averaged = dict(state.flat.averaged_model().named_parameters())
    assert all(torch.equal(averaged[name], p) for name, p in objective.teacher.named_parameters())


def collect_losses(name, precision, tmp_path):
    """Return the loss of every step of a short run."""
    session, state = create_session(name, tmp_path, precision=precision)
    losses = []
    run_training_loop(
        state, session.batches(state), [(1, lambda s: (losses.append(s.losses), setattr(s, "losses", 0.0)))]
    )
    return losses


@pytest.mark.processor
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", TOY_RECIPES)
def test_golden_curve(name, precision, tmp_path):
    """Refactoring does not change the losses; `python -m tests.objectives.test_contract` writes new values."""
    golden = json.loads(GOLDEN_FILE.read_text())[f"{name} {precision}"]
    assert collect_losses(name, precision, tmp_path) == pytest.approx(
        golden, abs={"fp32": 2e-5, "bf16": 2e-2}[precision]
    )


@pytest.mark.parametrize("name", TOY_RECIPES)
def test_loss_decreases_on_a_repeated_batch(name, tmp_path):
    session, state = create_session(name, tmp_path, epochs=20.0)
    losses = []
    pair = next(session.batches(state))
    run_training_loop(
        state, iter(lambda: pair, None), [(1, lambda s: (losses.append(s.losses), setattr(s, "losses", 0.0)))]
    )
    assert losses[-1] < 0.9 * losses[0]


def test_micro_batches_are_rejected_for_batch_dependent_losses(tmp_path):
    for change in ({"shards": 2}, {"micro_batch": 2}, {"reproducible": True}):
        with pytest.raises(UsageError, match="depend on each other"):
            create_session("tiny-dino", tmp_path, **change)


def test_micro_batch_losses_average_to_the_batch_loss(tmp_path):
    session, state = create_session("tiny-pixels", tmp_path)
    _, batch = next(session.batches(state))
    objective = state.objective.eval()
    micro_losses = [objective({name: e[a : a + 2] for name, e in batch.items()})["loss"].item() for a in range(0, 8, 2)]
    assert np.mean(micro_losses) == pytest.approx(objective(batch)["loss"].item(), rel=1e-5)


def test_supervised_training_requires_labels(unlabelled_images, tmp_path):
    with pytest.raises(DataError, match="class"):
        vitreous.train(str(unlabelled_images), out=str(tmp_path / "run"), **TRAIN_OPTIONS)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        curves = {
            f"{name} {p}": collect_losses(name, p, Path(scratch)) for name in TOY_RECIPES for p in ("fp32", "bf16")
        }
    GOLDEN_FILE.write_text(json.dumps(curves, indent=1) + "\n")
