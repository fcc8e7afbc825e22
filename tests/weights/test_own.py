"""Models of `vitreous.create` as people save them: as a bare state dict, and as a bundle by `vitreous.save`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import vitreous
from tests.weights.test_roundtrip import MODELS, fresh, same
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.errors import UsageError, WeightsError
from vitreous.models.config import ViTConfig
from vitreous.models.zoo import build_model
from vitreous.weights.adopt import load_pretrained_weights, open_weights

#: models whose options a state dict does not describe
REFUSED = (
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
    *(name for name in MODELS if name.startswith("VideoMAE")),
)
CLIPS = {"image": (4, 16, 32)}
#: those that need to be told more than the heads
TOLD = {
    "ViT, patches that are not square": {"image": (32, 16)},
    "ViT, oblong": {"image": (32, 48)},
    "video": {"image": (4, 32, 32)},
    "ViViT": CLIPS | {"arrangement": "joint"},
    "ViViT, no head": CLIPS | {"arrangement": "joint"},
    "ViViT, mean": CLIPS | {"arrangement": "joint"},
    "ViViT, factorised": CLIPS | {"arrangement": "factorised-dot-product"},
    "ViT, mean of normed tokens beside a class token": {"pool": "mean"},
    "ViT, class token normed alone": {"pool": "class"},
    "rotary": {"attention.kind": "rotary"},
    "sines": {"positions.kind": "sincos", "image": (32, 32)},
    "sines as big_vision has them": {"positions.kind": "sincos-big-vision", "image": (32, 32)},
    "DeiT, no head": {"pool": "distilled", "registers": 0},
    "CLIP, no projection": {"head.bias": False},
}


def stored(config, folder, suffix=".safetensors"):
    state = fresh(config).state_dict()
    path = folder / f"model{suffix}"
    (save_file if suffix == ".safetensors" else torch.save)(state, path)
    return path, state


@pytest.mark.parametrize("name", [name for name in MODELS if name not in REFUSED])
def test_a_state_dict_is_the_model_that_it_was(name, tmp_path):
    config = MODELS[name][0]
    path, state = stored(config, tmp_path)
    settings = TOLD.get(name, {}) | (
        {"heads": config.heads} if isinstance(config, ViTConfig) else {"image": config.image}
    )
    weights = open_weights(path, settings)
    assert weights.config.structure() == config.structure()
    assert same(weights.read_state(), state)
    assert len(weights.notes) == 1 and "vitreous.save keeps" in weights.notes[0]


@pytest.mark.parametrize("name", REFUSED)
def test_a_state_dict_that_does_not_tell_how_it_computes_is_refused(name, tmp_path):
    path, _ = stored(MODELS[name][0], tmp_path)
    with pytest.raises(WeightsError, match=r"vitreous\.save\(model, FOLDER\)"):
        open_weights(path)


@pytest.mark.parametrize("name", ["sines", "video", "ViT, patches that are not square"])
def test_what_has_to_be_told_is_asked_for(name, tmp_path):
    path, _ = stored(MODELS[name][0], tmp_path)
    with pytest.raises(WeightsError, match=r"source_size|vitreous\.save"):
        open_weights(path)


def test_a_file_without_a_tensor_or_with_one_more_is_refused(tmp_path):
    path, state = stored(MODELS["ViT"][0], tmp_path)
    save_file(
        {key: one for key, one in state.items() if key != "encoder.blocks.1.mlp.norm.bias"} | {"extra": torch.ones(1)},
        path,
    )
    with pytest.raises(WeightsError, match=r"missing encoder.blocks.1.mlp.norm.bias\n    unknown extra"):
        open_weights(path)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_predict_evaluate_and_init_read_a_state_dict(suffix, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where the page of weights that are no run goes
    """On the embedded digits, whose classes are 0 to 9."""
    model = vitreous.create("ViT-64x1/4", image_size=8, num_classes=10, channels=1)
    torch.nn.init.normal_(model.head.weight)
    path = tmp_path / f"model{suffix}"
    (save_file if suffix == ".safetensors" else torch.save)(model.state_dict(), path)
    Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).save(tmp_path / "a.png")
    vitreous.save(model.eval(), tmp_path / "bundle")
    answers = [vitreous.load(one).predict([str(tmp_path / "a.png")], top=10)[0] for one in (path, tmp_path / "bundle")]
    assert answers[0].names == answers[1].names and answers[0].probabilities == answers[1].probabilities
    document = vitreous.evaluate(str(path), "digits")
    assert document["test"]["images"] > 0
    other = build_model(replace(model.config, classes=3))
    adoption = load_pretrained_weights(other, path)
    assert adoption.title == "a state dict of vitreous" and sorted(adoption.initialised) == ["head.bias", "head.weight"]
    assert torch.equal(other.projection.weight, model.projection.weight)


def test_a_model_is_saved_with_what_belongs_to_it(tmp_path):
    model = vitreous.create("ViT-32x1/8", image_size=(32, 48), num_classes=2, channels=4, mlp={"gelu": "tanh"}).eval()
    assert vitreous.save(model, str(tmp_path / "a"), classes=["cat", "dog"]) == tmp_path / "a"
    weights = open_weights(tmp_path / "a")
    assert (weights.config, weights.classes) == (model.config, ("cat", "dog"))
    assert (weights.preprocess.image, weights.preprocess.channels, weights.preprocess.mean) == ((32, 48), 4, (0.5,) * 4)
    assert same(weights.read_state(), model.state_dict())
    mine = ImagePreprocess((32, 48), channels=4, mean=(0.1,) * 4, std=(0.2,) * 4, fit="squash")
    vitreous.save(model, tmp_path / "b", preprocess=mine)
    weights = open_weights(tmp_path / "b")
    assert (weights.preprocess, weights.classes) == (mine, ("0", "1"))


@pytest.mark.parametrize(
    "options,message",
    [
        ({"classes": ["cat"]}, "1 names for a head of 2 classes"),
        ({"classes": ["cat", "cat"]}, "all different"),
        ({"classes": ["cat", ""]}, "names for a head"),
        (
            {"preprocess": ImagePreprocess((32, 32), channels=1, mean=(0.5,), std=(0.5,))},
            "outputs 1 channels, but the model needs 3",
        ),
    ],
)
def test_what_cannot_belong_to_a_model_is_refused_and_nothing_is_written(options, message, tmp_path):
    model = vitreous.create("ViT-32x1/8", image_size=32, num_classes=2)
    with pytest.raises(UsageError) as caught:
        vitreous.save(model, tmp_path / "a", **options)
    assert message in str(caught.value)
    assert not (tmp_path / "a").exists()


def test_the_guide_runs_as_it_stands(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "using.md").read_text("utf-8")
    block = page.partition("## A model trained in Python")[2].partition("```python\n")[2].partition("```")[0]
    assert "vitreous.save(" in block and "state_dict()" in block
    monkeypatch.chdir(tmp_path)
    exec(block, {"__name__": "__main__"})


def test_nothing_is_overwritten_and_other_modules_are_named(tmp_path):
    model = vitreous.create("ViT-32x1/8", image_size=32, num_classes=2)
    (tmp_path / "a").mkdir()
    with pytest.raises(UsageError, match="already exists"):
        vitreous.save(model, tmp_path / "a")
    with pytest.raises(UsageError, match=r"Linear is not a model of vitreous\.create"):
        vitreous.save(torch.nn.Linear(2, 2), tmp_path / "b")  # type: ignore[arg-type]
