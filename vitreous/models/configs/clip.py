"""CLIP's image encoder (arXiv:2103.00020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vitreous.models.configs.vit import ViTConfig


@dataclass(frozen=True)
class CLIPConfig(ViTConfig):
    """A ViT with a LayerNorm before the first block."""

    family: Literal["clip"] = "clip"  # pyright: ignore[reportIncompatibleVariableOverride]
    first_norm = True
