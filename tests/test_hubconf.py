"""`torch.hub.load` of a checkout: models by name, published weights, and everything that `vitreous.load` opens."""

import runpy
from pathlib import Path

import torch

import vitreous
from tests.weights.test_published import make_tiny_entry
from vitreous.weights import published

ROOT = str(Path(__file__).parents[1])


def test_models_are_created_by_name():
    model = torch.hub.load(ROOT, "create", "ViT-32x2/8", source="local", image_size=32, num_classes=3)
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 3)
    untrained = torch.hub.load(ROOT, "deit_ti16", source="local", pretrained=False)
    assert untrained.config == vitreous.create("ViT-Ti/16", image_size=224).config


def test_weights_are_loaded_by_name(tmp_path, monkeypatch):
    entries = runpy.run_path(f"{ROOT}/hubconf.py")
    assert {"create", "load", "dinov2_s14", "vit_b16_augreg", "clip_b16"} <= set(entries)
    assert "81.1% top-1 of a linear probe" in entries["dinov2_s14"].__doc__
    model = vitreous.create("ViT-32x2/8", image_size=32, num_classes=0)
    vitreous.save(model, tmp_path / "bundle")
    vitreous.export(tmp_path / "bundle", to="timm", out=tmp_path / "host.invalid" / "tiny.safetensors")
    monkeypatch.setattr(
        published, "PUBLISHED_BY_NAME", {"deit-ti16": make_tiny_entry("https://host.invalid/tiny.safetensors")}
    )
    monkeypatch.setenv("VITREOUS_MIRROR", str(tmp_path))
    state = torch.hub.load(ROOT, "deit_ti16", source="local").state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    again = torch.hub.load(ROOT, "load", str(tmp_path / "bundle"), source="local").state_dict()
    assert all(torch.equal(again[name], state[name]) for name in state)
