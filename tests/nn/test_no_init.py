"""Modules without initialised weights."""

from __future__ import annotations

import torch
from torch import nn

from vitreous.nn.no_init import NoInitMode


def test_truncated_sampling_ends_without_initialisation():
    with NoInitMode():
        for low, high in ((-2.0, 2.0), (1.9, 2.1)):  # PyTorch samples the two ranges by different loops
            assert not nn.init.trunc_normal_(torch.full((4,), 9.0), a=low, b=high).any()
        layer = nn.Linear(2, 2)
    assert layer.weight.shape == (2, 2)
