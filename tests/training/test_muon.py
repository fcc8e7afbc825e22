from __future__ import annotations

import pytest
import torch
from torch import nn

from vitreous.training.muon import Muon, alike, orthogonal

SHAPES = [(48, 16), (16, 16), (16, 40), (48, 16), (16, 16)]


@pytest.mark.parametrize("dtype, limit", [(torch.bfloat16, 1e-6), (torch.float32, 0.1)])
def test_it_steps_as_torchs_does(dtype, limit):
    """In bfloat16 exactly; in float32 up to the rounding that the iteration blows up."""
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    start = [p.detach().clone() for p in ours]
    steppers = Muon(ours, 0.02, 0.05, dtype=dtype), torch.optim.Muon(theirs, lr=0.02, weight_decay=0.05, momentum=0.95)
    for _ in range(4):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        for stepper in steppers:
            stepper.step()
    for a, b, c in zip(ours, theirs, start, strict=True):
        assert (a - b).norm() < limit * (b - c).norm()


def test_singular_values_come_near_one():
    found = orthogonal(torch.randn(3, 20, 64), torch.float32)
    values = torch.linalg.svdvals(found)
    assert values.min() > 0.5 and values.max() < 1.3


def test_matrices_go_together_by_shape_and_within_the_limit(monkeypatch):
    monkeypatch.setattr("vitreous.training.muon.TOGETHER", 600)
    groups = list(alike([nn.Parameter(torch.zeros(shape)) for shape in SHAPES]))
    assert [(tuple(g[0].shape), len(g)) for g in groups] == [((48, 16), 1), ((48, 16), 1), ((16, 16), 2), ((16, 40), 1)]


def test_a_matrix_without_a_gradient_stays():
    still = nn.Parameter(torch.ones(4, 4))
    Muon([still], 0.1).step()
    assert torch.equal(still, torch.ones(4, 4))
