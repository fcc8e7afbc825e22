"""Bundles: round trips, invalid descriptions, damaged files, and saves that are killed."""

import json
import os
from dataclasses import replace

import numpy as np
import pytest
import torch

import vitreous
from tests.killing import run_and_kill
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.errors import UsageError, VitreousError, WeightsError
from vitreous.models.zoo import create_untrained_model
from vitreous.tasks.classification import Classification
from vitreous.tasks.features import FeatureExtraction
from vitreous.weights.adopt import load_pretrained_weights, open_weights
from vitreous.weights.bundle import Bundle, load_bundle


@pytest.fixture
def bundle(tmp_path):
    model = create_untrained_model("ViT-mu/8", 16, 3, registers=1)
    torch.nn.init.normal_(model.head.weight)
    saved_bundle = Bundle(
        model, Classification(("ant", "bee", "cat")), ImagePreprocess((16, 16), fit="squash"), {"data": "photos"}
    )
    saved_bundle.save(tmp_path / "model")
    return saved_bundle


def test_a_bundle_survives_a_round_trip(bundle, tmp_path):
    reloaded = load_bundle(tmp_path / "model")
    images = torch.randn(2, 3, 16, 16)
    assert torch.equal(reloaded.model(images), bundle.model.eval()(images))
    assert (reloaded.classes, reloaded.preprocess, reloaded.provenance) == (
        bundle.classes,
        bundle.preprocess,
        bundle.provenance,
    )
    assert all(p.requires_grad for p in reloaded.model.parameters())
    reloaded.save(tmp_path / "again")
    for name in ("weights.safetensors", "model.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "model" / name).read_bytes()


def test_loss_and_multilabel_are_stored_and_default_to_softmax(bundle, tmp_path):
    replace(bundle, task=Classification(bundle.classes, True, "sigmoid")).save(tmp_path / "several")
    reloaded = open_weights(tmp_path / "several").build_bundle()
    assert (reloaded.classification.loss, reloaded.classification.multilabel) == ("sigmoid", True)
    path = tmp_path / "model" / "model.json"
    old = json.loads(path.read_text())
    del old["loss"], old["multilabel"]
    path.write_text(json.dumps(old))
    assert (
        load_bundle(tmp_path / "model").classification.loss,
        load_bundle(tmp_path / "model").classification.multilabel,
    ) == ("softmax", False)


def test_a_single_flipped_bit_is_noticed(bundle, tmp_path):
    path = tmp_path / "model" / "weights.safetensors"
    content = bytearray(path.read_bytes())
    content[-7] ^= 1
    path.write_bytes(content)
    with pytest.raises(WeightsError, match="is missing or was modified after it was saved"):
        load_bundle(tmp_path / "model")


@pytest.mark.parametrize(
    "change,message",
    [
        ({"format": 99}, "format 99"),
        ({"architecture": {"width": 32, "widht": 3}}, "unknown setting widht"),
        ({"architecture": {"width": "wide"}}, "width"),
        ({"preprocess": {"image": [16, 16], "fit": "stretch"}}, "fit"),
        ({"loss": "hinge"}, "loss must be softmax or sigmoid or binary"),
        ({"multilabel": "yes"}, "multilabel yes"),
        ({"temperature": 0}, "temperature 0"),
        ({"classes": "ant"}, r"classes ant\s+classes must be a list of names"),
        (
            {"task": {"name": "captions"}},
            r"task captions is not one of classification, features, segmentation, detection, generation, regression\s+install a newer",
        ),
        (
            {"task": {"name": "generation"}, "process": {"name": "melting"}},
            "process .*melting.* not one of diffusion, flow",
        ),
        ({"task": "features"}, "task None"),
        ({"architecture": {"_target_": "os.system"}}, "unknown setting _target_"),
    ],
)
def test_invalid_descriptions_are_rejected(bundle, tmp_path, change, message):
    path = tmp_path / "model" / "model.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(VitreousError, match=message):
        load_bundle(tmp_path / "model")


def test_a_folder_without_a_bundle_is_rejected(tmp_path):
    with pytest.raises(WeightsError, match="not a model bundle"):
        load_bundle(tmp_path)


def test_weights_of_another_architecture_are_listed(bundle, tmp_path):
    with pytest.raises(WeightsError, match=r"encoder.blocks.0.mlp.part.fc1.bias has shape \(128,\), not \(64,\)"):
        load_pretrained_weights(
            create_untrained_model("ViT-mu/8", 16, 3, registers=1, mlp={"hidden": 64}), tmp_path / "model"
        )


def test_a_class_position_is_folded_or_left_at_zero(bundle, tmp_path):
    images = torch.randn(2, 3, 16, 16)
    expected = bundle.model.eval()(images)
    folded = create_untrained_model("ViT-mu/8", 16, 3, registers=1, positions={"slots": 0})
    load_pretrained_weights(folded, tmp_path / "model")
    assert torch.allclose(folded.eval()(images), expected, atol=1e-5)


def read_contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_killed_save_leaves_a_complete_bundle_or_none(bundle, tmp_path):
    home = tmp_path / "home"
    points = run_and_kill(home, lambda: bundle.save(home / "model"))
    assert points >= 7
    for kill_point in range(1, points + 1):
        home = tmp_path / str(kill_point)
        home.mkdir()
        run_and_kill(home, lambda home=home: bundle.save(home / "model"), kill_point)
        assert not (home / "model").exists() or read_contents(home / "model") == read_contents(tmp_path / "model")
        bundle.save(home / "model")
        assert os.listdir(home) == ["model"] and read_contents(home / "model") == read_contents(tmp_path / "model")


def test_a_killed_overwrite_leaves_a_valid_or_a_rejected_bundle(bundle, tmp_path):
    """A save replaces two files.

    Between the renames the bundle is rejected, and the next save repairs it.
    """
    path, old = tmp_path / "model", read_contents(tmp_path / "model")
    new_bundle = replace(bundle, model=create_untrained_model("ViT-mu/8", 16, 3, registers=1))
    new_bundle.save(tmp_path / "other")
    new, rejected = read_contents(tmp_path / "other"), 0
    (tmp_path / "count").mkdir()
    bundle.save(tmp_path / "count")
    points = run_and_kill(tmp_path / "count", lambda: new_bundle.save(tmp_path / "count"))
    for kill_point in range(1, points + 1):
        run_and_kill(path, lambda: new_bundle.save(path), kill_point)
        current = read_contents(path)
        bundle_files = {name: current[name] for name in old}
        if bundle_files not in (old, new):
            rejected += 1
            with pytest.raises(WeightsError, match="is missing or was modified after it was saved"):
                load_bundle(path)
        bundle.save(path)
        assert read_contents(path) == old
    assert rejected <= 4, "only two syncs, a removal and a rename are between the replacements"


def test_classification_bundles_are_compatible_with_older_readers(bundle, tmp_path):
    replace(bundle, task=Classification(bundle.classes, True, "binary", 1.5)).save(tmp_path / "b")
    description = json.loads((tmp_path / "b" / "model.json").read_text())
    assert description["task"] == {"name": "classification"} and description["format"] == 1
    assert [description[key] for key in ("classes", "loss", "multilabel", "temperature")] == [
        ["ant", "bee", "cat"],
        "binary",
        True,
        1.5,
    ]
    del description["task"]
    (tmp_path / "b" / "model.json").write_text(json.dumps(description))
    assert load_bundle(tmp_path / "b").task == Classification(("ant", "bee", "cat"), True, "binary", 1.5)


def test_feature_bundles_embed_and_do_not_predict(tmp_path):
    model = create_untrained_model("ViT-mu/8", 16, 0).eval()
    Bundle(model, FeatureExtraction(), ImagePreprocess((16, 16))).save(tmp_path / "model")
    assert json.loads((tmp_path / "model" / "model.json").read_text())["task"] == {"name": "features"}
    reloaded = load_bundle(tmp_path / "model")
    assert (
        reloaded.task == FeatureExtraction()
        and reloaded.classes == ()
        and open_weights(tmp_path / "model").build_bundle().task == FeatureExtraction()
    )
    pixels = np.zeros((16, 16, 3), np.uint8)
    with pytest.raises(UsageError, match=r"features, not classes\s+use `vitreous embed`"):
        vitreous.load(tmp_path / "model")
    predictor = vitreous.load(tmp_path / "model", precision="fp32", headless=True)
    with torch.inference_mode():
        expected = model(reloaded.preprocess.normalise(torch.zeros(1, 3, 16, 16, dtype=torch.uint8)))[0]
    assert np.allclose(predictor.embed(pixels), expected.numpy(), atol=1e-5)
    with pytest.raises(UsageError, match=r"ViT-mu/8 .*features, not classes.*\n?.*vitreous embed"):
        predictor.predict(pixels)


def test_older_bundles_without_classes_are_feature_bundles(tmp_path):
    Bundle(create_untrained_model("ViT-mu/8", 16, 0), FeatureExtraction(), ImagePreprocess((16, 16))).save(
        tmp_path / "model"
    )
    path = tmp_path / "model" / "model.json"
    description = json.loads(path.read_text())
    del description["task"]
    path.write_text(json.dumps(description | {"loss": "softmax", "multilabel": False, "temperature": 1.0}))
    assert load_bundle(tmp_path / "model").task == FeatureExtraction()
