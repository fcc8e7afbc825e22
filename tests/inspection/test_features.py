from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA

from tests.contracts import randomise
from vitreous.inspection.features import (
    build_border_mask,
    colour_patch_tokens,
    extract_patch_tokens,
    extract_pooled_features,
)
from vitreous.models.zoo import create_untrained_model


def make_scene_tokens(batch=3, side=8):
    """Tokens of two groups: a central square and its surroundings, each one direction plus noise."""
    generator = torch.Generator().manual_seed(0)
    maps = 0.1 * torch.randn(batch, side, side, 12, generator=generator)
    maps[:, 2:6, 3:7, 0] += 4
    maps[:, 2:6, 3:7] += torch.randn(batch, 4, 4, 12, generator=generator)
    return maps


def test_colours_are_principal_components_across_all_images():
    maps = make_scene_tokens()
    colours, reference = colour_patch_tokens(maps), PCA(3).fit(maps.flatten(0, -2).numpy())
    assert np.allclose(colours.share, reference.explained_variance_ratio_, atol=1e-4)
    scores = reference.transform(maps.flatten(0, -2).numpy())
    low, high = np.quantile(scores, (0.01, 0.99), axis=0)
    even = ((scores - low) / (high - low)).clip(0, 1)
    for component in range(3):
        component_values = colours.all[..., component].flatten().numpy()
        # the sign is arbitrary
        error = min(
            np.abs(component_values - even[:, component]).max(), np.abs(component_values - 1 + even[:, component]).max()
        )
        assert error < 1e-3


def test_foreground_excludes_the_border_component():
    for sign in (1, -1):
        colours = colour_patch_tokens(sign * make_scene_tokens())
        expected = torch.zeros(3, 8, 8, dtype=torch.bool)
        expected[:, 2:6, 3:7] = True
        assert torch.equal(colours.foreground, expected)
        assert not colours.inside[~expected].any() and colours.inside[expected].std() > 0.1
        assert (
            colours.all.min() >= 0
            and colours.all.max() <= 1
            and colours.inside.min() >= 0
            and colours.inside.max() <= 1
        )


@pytest.mark.parametrize("shape", [(1, 1, 1, 5), (1, 1, 2, 2), (2, 2, 2, 1)])
def test_few_tokens_have_colours(shape):
    colours = colour_patch_tokens(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    assert colours.all.shape == (*shape[:-1], 3) and colours.share.shape == (3,)
    assert (
        torch.isfinite(colours.all).all()
        and torch.isfinite(colours.inside).all()
        and torch.isfinite(colours.share).all()
    )


def test_border_mask_covers_the_outermost_patches():
    assert build_border_mask((4, 5)).sum() == 14 and not build_border_mask((4, 5))[1:3, 1:4].any()
    assert build_border_mask((2, 5)).all()


def test_patch_tokens_match_model_features():
    torch.manual_seed(0)
    images = torch.randn(2, 3, 32, 64)
    vit = randomise(create_untrained_model("ViT-16x1/16", image_size=32, num_classes=3, registers=2))
    bit = randomise(create_untrained_model("BiT-R50x1", image_size=32, blocks=(1, 1), width=16, num_classes=3))
    for model, prefix, grid in ((vit, 3, (2, 4)), (bit, 0, (4, 8))):
        tokens = extract_patch_tokens(model, images)
        assert model.training  # the mode is restored
        model.eval()
        with torch.no_grad():
            expected = model.features(images)[:, prefix:]
            assert torch.equal(tokens.flatten(1, 2), expected) and tokens.shape[1:3] == grid
            assert torch.allclose(model.classify(extract_pooled_features(model, images)), model(images))
        assert not tokens.requires_grad


def test_bit_feature_map_size_is_rounded_up():
    bit = create_untrained_model("BiT-R50x1", image_size=33, blocks=(1, 1), width=16, num_classes=3)
    assert extract_patch_tokens(bit, torch.zeros(1, 3, 33, 17)).shape[1:3] == (5, 3)
