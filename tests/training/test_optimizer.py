"""Learning rates, weight decay and directions of the optimisers match PyTorch's and timm's."""

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
    """The parameters in the groups of `options`."""
    return FlatParameters(
        module, torch.float32, CPU, group_of=partial(choose_group, options, module.model.config, module)
    )


def train_with_flat(options, steps=4):
    """The weights after `steps` steps."""
    module = make_objective()
    flat = group_parameters(module, options)
    train_flat(module, flat, FlatOptimizer(options, flat), steps, limit=None)
    return dict(module.named_parameters())


def train_with_pytorch(make, steps=4):
    """The weights after the same steps of a PyTorch optimiser."""
    module = copy.deepcopy(make_objective())
    optimizer = make(module)
    for _ in range(steps):
        optimizer.zero_grad()
        module(make_batch())["loss"].backward()
        optimizer.step()
    return dict(module.named_parameters())


def check_weights_match(weights, expected, tolerance=1e-6):
    """Compare weights except qkv biases: a key bias has a zero gradient up to rounding, which Adam normalises to a full
    step."""
    assert set(weights) == set(expected)
    for name, tensor in weights.items():
        assert name.endswith("qkv.bias") or torch.allclose(tensor, expected[name], atol=tolerance), name


def test_the_papers_adam_decays_all_parameters():
    options = OptimizerConfig("adamw", lr=1e-2, weight_decay=0.3, decay_on="all")
    check_weights_match(
        train_with_flat(options),
        train_with_pytorch(lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.3)),
    )


def test_lamb_matches_timm():
    from timm.optim.lamb import Lamb

    options = OptimizerConfig("lamb", lr=1e-2, weight_decay=0.1, eps=1e-6, decay_on="all")
    check_weights_match(
        train_with_flat(options),
        train_with_pytorch(lambda m: Lamb(m.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-6, max_grad_norm=None)),
    )


def test_lamb_steps_are_proportional_to_the_parameter_norm():
    """Without decay LAMB is Adam; with decay, a step's norm is the learning rate times the parameter's norm."""
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
def test_lars_matches_a_naive_loop(decay, steps):
    """Except tokens and positions, which have two axes and are not decayed here."""
    weights = train_with_flat(OptimizerConfig("lars", lr=0.05, weight_decay=decay), steps)
    expected = train_with_pytorch(lambda m: NaiveLars(m.parameters(), {"decay": decay}), steps)
    free = ("model.prefix", "model.slots", "model.position.table") if decay else ()
    check_weights_match(
        *(
            {name: tensor for name, tensor in named_weights.items() if name not in free}
            for named_weights in (weights, expected)
        )
    )
    head = "model.head.weight"
    assert not torch.equal(weights[head], dict(make_objective().named_parameters())[head])


@pytest.mark.parametrize("name", ["adamw", "sgd", "lamb", "lars", "muon"])
def test_parameter_learning_rates_scale_the_update(name):
    options = OptimizerConfig(
        name, lr=1e-3, matrix_lr=1e-3, weight_decay=0.0, rates=(("projection", 0.2), ("qkv.weight", 0.5))
    )
    initial = dict(make_objective().named_parameters())
    unscaled, scaled = train_with_flat(replace(options, rates=()), 1), train_with_flat(options, 1)
    for key in initial:
        moved, expected = scaled[key] - initial[key], unscaled[key] - initial[key]
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
    saved = {name: tensor.clone() for name, tensor in optimizers.get_state().items()}
    restored = FlatOptimizer(options, flat)
    restored.load(saved)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in restored.get_state().items())
    assert all(float(count) == 2 for name, count in saved.items() if name.startswith("step/"))
