"""Feature maps of backbones, by stride."""

import math
from dataclasses import replace

import pytest
import torch

from tests import contracts
from vitreous.models.config import BiTConfig, StemConfig, SwinAttentionConfig, SwinConfig, transformer_config
from vitreous.models.configs.hybrid import ConvStemConfig
from vitreous.models.zoo import build_model

SMALL_VIT_OPTIONS = {"classes": 0, "width": 16, "depth": 2, "heads": 2, "mlp": {"hidden": 32}}
MEAN_POOL_OPTIONS = SMALL_VIT_OPTIONS | {"class_token": False, "pool": "mean"}
BACKBONES = {
    "vit": transformer_config(image=(16, 24), patch=(8, 8), registers=2, **SMALL_VIT_OPTIONS),
    "volume": transformer_config(image=(4, 8, 8), patch=(2, 4, 4), channels=1, **SMALL_VIT_OPTIONS),
    "windows": transformer_config(
        **SMALL_VIT_OPTIONS, image=(16, 24), patch=(4, 4), attention={"window": 3, "global_blocks": (1,)}
    ),
    "clip": transformer_config(
        family="clip", **SMALL_VIT_OPTIONS, image=(16, 24), patch=(8, 8), norm={"final": "pooled"}
    ),
    "sam": transformer_config(
        family="sam",
        **MEAN_POOL_OPTIONS,
        image=(16, 24),
        patch=(4, 4),
        neck=8,
        attention={"window": 3, "global_blocks": (1,)},
        norm={"final": "none"},
    ),
    "axial": transformer_config(family="axial", image=(16, 24), patch=(8, 8), **MEAN_POOL_OPTIONS),
    "convolutions": transformer_config(
        family="hybrid",
        image=(16, 24),
        patch=(8, 8),
        stem=ConvStemConfig(widths=(4, 6, 8), blocks=(0, 1, 0)),
        **SMALL_VIT_OPTIONS,
    ),
    "hybrid": transformer_config(
        family="hybrid", image=(32, 64), patch=(16, 16), stem=StemConfig((1, 1, 1), 8), **SMALL_VIT_OPTIONS
    ),
    "hybrid, coarser": transformer_config(
        family="hybrid", image=(32, 64), patch=(16, 16), stem=StemConfig((1, 1), 8), **SMALL_VIT_OPTIONS
    ),
    "hybrid, root alone": transformer_config(
        family="hybrid", image=(32, 64), patch=(16, 16), stem=StemConfig((), 8), **SMALL_VIT_OPTIONS
    ),
    "swin": SwinConfig(
        image=(16, 24),
        patch_size=(2, 2),
        classes=0,
        width=8,
        blocks=(1, 1),
        heads=(2, 2),
        attention=SwinAttentionConfig(window=2),
    ),
    "bit": BiTConfig(image=(32, 48), classes=0, blocks=(1, 1, 1), width=8),
}
EXPECTED_STRIDES = {
    "vit": (8,),
    "volume": (2,),
    "windows": (4,),
    "clip": (8,),
    "sam": (4,),
    "axial": (8,),
    "convolutions": (2, 4, 8),
    "hybrid": (4, 8, 16),
    "hybrid, coarser": (4, 8, 16),
    "hybrid, root alone": (4, 16),
    "swin": (2, 4),
    "bit": (4, 8, 16),
}


def build_backbone(name):
    torch.manual_seed(0)
    return contracts.randomise(build_model(BACKBONES[name])).eval()


@pytest.mark.parametrize("name", BACKBONES)
def test_maps_match_the_config(name):
    model, config = build_backbone(name), BACKBONES[name]
    assert config.strides == EXPECTED_STRIDES[name]
    contracts.check_feature_maps_match_config(model, torch.randn(3, config.channels, *config.image))


@pytest.mark.parametrize("name", BACKBONES)
def test_coarsest_map_leads_to_the_model_features(name):
    """The last norm of the coarsest map, and the neck of a SAM, give `features`."""
    model, config = build_backbone(name), BACKBONES[name]
    images = torch.randn(2, config.channels, *config.image)
    last = model.features_at(images, [config.strides[-1]])[0]
    tokens = model.features(images)[:, config.prefix :]
    if config.family == "bit":
        last = torch.relu(model.body.norm(last.movedim(-1, 1))).movedim(1, -1)
    elif config.family == "swin":
        last = model.norm(last)
    else:
        last = model.encoder.norm(last)
        last = last if model.neck is None else model.neck(last)
    torch.testing.assert_close(last.flatten(1, -2), tokens)


def test_hybrid_stem_maps_skip_the_transformer_blocks():
    model = build_backbone("hybrid")
    images = torch.randn(1, 3, 32, 64)
    expected = model.features_at(images, [8, 16, 4])
    for block in model.blocks():
        block.forward = None
    maps = model.features_at(images, [8, 4])
    assert torch.equal(maps[0], expected[0]) and torch.equal(maps[1], expected[2])


def test_map_sizes_follow_the_image_size():
    for name in ("vit", "convolutions", "hybrid", "bit", "swin"):
        model, config = build_backbone(name), BACKBONES[name]
        model.any_size = True
        size = tuple(2 * side for side in config.image)
        for level, x in zip(config.levels, model.features_at(torch.randn(1, 3, *size), config.strides), strict=True):
            assert x.shape[1:-1] == tuple(math.ceil(s / p) for s, p in zip(size, level.patch, strict=True))


def test_uneven_image_sizes_are_rounded_up():
    model = build_model(replace(BACKBONES["bit"], image=(33, 50))).eval()
    maps = model.features_at(torch.randn(1, 3, 33, 50), [4, 8, 16])
    assert [tuple(x.shape[1:3]) for x in maps] == [(9, 13), (5, 7), (3, 4)]
