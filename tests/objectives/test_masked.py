"""Masked patch prediction: the three targets, and the corruption of appendix B.1.2 of the ViT paper."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from vitreous.data.augmentation.augment import Augment
from vitreous.data.augmentation.masks import MASK_VECTOR
from vitreous.data.augmentation.views import MultiCrop
from vitreous.errors import UsageError
from vitreous.models.config import MlpConfig, ViTConfig
from vitreous.models.names import config_from_name
from vitreous.models.zoo import build_model
from vitreous.nn.grid import patchify
from vitreous.objectives.base import ObjectiveSetting, TrainingProgress
from vitreous.objectives.masked import MaskedPatchesConfig, MaskedPatchesObjective, average_pool_patches

SMALL_CONFIG = ViTConfig(image=(32, 32), patch=(8, 8), classes=0, width=32, depth=2, heads=2, mlp=MlpConfig(hidden=64))
RGB_SETTING = ObjectiveSetting(seed=1, normalisation=((0.4, 0.5, 0.6), (0.2, 0.25, 0.3)))
TARGET_KINDS = ("mean-colour", "small-colours", "pixels")


def make_batch(pixels, setting=RGB_SETTING):
    """Return a batch of pixels in 0 .. 1 as the loader does."""
    mean, std = (torch.tensor(numbers).view(-1, 1, 1) for numbers in setting.normalisation)
    return {
        "images": (pixels - mean) / std,
        "positions": torch.arange(len(pixels)),
        "samples": torch.arange(len(pixels)),
    }


def build_objective(target="mean-colour", config=SMALL_CONFIG, **settings):
    """Return an objective on a small model."""
    torch.manual_seed(0)
    return MaskedPatchesObjective(build_model(config), MaskedPatchesConfig(target=target, **settings), RGB_SETTING)


def test_corruption_ratios_match_the_paper():
    objective = MaskedPatchesObjective(
        build_model(replace(config_from_name("ViT-Ti/16"), classes=0, depth=1)), setting=RGB_SETTING
    )
    batch = objective.prepare(make_batch(torch.rand(64, 3, 224, 224)), TrainingProgress())
    source, masked_positions = batch["source"], batch["masked_positions"]
    assert source.shape == (64, 196) and masked_positions.shape == (64, 98)
    chosen = torch.zeros(64, 196, dtype=torch.bool).scatter_(1, masked_positions, True)
    itself = torch.arange(196).expand(64, 196)
    assert (source[~chosen] == itself[~chosen]).all()
    shares = [(source[chosen] == MASK_VECTOR).float().mean(), (source[chosen] == itself[chosen]).float().mean()]
    assert shares[0].item() == pytest.approx(0.8, abs=0.02) and shares[1].item() == pytest.approx(0.1, abs=0.02)


def test_mean_colours_have_three_bits_per_channel():
    objective, pixels = build_objective(share=1.0), torch.zeros(1, 3, 32, 32)
    pixels[0, 0], pixels[0, 1], pixels[0, 2] = 1.0, 0.51, 0.13  # levels 7, 4 and 1
    pixels[0, 2, :4, :8] = 0.9  # half of the first patch changes: mean 0.515, level 4
    batch = objective.prepare(make_batch(pixels), TrainingProgress())
    colours = torch.zeros(16, dtype=torch.int64).scatter_(0, batch["masked_positions"][0], batch["targets"][0])
    assert colours[0] == 64 * 7 + 8 * 4 + 4 and (colours[1:] == 64 * 7 + 8 * 4 + 1).all()


def test_small_colour_targets_are_downsampled_patches():
    objective, pixels = build_objective("small-colours"), torch.rand(2, 3, 32, 32)
    batch = objective.prepare(make_batch(pixels), TrainingProgress())
    position = int(batch["masked_positions"][1, 3])
    row, column = divmod(position, 4)
    patch = pixels[1, :, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8]
    levels = (torch.nn.functional.avg_pool2d(patch, 2) * 8).floor().clamp(max=7).long()
    expected = 64 * levels[0] + 8 * levels[1] + levels[2]
    agree = (batch["targets"][1, 3] == expected.flatten()).float().mean()
    assert batch["targets"].shape == (2, 8, 16) and agree > 0.9  # levels at a bin edge may round differently


@pytest.mark.parametrize(("side", "length"), [(4, 8), (4, 14), (4, 4), (1, 6)])
def test_target_downsampling_is_adaptive_pooling(side, length):
    patches = torch.rand(3, 5, length, length)
    expected = torch.nn.functional.adaptive_avg_pool2d(patches, side).flatten(-2)
    assert torch.allclose(average_pool_patches(patches, side, 2), expected, atol=1e-6)


def test_pixel_targets_are_image_patches():
    objective = build_objective("pixels")
    batch = objective.prepare(make_batch(torch.rand(2, 3, 32, 32)), TrainingProgress())
    row, column = divmod(int(batch["masked_positions"][0, 0]), 4)
    patch = batch["images"][0, :, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8]
    assert torch.equal(batch["targets"][0, 0], patch.flatten())


def test_initial_loss_is_ln_of_the_number_of_colours():
    for target in ("mean-colour", "small-colours"):
        objective = build_objective(target)
        loss = objective(objective.prepare(make_batch(torch.rand(2, 3, 32, 32)), TrainingProgress()))["loss"]
        assert loss.item() == pytest.approx(torch.tensor(512.0).log().item(), rel=1e-6)  # the head starts at zero


def test_masked_patches_do_not_affect_the_loss():
    objective = build_objective(masked=1.0, swapped=0.0)
    objective.head.weight.data.normal_()
    batch = objective.prepare(make_batch(torch.rand(1, 3, 32, 32)), TrainingProgress())
    row, column = divmod(int(batch["masked_positions"][0, 0]), 4)
    before = objective(batch)["loss"]
    batch["images"][0, :, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8] = 9.0
    assert torch.equal(objective(batch)["loss"], before)


def test_conv_stem_does_not_leak_masked_pixels():
    config = config_from_name("Conv+ViT-128x4/8", 32).with_options(classes=0, width=32, heads=4, mlp={"hidden": 64})
    objective = build_objective("pixels", config, masked=0.5, swapped=0.5)
    objective.head.weight.data.normal_()
    images = torch.randn(2, 3, 32, 32, requires_grad=True)
    batch = objective.prepare(make_batch(images.detach()), TrainingProgress())
    objective.predict(images, batch["source"], batch["masked_positions"]).square().sum().backward()
    is_used = patchify(images.grad.abs(), (8, 8)).flatten(1, 2).amax(-1) > 0
    expected = torch.zeros_like(is_used)
    for row, sources in enumerate(batch["source"]):
        expected[row, sources[sources >= 0]] = True
    assert torch.equal(is_used, expected)


@pytest.mark.parametrize("target", TARGET_KINDS)
def test_every_parameter_gets_a_gradient(target):
    objective = build_objective(target)
    objective.head.weight.data.normal_()
    objective(objective.prepare(make_batch(torch.rand(2, 3, 32, 32)), TrainingProgress()))["loss"].backward()
    assert {name for name, p in objective.named_parameters() if p.grad is None or not p.grad.any()} == set()


@pytest.mark.parametrize(
    ("settings", "change", "text"),
    [
        ({"share": 0.01}, {}, "of 16 patches selects no patch"),
        ({"share": 1.5}, {}, "invalid shares"),
        ({"masked": 0.9, "swapped": 0.2}, {}, "invalid shares"),
        ({"target": "mean-colour"}, {"channels": 5}, "pixels"),
        ({"target": "small-colours"}, {"patch": (2, 2)}, "patches of at least 4 pixels"),
    ],
)
def test_invalid_settings_are_rejected(settings, change, text):
    with pytest.raises(UsageError, match=text):
        MaskedPatchesConfig(**settings).check(replace(SMALL_CONFIG, **change), (), Augment())


def test_unsupported_models_and_views_are_rejected():
    with pytest.raises(UsageError, match="plain ViT"):
        MaskedPatchesConfig().check(config_from_name("Swin-T/4"), (), Augment())
    with pytest.raises(UsageError, match="requires views of type augment"):
        MaskedPatchesConfig().check(SMALL_CONFIG, (), MultiCrop())
