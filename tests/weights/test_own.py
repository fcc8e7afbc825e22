"""Models of `vitreous.create` saved as a bare state dict, or as a bundle by `vitreous.save`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import vitreous
from tests.weights.test_roundtrip import MODELS, are_states_equal, build_random_model
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.errors import UsageError, WeightsError
from vitreous.models.config import ViTConfig
from vitreous.models.zoo import build_model
from vitreous.weights.adopt import load_pretrained_weights, open_weights

#: models whose options cannot be inferred from a state dict
AMBIGUOUS_MODELS = (
    "SAM",
    "SAM, everything global",
    "ViTDet",
    "ViTDet, everything global",
    "ViTDet, convolutions",
    "axial ResNet",
    "axial",
    "relative",
    "positions by axis",
    "positions by axis, added up",
    "positions in each block",
    *(name for name in MODELS if name.startswith(("VideoMAE", "DINOv3", "EVA-02", "Perception", "AIMv2", "ViT-5"))),
)
CLIP_SETTINGS = {"image": (4, 16, 32)}
#: model -> settings that are needed in addition to the number of heads
REQUIRED_SETTINGS = {
    "ViT, patches that are not square": {"image": (32, 16)},
    "ViT, oblong": {"image": (32, 48)},
    "video": {"image": (4, 32, 32)},
    "ViViT": CLIP_SETTINGS | {"arrangement": "joint"},
    "ViViT, no head": CLIP_SETTINGS | {"arrangement": "joint"},
    "ViViT, mean": CLIP_SETTINGS | {"arrangement": "joint"},
    "ViViT, factorised": CLIP_SETTINGS | {"arrangement": "factorised-dot-product"},
    "ViT, class token and mean of normed tokens": {"pool": "mean"},
    "ViT, class token normed alone": {"pool": "class"},
    "rotary": {"attention.kind": "rotary"},
    "sines": {"positions.kind": "sincos", "image": (32, 32)},
    "sines as big_vision has them": {"positions.kind": "sincos-big-vision", "image": (32, 32)},
    "DeiT, no head": {"pool": "distilled", "registers": 0},
    "CLIP, no projection": {"head.bias": False},
}


def save_state_dict(config, folder, suffix=".safetensors"):
    state = build_random_model(config).state_dict()
    path = folder / f"model{suffix}"
    (save_file if suffix == ".safetensors" else torch.save)(state, path)
    return path, state


@pytest.mark.parametrize("name", [name for name in MODELS if name not in AMBIGUOUS_MODELS])
def test_a_state_dict_restores_the_same_model(name, tmp_path):
    config = MODELS[name][0]
    path, state = save_state_dict(config, tmp_path)
    settings = REQUIRED_SETTINGS.get(name, {}) | (
        {"heads": config.heads} if isinstance(config, ViTConfig) else {"image": config.image}
    )
    weights = open_weights(path, settings)
    assert weights.config.structure() == config.structure()
    assert are_states_equal(weights.read_state(), state)
    assert len(weights.notes) == 1 and "vitreous.save keeps" in weights.notes[0]


@pytest.mark.parametrize("name", AMBIGUOUS_MODELS)
def test_ambiguous_state_dicts_are_rejected(name, tmp_path):
    path, _ = save_state_dict(MODELS[name][0], tmp_path)
    with pytest.raises(WeightsError, match=r"vitreous\.save\(model, FOLDER\)"):
        open_weights(path)


@pytest.mark.parametrize("name", ["sines", "video", "ViT, patches that are not square"])
def test_missing_settings_are_requested(name, tmp_path):
    path, _ = save_state_dict(MODELS[name][0], tmp_path)
    with pytest.raises(WeightsError, match=r"source_size|vitreous\.save"):
        open_weights(path)


def test_missing_and_unknown_tensors_are_rejected(tmp_path):
    path, state = save_state_dict(MODELS["ViT"][0], tmp_path)
    save_file(
        {key: tensor for key, tensor in state.items() if key != "encoder.blocks.1.mlp.norm.bias"}
        | {"extra": torch.ones(1)},
        path,
    )
    with pytest.raises(WeightsError, match=r"missing encoder.blocks.1.mlp.norm.bias\n    unknown extra"):
        open_weights(path)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_predict_evaluate_and_init_read_a_state_dict(suffix, tmp_path, monkeypatch):
    """Evaluates on the embedded digits, whose classes are 0 to 9."""
    monkeypatch.chdir(tmp_path)  # reports of bare weights are written to the working directory
    model = vitreous.create("ViT-64x1/4", image_size=8, num_classes=10, channels=1)
    torch.nn.init.normal_(model.head.weight)
    path = tmp_path / f"model{suffix}"
    (save_file if suffix == ".safetensors" else torch.save)(model.state_dict(), path)
    Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).save(tmp_path / "a.png")
    vitreous.save(model.eval(), tmp_path / "bundle")
    predictions = [
        vitreous.load(weights_path).predict([str(tmp_path / "a.png")], top=10)[0]
        for weights_path in (path, tmp_path / "bundle")
    ]
    assert predictions[0].names == predictions[1].names and predictions[0].probabilities == predictions[1].probabilities
    document = vitreous.evaluate(str(path), "digits")
    assert document["test"]["images"] > 0
    three_class_model = build_model(replace(model.config, classes=3))
    adoption = load_pretrained_weights(three_class_model, path)
    assert adoption.title == "a state dict of vitreous" and sorted(adoption.initialised) == ["head.bias", "head.weight"]
    assert torch.equal(three_class_model.projection.weight, model.projection.weight)


def test_save_stores_classes_and_preprocessing(tmp_path):
    model = vitreous.create("ViT-32x1/8", image_size=(32, 48), num_classes=2, channels=4, mlp={"gelu": "tanh"}).eval()
    assert vitreous.save(model, str(tmp_path / "a"), classes=["cat", "dog"]) == tmp_path / "a"
    weights = open_weights(tmp_path / "a")
    assert (weights.config, weights.classes) == (model.config, ("cat", "dog"))
    assert (weights.preprocess.image, weights.preprocess.channels, weights.preprocess.mean) == ((32, 48), 4, (0.5,) * 4)
    assert are_states_equal(weights.read_state(), model.state_dict())
    preprocess = ImagePreprocess((32, 48), channels=4, mean=(0.1,) * 4, std=(0.2,) * 4, fit="squash")
    vitreous.save(model, tmp_path / "b", preprocess=preprocess)
    weights = open_weights(tmp_path / "b")
    assert (weights.preprocess, weights.classes) == (preprocess, ("0", "1"))


@pytest.mark.parametrize(
    "options,message",
    [
        ({"classes": ["cat"]}, "1 names for a head of 2 classes"),
        ({"classes": ["cat", "cat"]}, "one distinct name for each class"),
        ({"classes": ["cat", ""]}, "names for a head"),
        (
            {"preprocess": ImagePreprocess((32, 32), channels=1, mean=(0.5,), std=(0.5,))},
            "outputs 1 channels, but the model needs 3",
        ),
    ],
)
def test_invalid_save_options_are_rejected_and_write_nothing(options, message, tmp_path):
    model = vitreous.create("ViT-32x1/8", image_size=32, num_classes=2)
    with pytest.raises(UsageError) as error:
        vitreous.save(model, tmp_path / "a", **options)
    assert message in str(error.value)
    assert not (tmp_path / "a").exists()


def test_save_rejects_existing_paths_and_other_modules(tmp_path):
    model = vitreous.create("ViT-32x1/8", image_size=32, num_classes=2)
    (tmp_path / "a").mkdir()
    with pytest.raises(UsageError, match="already exists"):
        vitreous.save(model, tmp_path / "a")
    with pytest.raises(UsageError, match=r"Linear is not a model of vitreous\.create"):
        vitreous.save(torch.nn.Linear(2, 2), tmp_path / "b")  # type: ignore[arg-type]
