"""Classification of volumes and signals with every verb: training, resumption, evaluation, prediction, inspection."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image

import vitreous
from tests.data.arrays import make_ball, make_wave, write_balls, write_signal, write_waves
from tests.objectives.test_clips import StoppingListener
from vitreous.apps.server.model import warm_up_predictor
from vitreous.apps.server.settings import ServerLimits
from vitreous.data.modalities.signals import SignalPreprocess
from vitreous.data.modalities.volumes import VolumePreprocess, resize_linear
from vitreous.errors import DataError, UsageError
from vitreous.inference.predict import load
from vitreous.recipes.architecture import choose_architecture
from vitreous.recipes.options import TrainOptions
from vitreous.recipes.recipe import DatasetInfo
from vitreous.reports.figures.slices import take_middle_slice
from vitreous.reports.inspect import inspect
from vitreous.weights.bundle import load_bundle

TRAIN_OPTIONS = {"workers": 0, "device": "cpu", "precision": "fp32", "batch_size": 12, "lr": 3e-3}


@pytest.fixture(scope="module")
def array_data(tmp_path_factory):
    """Return a folder with three splits of balls below `balls`, and of waves below `waves`."""
    array_data = tmp_path_factory.mktemp("arrays")
    for split_index, (name, count) in enumerate((("train", 18), ("val", 3), ("test", 8))):
        write_balls(array_data / "balls" / name, count, first=1000 * split_index)
        write_waves(array_data / "waves" / name, count, first=1000 * split_index)
    return array_data


@pytest.fixture(scope="module")
def balls(array_data, tmp_path_factory):
    """Return a run trained on the size of balls, and its notes."""
    out, listener = tmp_path_factory.mktemp("runs") / "balls", StoppingListener()
    options = {**TRAIN_OPTIONS, "model": "ViT-64x2/4x4x4", "steps": 30}
    vitreous.train(str(array_data / "balls"), out=str(out), listener=listener, **options)
    return out, listener.notes


@pytest.fixture(scope="module")
def waves(array_data, tmp_path_factory):
    """Return a run trained on the period of waves, and its notes."""
    out, listener = tmp_path_factory.mktemp("runs") / "waves", StoppingListener()
    options = {**TRAIN_OPTIONS, "model": "ViT-64x2/4", "steps": 40, "axes": 1}
    vitreous.train(str(array_data / "waves"), out=str(out), listener=listener, **options)
    return out, listener.notes


@pytest.mark.parametrize("dataset", ["balls", "waves"])
def test_volume_and_signal_runs_learn_and_work_with_every_verb(array_data, request, dataset):
    folder, notes = request.getfixturevalue(dataset)
    modality, model_name = ("volumes", "ViT-64x2/4x4x4") if dataset == "balls" else ("signals", "ViT-64x2/4")
    assert f"the data are 58 {modality}" in notes
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["test"]["images"] == 16 and summary["test"]["top1"] > 0.9, summary["test"]
    bundle = load_bundle(folder / "model")
    assert bundle.model.config.name() == model_name and bundle.preprocess.noun == modality
    assert bundle.preprocess.image == ((12, 12, 16) if dataset == "balls" else (48,))
    document = vitreous.evaluate(str(folder), str(array_data / dataset / "test"), device="cpu", precision="fp32")
    assert document["test"]["nll"] == pytest.approx(summary["test"]["nll"], abs=1e-4)
    predictor = load(str(folder), device="cpu", precision="fp32")
    paths = sorted(map(str, (array_data / dataset / "test").rglob("*.n*")))
    predictions = predictor.predict(paths)
    right = sum(prediction.names[0] == path.split("/")[-2] for prediction, path in zip(predictions, paths, strict=True))
    assert right == round(16 * document["test"]["top1"])
    array = make_ball(2000, True) if dataset == "balls" else make_wave(2000, True)
    array_inputs = [array, torch.from_numpy(array)[None]]
    file_prediction = predictor.predict(
        [str(array_data / dataset / "test" / ("large/0.nii.gz" if dataset == "balls" else "fast/0.npy"))]
    )
    assert all(
        np.allclose(prediction.probabilities, file_prediction[0].probabilities, atol=1e-4)
        for prediction in predictor.predict(array_inputs)
    )
    features = predictor.embed(paths[:2])
    with torch.no_grad():
        inputs = torch.stack([bundle.preprocess.transform(path) for path in paths[:2]])
        expected = bundle.model.features(inputs).mean(1)
    assert np.allclose(np.stack(list(features)), expected, atol=1e-3)
    assert "data:image/" in (folder / "report.html").read_text()


def test_resumed_volume_run_is_bit_identical(array_data, tmp_path):
    options = {**TRAIN_OPTIONS, "model": "ViT-32x1/8x8x8", "steps": 6, "save_every": 2, "axes": 3}
    vitreous.train(str(array_data / "balls"), out=str(tmp_path / "whole"), **options)
    with pytest.raises(KeyError):
        stop = {**options, "workers": 2, "log_every": 1}
        vitreous.train(str(array_data / "balls"), out=str(tmp_path / "stopped"), listener=StoppingListener(36), **stop)
    vitreous.train(str(array_data / "balls"), out=str(tmp_path / "stopped"), resume=True)
    uninterrupted, resumed = (
        load_bundle(tmp_path / name / "model").model.state_dict() for name in ("whole", "stopped")
    )
    assert all(torch.equal(uninterrupted[name], resumed[name]) for name in uninterrupted)
    with pytest.raises(UsageError, match=r"data\.axes"):
        vitreous.train(out=str(tmp_path / "stopped"), resume=True, axes=2)


def test_larger_volumes_are_resized_and_standardisation_is_optional(array_data, tmp_path):
    listener = StoppingListener()
    options = {**TRAIN_OPTIONS, "model": "ViT-32x1/8x8x8", "image_size": 8, "steps": 1}
    settings = {"preprocess.standardise": ["data"]}
    vitreous.train(str(array_data / "balls"), out=str(tmp_path / "a"), listener=listener, settings=settings, **options)
    assert any(note.startswith("volumes of 12 x 12 x 14 are scaled to 8 x 8 x 8") for note in listener.notes)
    preprocess = load_bundle(tmp_path / "a" / "model").preprocess
    values = [resize_linear(make_ball(2 * n + p, not p)[None], (8, 8, 8)) for n in range(18) for p in (0, 1)]
    assert preprocess.fit == "squash" and preprocess.standardise == "data"
    assert preprocess.mean == pytest.approx([np.mean(values)], rel=1e-3)
    assert preprocess.std == pytest.approx([np.std(values)], rel=1e-3)
    vitreous.train(
        str(array_data / "balls"), out=str(tmp_path / "b"), init=str(tmp_path / "a"), steps=1, **TRAIN_OPTIONS
    )
    assert load_bundle(tmp_path / "b" / "model").preprocess == preprocess


def test_inspect_draws_middle_slices_of_volumes(array_data, balls, tmp_path):
    path = array_data / "balls/test/large/0.nii.gz"
    document = inspect(balls[0], path, tmp_path / "out", device="cpu", precision="fp32")
    assert [entry["name"] for entry in document["figures"]] == ["slices", "distance"]
    bundle = load_bundle(balls[0] / "model")
    pixels = bundle.preprocess.to_tensor(bundle.preprocess.decode(path))
    maps = np.load(tmp_path / "out/slices.npz")["maps"]
    assert maps.shape == (1, 3, 3, 4) and (maps >= 0).all() and maps.sum() == pytest.approx(1, abs=1e-3)
    for axis, cells in enumerate(((1, slice(None), slice(None)), (slice(None), 1), (slice(None), slice(None), 2))):
        number, plane, weights = take_middle_slice(pixels, torch.from_numpy(maps[0]), axis)
        middle_slice = pixels[0].select(axis, pixels.shape[1 + axis] // 2)
        grey = (middle_slice - pixels.min()) * 255 / (pixels.max() - pixels.min())
        assert number == (6, 6, 8)[axis] and np.array_equal(weights, maps[0][cells])
        assert np.abs(np.asarray(plane)[..., 0] - grey.numpy()).max() <= 1
    with Image.open(tmp_path / "out/slices.png") as figure:
        assert figure.width > 2 * figure.height
    with pytest.raises(UsageError, match=r"figure rollout is not available for models of volumes\n.*slices"):
        inspect(balls[0], figures=["rollout"])


def test_inspect_draws_attention_along_signals(array_data, waves, tmp_path):
    for number in range(2):
        write_signal(tmp_path / f"new/{number}.csv", make_wave(number, fast=True))
    document = inspect(waves[0], tmp_path / "new", tmp_path / "out", device="cpu", precision="fp32")
    assert [figure["name"] for figure in document["figures"]] == ["curves", "distance"] and len(document["images"]) == 2
    assert np.load(tmp_path / "out/curves.npz")["maps"].shape == (2, 12)
    assert {prediction["classes"][0]["class"] for prediction in document["predictions"]} <= {"fast", "slow"}
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match="no signals in"):
        inspect(waves[0], tmp_path / "none", figures=["curves"])


def test_server_rejects_signal_models(waves):
    with pytest.raises(UsageError, match="takes signals; the server supports images and clips"):
        warm_up_predictor(load(str(waves[0]), device="cpu"), ServerLimits())


def test_unreadable_file_is_named_in_the_error(array_data, tmp_path):
    write_waves(tmp_path / "data", 4)
    write_signal(tmp_path / "data/fast/0.npy", np.full(48, np.nan, np.float32))
    options = {**TRAIN_OPTIONS, "model": "ViT-32x1/8", "steps": 1}
    with pytest.raises(DataError, match=r"fast/0.npy: 48 of its values are NaN"):
        vitreous.train(str(tmp_path / "data"), out=str(tmp_path / "run"), **options)
    document = vitreous.train(str(tmp_path / "data"), out=str(tmp_path / "other"), bad_images="skip", **options)
    assert document["steps"] == 1


@pytest.mark.parametrize(("change", "problem"), [
    ({"recipe": "mae"}, "needs images"), ({"recipe": "deit"}, "deit is for images, but the data are volumes"),
    ({"model": "BiT-R50x1"}, "is for images, but the data are volumes"), ({"init": "FLAT"}, "are for images"),
    ({"frames": 5}, "frames and stride are for clips"), ({"recipe": "segment"}, "has no boxes, masks or class maps"), ({"mixup": 0.2}, "mixup"),
])  # fmt: skip
def test_options_unsupported_for_volumes_are_rejected(array_data, tmp_path, change, problem):
    vitreous.save(vitreous.create("ViT-32x1/8", 16, 2), tmp_path / "flat")
    options = {**TRAIN_OPTIONS, "steps": 1, **change}
    if "init" in options:
        options["init"] = str(tmp_path / "flat")
    with pytest.raises((UsageError, DataError), match=problem):
        vitreous.train(str(array_data / "balls"), out=str(tmp_path / "run"), **options)
    assert not (tmp_path / "run").exists()


def test_models_reject_data_of_another_modality(array_data, tmp_path, waves):
    vitreous.save(vitreous.create("ViT-32x1/8", 16, 2), tmp_path / "flat")
    with pytest.raises(UsageError, match=r"flat needs images, but .* contains volumes"):
        vitreous.evaluate(str(tmp_path / "flat"), str(array_data / "balls"), device="cpu")
    with pytest.raises(UsageError, match=r"waves needs signals, but .* contains volumes"):
        vitreous.evaluate(str(waves[0]), str(array_data / "balls/test"), device="cpu")


def test_default_architecture_follows_the_data_size():
    def choose_model(size, **options):
        config = choose_architecture(
            TrainOptions("", **options),
            DatasetInfo(100, size, 2, (SignalPreprocess if len(size) == 1 else VolumePreprocess)(size)),
            3,
        )
        return config.name(), config.image, config.channels

    assert choose_model((28, 28, 28)) == ("ViT-128x6/4x4x4", (28, 28, 28), 2)
    assert choose_model((155, 240, 240)) == ("ViT-192x6/8x8x8", (64, 64, 64), 2)
    assert choose_model((5, 60, 62)) == ("ViT-192x6/5x8x8", (5, 64, 64), 2)
    assert choose_model((40, 50, 60), model="ViT-Ti/16", image_size=32) == ("ViT-Ti/16x16x16", (32, 32, 32), 2)
    assert choose_model((250,)) == ("ViT-128x6/4", (248,), 2)
    assert choose_model((5000,)) == ("ViT-128x6/64", (4992,), 2)
    assert choose_model((10**6,)) == ("ViT-128x6/128", (16384,), 2)
    assert choose_model((1000,), patch_size=10, image_size=500) == ("ViT-128x6/10", (500,), 2)
