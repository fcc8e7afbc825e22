"""The contract of all models; add new models to `test_contracts.py`."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from vitreous.config import from_builtins, to_builtins


def randomise(model: nn.Module) -> nn.Module:
    """Randomise every parameter: zero-initialised heads and tokens hide mistakes."""
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2) if parameter.ndim > 1 else nn.init.uniform_(parameter, 0.5, 1.0)
    return model


def check_batch_independence(model, images):
    model.eval()
    together = model(images)
    alone = torch.cat([model(image[None]) for image in images])
    assert torch.allclose(together, alone, atol=1e-4)


def check_all_gradients(model, images):
    model.train()
    model(images).pow(2).sum().backward()
    silent = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert not silent, f"no gradient: {silent}"


def check_unused_parameters_are_frozen(model, images):
    """Every trainable parameter gets a gradient from the maps, or from a parameter that changes in the first step."""
    model.train()
    maps = model.features_at(images, model.config.strides)
    sum((x * torch.linspace(-1, 1, x.numel()).view_as(x).sin()).sum() for x in maps).backward()
    silent = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert not silent, f"no gradient: {silent}"
    model.zero_grad()
    model.eval()


def check_skipping_unused_tokens_is_exact(model, images):
    """`forward` skips unused tokens in the last block, `features` does not: outputs and gradients are equal."""
    model.eval()
    skipped, full = model(images), model.classify(model.pool(model.features(images)))
    assert torch.allclose(skipped, full, atol=1e-5 * full.abs().max().item())
    weights = torch.linspace(-1, 1, skipped.numel()).view_as(skipped)
    gradients = [torch.autograd.grad((logits * weights).sum(), [*model.parameters()]) for logits in (skipped, full)]
    for gradient, expected in zip(*gradients, strict=True):
        assert torch.allclose(gradient, expected, atol=1e-4 * expected.abs().max().item() + 1e-6)


def check_state_and_config_round_trip(model, images):
    model.eval()
    config = from_builtins(type(model.config), to_builtins(model.config))
    assert config == model.config
    again = type(model)(config).eval()
    again.load_state_dict(copy.deepcopy(model.state_dict()))
    assert torch.equal(again(images), model(images))


def check_other_image_sizes(model, larger, oblong):
    model.eval()
    for images in (larger, oblong):
        logits = model(images)
        assert logits.shape == (len(images), model.config.classes)
        assert torch.isfinite(logits).all()


def check_feature_maps_match_config(model, images):
    """`features_at` returns every map of the config, in any order, per image; other strides are rejected."""
    model.eval()
    config, size = model.config, images.shape[2:]
    maps = model.features_at(images, config.strides)
    for level, x in zip(config.levels, maps, strict=True):
        grid = (math.ceil(side / p) for side, p in zip(size, level.patch, strict=True))
        assert x.shape == (len(images), *grid, level.width)
        assert torch.allclose(model.features_at(images[:1], [level.stride])[0], x[:1], atol=1e-4 * x.abs().max().item())
    for x, again in zip(maps[::-1], model.features_at(images, config.strides[::-1]), strict=True):
        assert torch.equal(x, again)
    for strides in ([], [config.strides[0], 1000]):
        with pytest.raises(ValueError, match="strides"):
            model.features_at(images, strides)


def check_export_matches(model, images):
    model.eval()
    exported = torch.export.export(model, (images,)).module()
    assert torch.allclose(exported(images), model(images), atol=1e-5)


ALL_CONTRACTS = [
    check_batch_independence,
    check_all_gradients,
    check_skipping_unused_tokens_is_exact,
    check_state_and_config_round_trip,
    check_feature_maps_match_config,
    check_export_matches,
]
