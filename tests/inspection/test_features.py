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
    """Tokens of two kinds: a square of some in the middle of others, of one direction and noise."""
    generator = torch.Generator().manual_seed(0)
    maps = 0.1 * torch.randn(batch, side, side, 12, generator=generator)
    maps[:, 2:6, 3:7, 0] += 4
    maps[:, 2:6, 3:7] += torch.randn(batch, 4, 4, 12, generator=generator)
    return maps


def test_colours_are_principal_components_across_all_images():
    maps = make_scene_tokens()
    found, wanted = colour_patch_tokens(maps), PCA(3).fit(maps.flatten(0, -2).numpy())
    assert np.allclose(found.share, wanted.explained_variance_ratio_, atol=1e-4)
    scores = wanted.transform(maps.flatten(0, -2).numpy())
    low, high = np.quantile(scores, (0.01, 0.99), axis=0)
    even = ((scores - low) / (high - low)).clip(0, 1)
    for component in range(3):
        own = found.all[..., component].flatten().numpy()
        # the sign is arbitrary
        error = min(np.abs(own - even[:, component]).max(), np.abs(own - 1 + even[:, component]).max())
        assert error < 1e-3


def test_foreground_excludes_the_border_component():
    for sign in (1, -1):
        found = colour_patch_tokens(sign * make_scene_tokens())
        wanted = torch.zeros(3, 8, 8, dtype=torch.bool)
        wanted[:, 2:6, 3:7] = True
        assert torch.equal(found.foreground, wanted)
        assert not found.inside[~wanted].any() and found.inside[wanted].std() > 0.1
        assert found.all.min() >= 0 and found.all.max() <= 1 and found.inside.min() >= 0 and found.inside.max() <= 1


@pytest.mark.parametrize("shape", [(1, 1, 1, 5), (1, 1, 2, 2), (2, 2, 2, 1)])
def test_a_few_tokens_have_colours_too(shape):
    found = colour_patch_tokens(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    assert found.all.shape == (*shape[:-1], 3) and found.share.shape == (3,)
    assert torch.isfinite(found.all).all() and torch.isfinite(found.inside).all() and torch.isfinite(found.share).all()


def test_border_mask_covers_the_outermost_patches():
    assert build_border_mask((4, 5)).sum() == 14 and not build_border_mask((4, 5))[1:3, 1:4].any()
    assert build_border_mask((2, 5)).all()


def test_patch_tokens_match_model_features():
    torch.manual_seed(0)
    images = torch.randn(2, 3, 32, 64)
    vit = randomise(create_untrained_model("ViT-16x1/16", image_size=32, num_classes=3, registers=2))
    bit = randomise(create_untrained_model("BiT-R50x1", image_size=32, blocks=(1, 1), width=16, num_classes=3))
    for model, prefix, grid in ((vit, 3, (2, 4)), (bit, 0, (4, 8))):
        found = extract_patch_tokens(model, images)
        assert model.training  # as it was
        model.eval()
        with torch.no_grad():
            wanted = model.features(images)[:, prefix:]
            assert torch.equal(found.flatten(1, 2), wanted) and found.shape[1:3] == grid
            assert torch.allclose(model.classify(extract_pooled_features(model, images)), model(images))
        assert not found.requires_grad


def test_bit_feature_map_size_is_rounded_up():
    bit = create_untrained_model("BiT-R50x1", image_size=33, blocks=(1, 1), width=16, num_classes=3)
    assert extract_patch_tokens(bit, torch.zeros(1, 3, 33, 17)).shape[1:3] == (5, 3)
