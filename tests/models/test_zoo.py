"""Construction of models: models that do not fit into memory."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

import vitreous
from vitreous.errors import ResourceError
from vitreous.models import zoo
from vitreous.weights.adopt import open_weights


def test_models_that_do_not_fit_into_memory_are_refused_before_they_are_built(monkeypatch):
    monkeypatch.setattr(zoo, "get_free_memory", lambda device: 8 << 30)
    with pytest.raises(ResourceError, match=r"DINOv3-7B/16 has 6.7 billion parameters, which need 25 GiB.*8 GiB"):
        vitreous.create("DINOv3-7B/16")
    assert sum(p.numel() for p in zoo.build_without_init(vitreous.create("ViT-Ti/16").config).parameters()) > 5e6


def test_weights_that_do_not_fit_into_memory_are_refused_before_they_are_read(tmp_path, monkeypatch):
    model = vitreous.create("ViT-64x1/4", image_size=8)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    weights = open_weights(tmp_path / "model.safetensors")
    monkeypatch.setattr(zoo, "get_free_memory", lambda device: 1 << 10)
    monkeypatch.setattr(torch.nn.Module, "load_state_dict", None)
    with pytest.raises(ResourceError, match="billion parameters"):
        weights.build_bundle()
