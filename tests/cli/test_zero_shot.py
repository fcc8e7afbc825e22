"""Zero-shot options of the command line: predict, evaluate, embed, export and fine-tuning of a saved classifier."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image

import vitreous
from tests.weights.pairs import save_pair
from vitreous.cli.main import main
from vitreous.errors import DataError, UsageError
from vitreous.recipes.architecture import adapt_pretrained_config
from vitreous.recipes.options import TrainOptions
from vitreous.reports.options import EvaluateOptions
from vitreous.reports.zero_shot import label_dataset_classes, read_class_labels
from vitreous.weights.bundle import load_bundle
from vitreous.weights.convert import convert
from vitreous.weights.options import WeightsSource

CLASSES = ("cat", "hot_dog")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return save_pair(tmp_path_factory.mktemp("pair"), "clip")


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    root, draw = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for split in ("train", "test"):
        for name in CLASSES:
            (root / split / name).mkdir(parents=True)
            for index in range(4):
                pixels = draw.integers(0, 255, (20, 24, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{index}.png")
    return root


def run_command(*arguments) -> int:
    with pytest.raises(SystemExit) as stop:
        main([*map(str, arguments)])
    return int(stop.value.code or 0)


def read_document(capsys, *arguments) -> dict:
    assert run_command(*arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_predict_and_python_agree(pair, photos, capsys):
    path = photos / "test" / "cat" / "0.png"
    document = read_document(capsys, "predict", pair, path, "--labels", "cat", "hot dog", "--templates", "photo", "{}")
    classifier = vitreous.build_zero_shot_classifier(pair, ["cat", "hot dog"], ["photo", "{}"])
    prediction = classifier.predict(path)
    classes = document["predictions"][0]["classes"]
    assert {row["class"]: row["probability"] for row in classes} == dict(
        zip(prediction.names, prediction.probabilities, strict=True)
    )
    assert vitreous.build_zero_shot_classifier(pair, ["cat"], "none", multilabel=True).card.classification.multilabel


def test_options_without_labels_are_rejected(pair, photos, capsys):
    assert run_command("predict", pair, photos, "--templates", "photo") == 2
    assert "--templates is for zero-shot classification" in capsys.readouterr().err
    assert run_command("predict", pair, photos) == 2
    assert '--labels "cat" "dog"' in capsys.readouterr().err
    assert run_command("evaluate", pair, photos, "--class-labels", "x.csv") == 2


def test_evaluate_uses_the_class_names_as_labels(pair, photos, tmp_path, capsys):
    options = ("--zero-shot", "--report", tmp_path / "page.html", "--precision", "fp32")
    document = read_document(capsys, "evaluate", pair, photos, *options)
    classifier = vitreous.build_zero_shot_classifier(pair, ["cat", "hot dog"], precision="fp32")
    right = [
        classifier.predict(path).names[0] == name.replace("_", " ")
        for name in CLASSES
        for path in sorted((photos / "test" / name).iterdir())
    ]
    assert document["test"]["top1"] == pytest.approx(np.mean(right))
    assert [row["class"] for row in document["per_class"]] == list(CLASSES)


def test_labels_of_classes_are_read_from_a_file(pair, photos, tmp_path):
    path = tmp_path / "labels.csv"
    path.write_text('hot_dog,"sausage, in a bun"\ncat,kitten\n')
    source = label_dataset_classes(pair, photos, None, EvaluateOptions(zero_shot=True, class_labels=str(path)))
    assert isinstance(source, WeightsSource) and source.class_names == CLASSES
    assert source.labels == ("kitten", "sausage, in a bun")
    with pytest.raises(DataError, match="has no label for dog"):
        read_class_labels(path, ["dog"])
    path.write_text("cat\n")
    with pytest.raises(DataError, match="line 1: 1 cells instead of 2"):
        read_class_labels(path, ["cat"])
    with pytest.raises(UsageError, match="calibrate"):
        label_dataset_classes(pair, photos, None, EvaluateOptions(zero_shot=True, calibrate=True))


def test_texts_are_embedded_and_an_index_is_searched(pair, photos, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    read_document(capsys, "embed", pair, "--texts", "a cat", "a dog", "--out", tmp_path / "texts.npz")
    stored, predictor = np.load(tmp_path / "texts.npz"), vitreous.load(pair, headless=True)
    assert np.allclose(stored["embeddings"], predictor.embed_texts(["a cat", "a dog"]), atol=1e-6)
    assert stored["paths"].tolist() == ["a cat", "a dog"]
    convert(pair, tmp_path / "copy")
    assert run_command("embed", tmp_path / "copy", "--search", "a cat") == 2
    assert "has no index of images" in capsys.readouterr().err
    read_document(capsys, "embed", tmp_path / "copy", photos, "--index", "--precision", "fp32")
    found = read_document(capsys, "embed", tmp_path / "copy", "--search", "a cat", "--count", "2")["images"]
    files = sorted((photos / "train").glob("*/*.png"))
    features = np.stack([vitreous.load(pair, headless=True, precision="fp32").embed(file) for file in files])
    cosines = features / np.linalg.norm(features, axis=1, keepdims=True) @ stored["embeddings"][0]
    assert [row["similarity"] for row in found] == pytest.approx(np.sort(cosines)[::-1][:2].tolist(), abs=2e-3)
    assert run_command("embed", pair, photos, "--texts", "a cat") == 2


def test_an_exported_classifier_equals_the_model(pair, photos, tmp_path):
    pytest.importorskip("onnxruntime")
    convert(WeightsSource(str(pair), labels=("cat", "dog")), tmp_path / "classifier")
    vitreous.export(tmp_path / "classifier", "onnx", tmp_path / "model.onnx", images=(str(photos / "test"),))
    path = photos / "test" / "cat" / "1.png"
    exported = vitreous.load(tmp_path / "model.onnx").predict(path)
    eager = vitreous.load(tmp_path / "classifier", precision="fp32").predict(path)
    assert exported.names == eager.names and exported.probabilities == pytest.approx(eager.probabilities, abs=1e-5)


def test_fine_tuning_keeps_the_head_for_as_many_classes(pair, tmp_path):
    convert(WeightsSource(str(pair), labels=("cat", "dog")), tmp_path / "classifier")
    model = load_bundle(tmp_path / "classifier").model
    options = TrainOptions(data="photos", init=str(tmp_path / "classifier"))
    assert adapt_pretrained_config(options, 2, model.config) == model.config
    assert adapt_pretrained_config(options, 3, model.config).head.kind == "linear"
    model.train()(torch.randn(2, 3, 16, 16)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
