"""Batch norm on a batch with one value per channel."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from vitreous.nn.adapter import Float32BatchNorm, allow_single_value_batch_norm


def test_single_value_uses_running_statistics_without_updating_them():
    plain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).train()
    module = copy.deepcopy(plain)
    allow_single_value_batch_norm(module)
    batch, single = torch.randn(8, 3), torch.randn(1, 3)
    assert torch.equal(module(batch), plain(batch))
    with pytest.raises(ValueError, match="more than 1 value"):
        plain(single)
    state = copy.deepcopy(module.state_dict())
    output = module(single)
    assert module.training and module[1].training
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
    assert torch.equal(output, plain.eval()(single))
    assert torch.equal(copy.deepcopy(module)(batch), module(batch))


def test_training_mode_is_restored_after_an_error():
    norm = nn.BatchNorm1d(4)
    allow_single_value_batch_norm(norm)
    with pytest.raises(RuntimeError):
        norm(torch.zeros(1, 5))
    assert norm.training


def test_the_adapters_norm_takes_a_single_value():
    norm = Float32BatchNorm(4).train()
    assert torch.allclose(norm(torch.ones(1, 4, 1, 1)), torch.ones(1, 4, 1, 1), atol=1e-4)
    assert norm(torch.randn(2, 4, 1, 1)).std() > 0
