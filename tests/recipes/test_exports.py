"""What a run says of its exports before it trains."""

from __future__ import annotations

import vitreous
from vitreous.training.session import Silent


class Heard(Silent):
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
