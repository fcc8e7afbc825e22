"""What a run says of its exports before it trains."""

from __future__ import annotations

import vitreous
from vitreous.models.names import configure
from vitreous.progress import NullListener
from vitreous.weights.table import Format
from vitreous.weights.writable import writable_formats


class Heard(NullListener):
    """Keeps the notes of a run."""

    def __init__(self):
        self.notes = []

    def note(self, text):
        self.notes.append(text)


def test_a_run_says_at_its_start_what_its_weights_can_be_written_as(tmp_path):
    heard = Heard()
    vitreous.train("digits", heard, model="ViT-16x1/4", steps=1, out=str(tmp_path / "run"))
    told = [number for number, text in enumerate(heard.notes) if "can be written as bundle" in text]
    assert len(told) == 1
    assert "huggingface" in heard.notes[told[0]] and "timm" in heard.notes[told[0]]


def test_what_can_be_written_is_found_without_operations_on_meta_tensors(monkeypatch):
    """They import PyTorch's compiler, seconds at the start of every run."""
    devices, write = set(), Format.write

    def recorded(form, config, state):
        devices.update(tensor.device.type for tensor in state.values())
        return write(form, config, state)

    monkeypatch.setattr(Format, "write", recorded)
    assert "timm" in writable_formats(configure("ViT-Ti/16")) and devices == {"cpu"}
