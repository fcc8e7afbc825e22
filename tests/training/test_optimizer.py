"""Rates, decay and directions of the optimisers, against PyTorch's and timm's."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.training.test_flat import make_batch, make_objective, train_flat
from vitreous.models.config import ViTConfig
from vitreous.training.flat import FlatParameters
from vitreous.training.groups import choose_group, learning_rate_factor
from vitreous.training.optimizer import FlatOptimizer
from vitreous.training.run import OptimizerConfig

CPU = torch.device("cpu")


def group_parameters(module, options):
    """The parameters in groups by `options`."""
    return FlatParameters(
        module, torch.float32, CPU, group_of=partial(choose_group, options, module.model.config, module)
    )


def train_with_flat(options, steps=4):
    """The weights after some steps."""
    module = make_objective()
    flat = group_parameters(module, options)
    train_flat(module, flat, FlatOptimizer(options, flat), steps, limit=None)
    return dict(module.named_parameters())


def train_with_pytorch(make, steps=4):
    """The same with an optimiser of PyTorch's kind."""
    module = copy.deepcopy(make_objective())
    optimizer = make(module)
    for _ in range(steps):
        optimizer.zero_grad()
        module(make_batch())["loss"].backward()
        optimizer.step()
    return dict(module.named_parameters())


def check_weights_match(found, expected, tolerance=1e-6):
    """But for biases of queries, keys and values: the gradient of a key's is zero but for rounding, which Adam makes a
    direction of."""
    assert set(found) == set(expected)
    for name, tensor in found.items():
        assert name.endswith("qkv.bias") or torch.allclose(tensor, expected[name], atol=tolerance), name


def test_the_papers_adam_decays_everything():
    options = OptimizerConfig("adamw", lr=1e-2, weight_decay=0.3, decay_on="all")
    check_weights_match(
        train_with_flat(options),
        train_with_pytorch(lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.3)),
    )


def test_lamb_is_timms():
    from timm.optim.lamb import Lamb

    options = OptimizerConfig("lamb", lr=1e-2, weight_decay=0.1, eps=1e-6, decay_on="all")
    check_weights_match(
        train_with_flat(options),
        train_with_pytorch(lambda m: Lamb(m.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-6, max_grad_norm=None)),
    )


def test_lamb_steps_as_far_as_a_parameter_is_large():
    """Without decay it is Adam; with it, a step has the learning rate times the parameter's norm."""
    plain = OptimizerConfig("lamb", lr=1e-3, weight_decay=0.0)
    check_weights_match(
        train_with_flat(plain, 1), train_with_pytorch(lambda m: torch.optim.Adam(m.parameters(), lr=1e-3), 1)
    )
    before, after = (
        dict(make_objective().named_parameters()),
        train_with_flat(OptimizerConfig("lamb", lr=1e-3, weight_decay=0.1), 1),
    )
    name = "model.head.weight"
    assert (after[name] - before[name]).norm().item() == pytest.approx(1e-3 * before[name].norm().item(), rel=1e-4)


class NaiveLars(torch.optim.Optimizer):
    """The loop of facebookresearch/mae's util/lars.py, parameter by parameter."""

    def step(self):  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for p in group["params"]:
                change = p.grad
                if p.ndim > 1:
                    change = change + group["decay"] * p.data
                    length, other = p.data.norm(), change.norm()
                    change = change * (0.001 * length / other if length > 0 and other > 0 else 1.0)
                moment = self.state[p].setdefault("mu", torch.zeros_like(p))
                moment.mul_(0.9).add_(change)
                p.data.add_(moment, alpha=-0.05)


@pytest.mark.parametrize(("decay", "steps"), [(0.0, 4), (0.1, 1)])
def test_lars_is_a_naive_loops(decay, steps):
    """But for tokens and positions, which have two axes and are not decayed here."""
    found = train_with_flat(OptimizerConfig("lars", lr=0.05, weight_decay=decay), steps)
    expected = train_with_pytorch(lambda m: NaiveLars(m.parameters(), {"decay": decay}), steps)
    free = ("model.prefix", "model.slots", "model.position.table") if decay else ()
    check_weights_match(
        *({name: tensor for name, tensor in one.items() if name not in free} for one in (found, expected))
    )
    head = "model.head.weight"
    assert not torch.equal(found[head], dict(make_objective().named_parameters())[head])


@pytest.mark.parametrize("name", ["adamw", "sgd", "lamb", "lars", "muon"])
def test_parameter_learning_rates_scale_the_update(name):
    options = OptimizerConfig(
        name, lr=1e-3, matrix_lr=1e-3, weight_decay=0.0, rates=(("projection", 0.2), ("qkv.weight", 0.5))
    )
    before = dict(make_objective().named_parameters())
    whole, own = train_with_flat(replace(options, rates=()), 1), train_with_flat(options, 1)
    for key in before:
        moved, expected = own[key] - before[key], whole[key] - before[key]
        share = 0.2 if "projection" in key else 0.5 if "qkv.weight" in key else 1.0
        assert torch.allclose(moved, share * expected, atol=1e-7), key


def test_layer_decay_decreases_from_the_head_to_the_patches():
    options = OptimizerConfig(layer_decay=0.5, rates=(("norm.bias", 3.0),))
    model = ViTConfig(image=(8, 8), patch=(4, 4), width=8, heads=2, depth=2)
    expected = {
        "model.head.weight": 1.0,
        "model.encoder.norm.weight": 1.0,
        "model.encoder.blocks.1.mlp.part.fc1.weight": 0.5,
        "model.encoder.blocks.0.mlp.part.fc1.weight": 0.25,
        "model.encoder.blocks.0.mlp.norm.bias": 0.75,
        "model.projection.weight": 0.125,
        "model.position.table": 0.125,
        "model.prefix": 0.125,
        "model.slots": 0.125,
    }
    assert {name: learning_rate_factor(options, model, make_objective(), name) for name in expected} == expected


def test_the_state_of_every_group_is_restored():
    options = OptimizerConfig("adamw", lr=1e-2, layer_decay=0.5)
    module = make_objective()
    flat = group_parameters(module, options)
    optimizers = FlatOptimizer(options, flat)
    train_flat(module, flat, optimizers, 2)
    assert len(flat.groups) > 4
    kept = {name: tensor.clone() for name, tensor in optimizers.get_state().items()}
    other = FlatOptimizer(options, flat)
    other.load(kept)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in other.get_state().items())
    assert all(float(count) == 2 for name, count in kept.items() if name.startswith("step/"))
