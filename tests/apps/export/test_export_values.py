"""Exported regression models: equal values, and the standardisation in the metadata."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.conftest import make_image
from tests.inference.small_models import save_value_model
from vitreous.apps.export.export import export
from vitreous.errors import VitreousError
from vitreous.inference.predict import load
from vitreous.tasks.regression import Regression

TASK = Regression(("age", "height"), (40.0, 1.5), (10.0, 0.25))


@pytest.fixture(scope="module")
def value_model(tmp_path_factory):
    """Return a bundle with two targets, and a folder of images."""
    root = tmp_path_factory.mktemp("values")
    save_value_model(root / "model", TASK)
    (root / "images").mkdir()
    for number in range(12):
        make_image(number).save(root / "images" / f"{number}.png")
    return root


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("to", "suffix"), [("onnx", ".onnx"), ("openvino", ".xml"), ("torch", ".pt2")])
def test_exported_values_match_the_run(value_model, tmp_path, to, suffix):
    pytest.importorskip({"onnx": "onnxscript", "openvino": "openvino", "torch": "torch"}[to])
    path = tmp_path / f"model{suffix}"
    (row,) = export(value_model / "model", to, out=path, images=[str(value_model / "images")])["exports"]
    assert row["outputs"] == "logits" and row["top1"] is None and row["top1_agreement"] == 1
    assert row["max_abs_logit_difference"] < 1e-4
    if to == "torch":
        return
    paths = sorted((value_model / "images").iterdir())
    predictions, expected = (
        load(model_path, device="cpu", precision="fp32").predict(paths) for model_path in (path, value_model / "model")
    )
    assert [prediction.targets for prediction in predictions] == [TASK.targets] * 12
    assert np.allclose(
        [prediction.values for prediction in predictions], [prediction.values for prediction in expected], rtol=1e-4
    )


@pytest.mark.filterwarnings("ignore")
def test_metadata_contains_targets_mean_and_std(value_model, tmp_path):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    path = tmp_path / "model.onnx"
    export(value_model / "model", "onnx", out=path, images=[str(value_model / "images")])
    metadata = {entry.key: entry.value for entry in onnx.load(path).metadata_props}
    assert json.loads(metadata["targets"]) == ["age", "height"]
    assert (json.loads(metadata["target_mean"]), json.loads(metadata["target_std"])) == ([40, 1.5], [10, 0.25])


@pytest.mark.filterwarnings("ignore")
def test_an_export_with_different_values_is_not_kept(value_model, tmp_path, monkeypatch):
    pytest.importorskip("onnxscript")
    monkeypatch.setattr(Regression, "measure_agreement", lambda self, ours, theirs: 0.5)
    with pytest.raises(VitreousError, match=r"the export failed the verification: 50\.0% of its predictions differ"):
        export(value_model / "model", "onnx", out=tmp_path / "model.onnx", images=[str(value_model / "images")])
    assert not (tmp_path / "model.onnx").exists()
