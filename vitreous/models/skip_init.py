"""Models without weights: to be counted, or to be filled."""

from __future__ import annotations

import torch

from vitreous.models.config import ModelConfig
from vitreous.models.zoo import Model, build
from vitreous.nn.no_init import NoInitMode


def skip_init(config: ModelConfig) -> Model:
    """A model whose parameters have shapes and nothing else; `load_state_dict(…, assign=True)` gives it weights."""
    with torch.device("meta"), NoInitMode():
        return build(config)
