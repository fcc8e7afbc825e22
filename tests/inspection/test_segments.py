"""DINO's attention mass threshold matches its published rule and its definition."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.inspection.small_models import draw_probabilities
from vitreous.errors import UsageError
from vitreous.inspection.attention import threshold_attention_mass


def threshold_mass_by_sorting(weights, mass):
    """One map: sort ascending, accumulate the normalised weights, keep those above one minus the mass."""
    ordered, order = (weights.double() / weights.double().sum()).sort()
    mask = torch.zeros(len(weights), dtype=torch.bool)
    mask[order[ordered.cumsum(0) > 1 - mass]] = True
    return mask


@pytest.mark.parametrize("mass", [0.1, 0.6, 0.95])
def test_attention_mass_threshold_matches_the_published_rule(mass):
    maps = draw_probabilities(3, 4, 25) * 0.7  # the remaining attention is on other tokens
    mask = threshold_attention_mass(maps, mass)
    for image, head in itertools.product(range(3), range(4)):
        assert torch.equal(mask[image, head], threshold_mass_by_sorting(maps[image, head], mass))


def test_mass_threshold_keeps_the_fewest_patches():
    maps = draw_probabilities(1, 1, 8, seed=3)[0, 0]
    mask = threshold_attention_mass(maps, 0.6)
    fewest = next(
        k
        for k in range(9)
        if max(maps[list(subset)].sum() for subset in itertools.combinations(range(8), k)) >= 0.6 * maps.sum()
    )
    assert mask.sum() == fewest and maps[mask].sum() >= 0.6 * maps.sum()


def test_mass_threshold_of_even_and_empty_maps():
    assert threshold_attention_mass(torch.full((10,), 0.1), 0.6).sum() == 6
    assert threshold_attention_mass(torch.tensor([0.0, 0.5, 0.5]), 1.0).tolist() == [False, True, True]
    assert not threshold_attention_mass(torch.zeros(4)).any()
    for wrong in (0, -1, 1.1):
        with pytest.raises(UsageError, match="mass"):
            threshold_attention_mass(torch.ones(4), wrong)
