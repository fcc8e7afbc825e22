"""Packed images of many sizes: outputs match those of single images, regardless of the pack's other images."""

from __future__ import annotations

import math

import pytest
import torch

from tests.contracts import randomise
from vitreous.errors import UsageError
from vitreous.models.config import transformer_config
from vitreous.models.names import config_from_name
from vitreous.models.packed import PackedViT, pack_sequences
from vitreous.models.zoo import build_model
from vitreous.nn.frozen import freeze_for_inference
from vitreous.nn.sizes import fit_size_by_scale, fit_size_to_tokens

SMALL_OPTIONS = {
    "image": (32, 32),
    "patch": (8, 8),
    "width": 32,
    "depth": 2,
    "heads": 4,
    "mlp": {"hidden": 64},
    "classes": 5,
}
MODEL_KINDS = {
    "class token": {},
    "registers, mean": {"class_token": False, "pool": "mean", "registers": 2},
    "attention pooling": {"class_token": False, "pool": "attention"},
    "axes, two prefix tokens": {"positions": {"kind": "axes", "slots": 2}, "pool": "distilled"},
    "factorised": {"positions": {"kind": "factorised"}},
    "sincos, layer scale": {"positions": {"kind": "sincos"}, "norm": {"layer_scale": 0.1}},
    "volumes": {"image": (8, 16, 16), "patch": (4, 8, 8), "channels": 1},
}
IMAGE_SIZES = ((32, 32), (16, 64), (40, 8), (8, 8), (24, 56))


def build_random_vit(**changes):
    torch.manual_seed(0)
    return randomise(build_model(transformer_config(**{**SMALL_OPTIONS, **changes}))).eval()


def make_images(model):
    c = model.config
    sizes = IMAGE_SIZES if len(c.image) == 2 else tuple((4 * (1 + i), *size) for i, size in enumerate(IMAGE_SIZES[:3]))
    model.any_size = True
    return [torch.randn(c.channels, *size) for size in sizes]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_packed_outputs_match_single_images(kind, masked):
    model = build_random_vit(**MODEL_KINDS[kind])
    images, packed = make_images(model), PackedViT(model, row=60, masked=masked)
    with torch.no_grad():
        alone = torch.cat([model(image[None]) for image in images])
        assert torch.allclose(packed(images), alone, atol=1e-5)
        for image, features in zip(images, packed.features(images), strict=True):
            assert torch.allclose(features, model.features(image[None])[0], atol=1e-5)
        order = torch.randperm(len(images))
        assert torch.allclose(packed([images[i] for i in order]), alone[order], atol=1e-5)


@pytest.mark.parametrize("masked", [False, True])
def test_patch_dropout_applies_per_image(masked):
    model = build_random_vit()
    images = make_images(model)
    keep = [torch.randperm(math.prod(image.shape[1:]) // 64)[:3].sort().values for image in images]
    with torch.no_grad():
        alone = [model.forward_patches(image[None], index[None]) for image, index in zip(images, keep, strict=True)]
        assert torch.allclose(PackedViT(model, masked=masked)(images, keep), torch.cat(alone), atol=1e-5)


def test_packed_gradients_match_single_images():
    model = build_random_vit().train()
    images, gradients = make_images(model), []
    for logits in (PackedViT(model, row=40)(images), torch.cat([model(image[None]) for image in images])):
        model.zero_grad()
        logits.square().mean().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for packed, single in zip(*gradients, strict=True):
        assert torch.allclose(packed, single, atol=1e-5)


def test_frozen_models_support_packing():
    model = build_random_vit()
    images = make_images(model)
    fast = freeze_for_inference(model, torch.float32, False)
    with torch.no_grad():
        assert torch.allclose(PackedViT(fast)(images), torch.cat([model(image[None]) for image in images]), atol=1e-5)


def test_packing_keeps_images_whole():
    assert pack_sequences([3, 4, 5, 20, 1], 9) == [slice(0, 2), slice(2, 3), slice(3, 4), slice(4, 5)]
    assert pack_sequences([5], 1) == [slice(0, 1)] and pack_sequences([], 4) == []
    assert pack_sequences([2] * 10, 100) == [slice(0, 10)]


@pytest.mark.parametrize("tokens", [1, 7, 64, 256])
def test_a_native_size_has_the_aspect_and_no_more_tokens(tokens):
    for size in ((375, 500), (500, 375), (64, 64), (30, 900), (1, 1), (9, 40)):
        fitted = fit_size_to_tokens(size, (16, 16), tokens)
        grid = [side // 16 for side in fitted]
        assert all(side % 16 == 0 for side in fitted) and min(grid) >= 1 and math.prod(grid) <= tokens
        if tokens == 256 and max(size) / min(size) < 2:
            assert math.prod(grid) > 0.85 * tokens
            assert fitted[1] / fitted[0] == pytest.approx(size[1] / size[0], rel=0.07)


def test_unsupported_models_and_images_are_rejected():
    for changes in (
        {"attention": {"kind": "rotary"}},
        {"attention": {"window": 2}, "class_token": False, "pool": "mean"},
    ):
        with pytest.raises(UsageError, match="a plain ViT"):
            PackedViT(build_random_vit(**changes))
    with pytest.raises(UsageError, match="stochastic depth"):
        PackedViT(build_random_vit(regularization={"drop_path": 0.1}).train())([torch.randn(3, 32, 32)])
    assert len(PackedViT(build_random_vit(regularization={"drop_path": 0.1}).eval())([torch.randn(3, 32, 32)])) == 1
    with pytest.raises(UsageError, match="the number of tokens must be at least 1, got 0"):
        fit_size_to_tokens((3, 3), (1, 1), 0)
    with pytest.raises(ValueError, match="list of images is empty"):
        PackedViT(build_random_vit())([])
    assert config_from_name("ViT-S/16", 224).grid == (14, 14)


@pytest.mark.parametrize("tokens", [16, 256, 1000])
def test_naflex_sizes_equal_those_of_transformers(tokens):
    from transformers.models.siglip2.image_processing_siglip2 import get_image_size_for_max_num_patches

    for size in ((480, 640), (224, 224), (1, 999), (37, 2000), (3000, 2000), (16, 16), (5, 5)):
        fitted = fit_size_by_scale(size, (16, 16), tokens)
        assert fitted == get_image_size_for_max_num_patches(*size, 16, tokens)
