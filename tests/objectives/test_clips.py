"""Clip classification: training from scratch and from image weights, evaluation, and resumption with workers."""

from __future__ import annotations

import json

import pytest
import torch

import vitreous
from tests.data.films import write_moves
from vitreous.errors import UsageError
from vitreous.models.config import replace_known_fields
from vitreous.models.names import config_from_name
from vitreous.models.vit import ViT
from vitreous.progress import NullListener
from vitreous.weights.bundle import load_bundle

TRAIN_OPTIONS = {"workers": 0, "device": "cpu", "precision": "fp32", "batch_size": 12, "lr": 3e-3}


class StoppingListener(NullListener):
    """Stores notes, and stops a run after `stop` images."""

    def __init__(self, stop: int = 10**9) -> None:
        self.notes, self.stop = list[str](), stop

    def note(self, text):
        self.notes.append(text)

    def progress(self, label, done, total, text=""):
        if done >= self.stop:
            raise KeyError(done)


@pytest.fixture(scope="module")
def moving_squares(tmp_path_factory):
    """Return clips of squares that move left or right, in three splits."""
    moving_squares = tmp_path_factory.mktemp("clips")
    for split_index, (name, count) in enumerate((("train", 18), ("val", 3), ("test", 6))):
        write_moves(moving_squares / name, count, first=1000 * split_index)
    return moving_squares


@pytest.fixture(scope="module")
def clip_run(moving_squares, tmp_path_factory):
    """Return a run of the default model trained on directions, and its notes."""
    out, listener = tmp_path_factory.mktemp("runs") / "run", StoppingListener()
    vitreous.train(str(moving_squares), out=str(out), steps=40, frames=4, listener=listener, **TRAIN_OPTIONS)
    return out, listener.notes


def test_clip_run_learns_and_evaluates_the_same_frames(moving_squares, clip_run):
    folder, notes = clip_run
    assert any(note.startswith("the data are 54 clips") for note in notes)
    assert any(note.startswith("clips are not mirrored") for note in notes)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["test"]["images"] == 12 and summary["test"]["top1"] > 0.9, summary["test"]
    bundle = load_bundle(folder / "model")
    assert bundle.model.config.name() == "ViViT-64x6/4x2" and bundle.preprocess.image == (4, 16, 16)
    document = vitreous.evaluate(str(folder), device="cpu", precision="fp32")
    assert document["test"]["nll"] == pytest.approx(summary["test"]["nll"], abs=1e-4)
    assert "data:image/" in (folder / "report.html").read_text()


def test_resumed_clip_run_is_bit_identical(moving_squares, tmp_path):
    options = {
        **TRAIN_OPTIONS,
        "model": "ViViT-32x2/8x2-factorised-attention",
        "steps": 6,
        "save_every": 2,
        "stride": 2,
    }
    vitreous.train(str(moving_squares), out=str(tmp_path / "whole"), frames=4, **options)
    with pytest.raises(KeyError):
        stop = {**options, "workers": 2, "frames": 4, "log_every": 1}
        vitreous.train(str(moving_squares), out=str(tmp_path / "stopped"), listener=StoppingListener(36), **stop)
    vitreous.train(str(moving_squares), out=str(tmp_path / "stopped"), resume=True)
    first, second = (load_bundle(tmp_path / name / "model") for name in ("whole", "stopped"))
    assert first.preprocess == second.preprocess and first.preprocess.stride == 2
    uninterrupted, resumed = first.model.state_dict(), second.model.state_dict()
    assert all(torch.equal(uninterrupted[name], resumed[name]) for name in uninterrupted)
    with pytest.raises(UsageError, match="frames: 4 -> 8"):
        vitreous.train(out=str(tmp_path / "stopped"), resume=True, frames=8)


def test_clip_runs_start_from_image_and_clip_weights(moving_squares, clip_run, tmp_path):
    vitreous.save(vitreous.create("ViT-64x2/8", 24, 3), tmp_path / "flat")
    document = vitreous.train(
        str(moving_squares), out=str(tmp_path / "a"), init=str(tmp_path / "flat"), steps=1, **TRAIN_OPTIONS
    )
    config = load_bundle(tmp_path / "a" / "model").model.config
    assert document["steps"] == 1 and config.name() == "ViViT-64x2/8x2" and config.image == (8, 24, 24)
    train_options = {**TRAIN_OPTIONS, "model": "ViViT-64x2/8x4-factorised-encoder", "steps": 1, "image_size": 16}
    vitreous.train(str(moving_squares), out=str(tmp_path / "b"), init=str(tmp_path / "flat"), **train_options)
    assert load_bundle(tmp_path / "b" / "model").model.config.image == (8, 16, 16)
    mean = replace_known_fields(
        config_from_name("ViT-64x2/8", 24), {"pool": "mean", "class_token": False, "registers": 2}
    )
    vitreous.save(ViT(mean), tmp_path / "mean")  # an image model with mean pooling
    vitreous.train(str(moving_squares), out=str(tmp_path / "d"), init=str(tmp_path / "mean"), **train_options)
    config = load_bundle(tmp_path / "d" / "model").model.config
    assert (config.pool, config.class_token, config.registers) == ("mean", False, 2)
    summary = vitreous.train(
        str(moving_squares), out=str(tmp_path / "c"), init=str(clip_run[0]), steps=1, frames=6, **TRAIN_OPTIONS
    )
    assert summary["steps"] == 1 and load_bundle(tmp_path / "c" / "model").model.config.image == (6, 16, 16)


@pytest.mark.parametrize(("change", "problem"), [
    ({"recipe": "dino"}, "needs images"), ({"model": "ViT-32x2/4"}, "is for images, but the data are clips"),
    ({"frames": 5}, "5"), ({"stride": -1}, "invalid stride of -1 frames"), ({"init": "SOLID"}, "are for volumes"),
    ({"data": "digits"}, "frames and stride are for clips"),
])  # fmt: skip
def test_options_unsupported_for_clips_are_rejected(moving_squares, tmp_path, change, problem):
    vitreous.save(vitreous.create("ViT-32x2/4x4x4", (8, 8, 8), 2), tmp_path / "solid")
    options = {**TRAIN_OPTIONS, "data": str(moving_squares), "steps": 1, "frames": 4, **change}
    if options.get("init"):
        options["init"] = str(tmp_path / "solid")
    with pytest.raises(UsageError, match=problem):
        vitreous.train(options.pop("data"), out=str(tmp_path / "run"), **options)


def test_image_model_rejects_clips(moving_squares, tmp_path):
    vitreous.save(vitreous.create("ViT-32x2/8", 16, 2), tmp_path / "flat")
    with pytest.raises(UsageError, match=r"flat needs images, but .* contains clips"):
        vitreous.evaluate(str(tmp_path / "flat"), str(moving_squares), device="cpu")
