from __future__ import annotations

import pytest
import torch
from torch import nn

from vitreous.training.muon import alike, muon, orthogonal

SHAPES = [(48, 16), (16, 16), (16, 40), (48, 16), (16, 16)]


@pytest.mark.parametrize("dtype, limit", [(torch.bfloat16, 1e-6), (torch.float32, 0.1)])
def test_it_steps_as_torchs_does(dtype, limit):
    """In bfloat16 exactly; in float32 up to the rounding that the iteration blows up."""
    torch.manual_seed(0)
    ours = [torch.randn(shape) for shape in SHAPES]
    theirs = [nn.Parameter(p.clone()) for p in ours]
    start, momenta = [p.clone() for p in ours], [torch.zeros_like(p) for p in ours]
    stepper = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.05, momentum=0.95)
    for _ in range(4):
        grads = [torch.randn_like(p) for p in ours]
        for p, grad in zip(theirs, grads, strict=True):
            p.grad = grad.clone()
        muon(ours, grads, momenta, lr=0.02, weight_decay=0.05, momentum=0.95, dtype=dtype)
        stepper.step()
    for a, b, c in zip(ours, theirs, start, strict=True):
        assert (a - b).norm() < limit * (b - c).norm()


def test_singular_values_come_near_one():
    found = orthogonal(torch.randn(3, 20, 64), torch.float32)
    values = torch.linalg.svdvals(found)
    assert values.min() > 0.5 and values.max() < 1.3


def test_matrices_go_together_by_shape_and_within_the_limit(monkeypatch):
    monkeypatch.setattr("vitreous.training.muon.TOGETHER", 600)
    assert list(alike([torch.zeros(shape) for shape in SHAPES])) == [[0], [3], [1, 4], [2]]
