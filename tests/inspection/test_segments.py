"""DINO's map against its published rule and against its definition."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.inspection.made import draw_probabilities
from vitreous.errors import UsageError
from vitreous.inspection.attention import threshold_attention_mass


def threshold_mass_by_sorting(weights, mass):
    """One row: ascending order, running sums of the normalised weights, those above one minus the mass."""
    ordered, places = (weights.double() / weights.double().sum()).sort()
    kept = torch.zeros(len(weights), dtype=torch.bool)
    kept[places[ordered.cumsum(0) > 1 - mass]] = True
    return kept


@pytest.mark.parametrize("mass", [0.1, 0.6, 0.95])
def test_attention_mass_threshold_matches_the_published_rule(mass):
    maps = draw_probabilities(3, 4, 25) * 0.7  # a part of the attention is elsewhere
    found = threshold_attention_mass(maps, mass)
    for image, head in itertools.product(range(3), range(4)):
        assert torch.equal(found[image, head], threshold_mass_by_sorting(maps[image, head], mass))


def test_no_fewer_patches_would_do():
    maps = draw_probabilities(1, 1, 8, seed=3)[0, 0]
    found = threshold_attention_mass(maps, 0.6)
    fewest = next(
        k
        for k in range(9)
        if max(maps[list(some)].sum() for some in itertools.combinations(range(8), k)) >= 0.6 * maps.sum()
    )
    assert found.sum() == fewest and maps[found].sum() >= 0.6 * maps.sum()


def test_mass_threshold_of_even_and_empty_maps():
    assert threshold_attention_mass(torch.full((10,), 0.1), 0.6).sum() == 6
    assert threshold_attention_mass(torch.tensor([0.0, 0.5, 0.5]), 1.0).tolist() == [False, True, True]
    assert not threshold_attention_mass(torch.zeros(4)).any()
    for wrong in (0, -1, 1.1):
        with pytest.raises(UsageError, match="mass"):
            threshold_attention_mass(torch.ones(4), wrong)
