"""The export formats that a run lists before training."""

from __future__ import annotations

from vitreous.models.names import config_from_name
from vitreous.weights.table import WeightsFormat
from vitreous.weights.writable import list_writable_formats


def test_writable_formats_are_listed_without_meta_tensors(monkeypatch):
    """Meta tensors import PyTorch's compiler, which takes seconds at the start of every run."""
    devices, write = set(), WeightsFormat.to_foreign_tensors

    def recorded(form, config, state):
        devices.update(tensor.device.type for tensor in state.values())
        return write(form, config, state)

    monkeypatch.setattr(WeightsFormat, "to_foreign_tensors", recorded)
    assert "timm" in list_writable_formats(config_from_name("ViT-Ti/16")) and devices == {"cpu"}
