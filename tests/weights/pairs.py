"""Small image encoders with text encoders and tokenizers, as bundles with random weights."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.data.test_tokenizer import save_clip_tokenizer, save_siglip_tokenizer
from vitreous.models.names import config_from_name
from vitreous.models.zoo import build_model
from vitreous.weights.bundle import save

SMALL_IMAGE = {"image": (16, 16), "patch": (4, 4), "width": 24, "depth": 2, "heads": 3, "mlp": {"hidden": 48}}
SMALL_TEXT = {"length": 40, "width": 20, "depth": 1, "heads": 2, "hidden": 40}


def save_pair(folder: Path, kind: str = "siglip") -> Path:
    """Save a small CLIP or SigLIP with random weights and a tokenizer as a bundle; return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "clip":
        path, count = save_clip_tokenizer(folder)
        text = SMALL_TEXT | {"vocabulary": count, "end_id": count - 1, "embedding": 12, "width": 20}
        config = config_from_name("CLIP-B/32-text").with_options(backbone=SMALL_IMAGE | {"classes": 12}, text=text)
    else:
        path, count = save_siglip_tokenizer(folder)
        text = SMALL_TEXT | {"vocabulary": count, "embedding": 24}
        config = config_from_name("SigLIP-B/16-text").with_options(backbone=SMALL_IMAGE, text=text)
    torch.manual_seed(0)
    model = build_model(config)
    for parameter in model.parameters():
        if parameter.ndim:
            torch.nn.init.normal_(parameter, std=0.3)
    return save(model.eval(), folder / "pair", tokenizer=path)
