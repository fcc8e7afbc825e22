"""A new family is a config, a module and a table entry; every command supports it without other changes to the
package."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

import vitreous
from tests import contracts
from tests.conftest import make_folder
from tests.models.mobile.config import MobileConfig
from vitreous.config import from_builtins, from_yaml, to_builtins
from vitreous.errors import UsageError
from vitreous.models.config import ModelConfig, SegmenterConfig
from vitreous.models.families import FAMILIES
from vitreous.models.names import config_from_name
from vitreous.models.zoo import build_model, build_without_init
from vitreous.training.run import Run
from vitreous.weights.writable import list_writable_formats


@pytest.fixture(autouse=True)
def register_mobile_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "mobile", "tests.models.mobile.config:MobileConfig")


@pytest.fixture
def trained_run(tmp_path: Path, without_pages: None) -> Path:
    """A run of a few steps, with layer decay."""
    data = make_folder(tmp_path / "data", {"train": 6, "val": 3})
    options = {"epochs": 1, "batch_size": 6, "device": "cpu", "settings": {"optimizer.layer_decay": ["0.5"]}}
    vitreous.train(data, model="mobile-24x2", out=tmp_path / "run", progress=False, **options)
    return tmp_path / "run"


def test_a_name_and_stored_values_make_the_config():
    config = config_from_name("mobile-24x3", 48)
    assert config == MobileConfig(image=(48, 48), width=24, depth=3) and config.name() == "Mobile-24x3"
    assert from_builtins(ModelConfig, to_builtins(config)) == config
    head = SegmenterConfig(backbone=config.with_options(classes=0))
    assert from_builtins(ModelConfig, to_builtins(head)) == head
    with pytest.raises(UsageError, match="width 25 is not a multiple of 2 heads"):
        vitreous.create("Mobile-25x3")
    with pytest.raises(UsageError, match="a Mobile has no option window"):
        vitreous.create("Mobile-24x3", window=2)  # type: ignore[call-overload]


def test_macs_and_layer_indices_of_a_new_family():
    config = MobileConfig(width=24, heads=3)
    n, d = 8 * 8, 24
    stem = 16 * 16 * d * 27 + n * 9 * d**2
    assert config.macs() == stem + 2 * (n * (4 * d**2 + 2 * n * d) + 4 * n * d**2) + d * 10
    assert config.macs((64, 32)) > 2 * config.macs() - d * 10 and config.count_activations() is None
    layers = {name: config.parameter_layer(name) for name, _ in build_without_init(config).named_parameters()}
    assert layers["stem.0.weight"] == 0 and layers["head.weight"] == layers["encoder.norm.weight"] == 3
    assert {layers[name] for name in layers if ".blocks.1." in name} == {2}


@pytest.mark.parametrize("promise", contracts.ALL_CONTRACTS, ids=lambda promise: promise.__name__)
def test_new_family_fulfils_the_model_contract(promise):
    torch.manual_seed(0)
    model = contracts.randomise(build_model(MobileConfig(image=(16, 24), width=8, classes=3)))
    promise(model, torch.randn(3, 3, 16, 24))


def test_new_family_works_with_every_verb(trained_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("vitreous.reports.figures.layers.DEFAULT_IMAGE_SIZES", (32, 64))  # for the figure `cost`
    run = from_yaml(Run, (trained_run / "config.yaml").read_text("utf-8"))
    images = sorted((tmp_path / "data" / "val" / "ant").iterdir())
    assert isinstance(run.model, MobileConfig) and run.optimizer.layer_decay == 0.5
    predictor = vitreous.load(trained_run, device="cpu")
    (prediction,) = predictor.predict(images[:1])
    assert set(prediction.names) == {"ant", "bee", "cat"} and math.isfinite(prediction.probabilities[0])
    assert predictor.embed(images[:1]).shape == (1, 24)
    document = vitreous.evaluate(trained_run, device="cpu", engine="torch")
    assert document["model"] == "Mobile-24x2" and len(document["per_class"]) == 3
    looked = vitreous.inspect(
        trained_run, images[:1], out=tmp_path / "looked", figures=["attention", "cost"], batch_sizes=[1], device="cpu"
    )
    assert looked["model"] == "Mobile-24x2" and not looked["skipped"] and len(looked["figures"]) >= 2
    continued = vitreous.train(tmp_path / "data", init=str(trained_run), out=tmp_path / "more", steps=2, progress=False)
    assert continued["model"] == "Mobile-24x2"


def test_new_family_exports_to_onnx_but_not_to_foreign_formats(trained_run: Path, tmp_path: Path):
    pytest.importorskip("onnxruntime")
    vitreous.export(trained_run, to="onnx", out=tmp_path / "model.onnx")
    image = sorted((tmp_path / "data" / "val" / "bee").iterdir())[:1]
    predictions = [
        vitreous.load(model_path, device="cpu", precision="fp32").embed(image)
        for model_path in (trained_run, tmp_path / "model.onnx")
    ]
    assert np.allclose(*predictions, atol=1e-4)
    with pytest.raises(
        UsageError, match="does not support Mobile-24x2: its positions and paddings are fixed to one size"
    ):
        vitreous.export(trained_run, to="onnx", out=tmp_path / "any.onnx", dynamic_size=True)
    assert list_writable_formats(MobileConfig()) == []
