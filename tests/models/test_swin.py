"""Swin Transformers: exact parameter counts, names, the model contract, and images of any size."""

import math

import pytest
import torch

from tests import contracts
from tests.models.test_family import count_macs_by_hooks
from vitreous.errors import UsageError
from vitreous.models.config import SwinConfig
from vitreous.models.names import config_from_name
from vitreous.models.zoo import build_model, build_without_init, create_untrained_model
from vitreous.nn.frozen import freeze_for_inference

#: parameters of Microsoft's code with 1000 classes, and its count of multiply-adds in billions (arXiv:2103.14030)
PUBLISHED_SIZES = {
    "Swin-T/4": (28_288_354, 4.494),
    "Swin-S/4": (49_606_258, 8.747),
    "Swin-B/4": (87_768_224, 15.438),
    "Swin-L/4": (196_532_476, 34.487),
    "Swin-B/4-window12": (87_903_584, 47.1),
    "Swin-L/4-window12": (196_735_516, 104.0),
}
#: parameters of timm's Swin V2; torchvision's lacks the unused key biases
SWIN_V2_PARAMETERS = {
    "SwinV2-T/4": 28_347_154,
    "SwinV2-T/4-window16": 28_347_154,
    "SwinV2-S/4": 49_728_418,
    "SwinV2-B/4": 87_918_816,
    "SwinV2-B/4-window12to24": 87_918_816,
    "SwinV2-L/4-window12": 196_739_932,
    "SwinV2-L/4-window12to16": 196_739_932,
}
SMALL_OPTIONS = {
    "image": (16, 16),
    "patch_size": (2, 2),
    "width": 8,
    "blocks": (2, 2),
    "heads": (2, 4),
    "attention": {"window": 4},
    "classes": 5,
}
MODEL_OPTIONS = {
    "windows that divide the grid": {},
    "windows that do not": {"attention": {"window": 3}},
    "padding is attended to": {"attention": {"window": 3, "pad": "zeros"}},
    "an image size that is not a multiple of the patch size": {"image": (15, 19)},
    "three stages, no bias, one channel": {
        "blocks": (1, 2, 1),
        "heads": (1, 2, 2),
        "attention": {"qkv_bias": False},
        "channels": 1,
        "mlp": {"gelu": "tanh"},
    },
    "V2": {"version": 2},
    "V2, windows that do not divide the grid, no bias": {"version": 2, "attention": {"window": 3, "qkv_bias": False}},
    "V2, positions of other windows, timm's padding": {
        "version": 2,
        "attention": {"window": 3, "pretrained_window": (6, 3), "pad": "zeros-after-shift"},
    },
}


def build_random_swin(name):
    torch.manual_seed(0)
    return contracts.randomise(
        build_model(SwinConfig().with_options(**SMALL_OPTIONS).with_options(**MODEL_OPTIONS[name]))
    )


def with_norms(config):
    """Multiply-adds as Microsoft's `flops` counts them, with one multiplication per normalised value."""
    grids, total = config.stage_grids(config.image), config.macs()
    total += math.prod(grids[0]) * config.width
    for stage, (grid, width) in enumerate(zip(grids, config.widths, strict=True)):
        merged = 4 * math.prod(grid) * width // 2 if stage else 0
        total += merged + 2 * config.blocks[stage] * math.prod(grid) * width
    return total + config.width_out * math.prod(grids[0]) // 2 ** len(config.blocks)


@pytest.mark.parametrize("name", PUBLISHED_SIZES)
def test_parameters_and_costs_match_the_published_ones(name):
    config, (parameters, gmacs) = config_from_name(name), PUBLISHED_SIZES[name]
    assert sum(p.numel() for p in build_without_init(config).parameters()) == parameters
    assert with_norms(config) / 1e9 == pytest.approx(gmacs, abs=0.0006 if gmacs < 40 else 0.05)
    assert config.computed_macs() == config.macs()
    assert config.count_activations() is None


@pytest.mark.parametrize("name", SWIN_V2_PARAMETERS)
def test_swin_v2_parameter_counts_match_the_published_ones(name):
    config = config_from_name(name)
    assert sum(p.numel() for p in build_without_init(config).parameters()) == SWIN_V2_PARAMETERS[name]
    # torchvision 0.29, `_docs` of its weights: 28,351,570 for T
    dead = sum(width * blocks for width, blocks in zip(config.widths, config.blocks, strict=True))
    assert name != "SwinV2-T/4" or SWIN_V2_PARAMETERS[name] + dead == 28_351_570


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention": {"window": 3}},
        {"image": (30, 18)},
        {"image": (15, 19), "attention": {"window": 5}},
        {"version": 2, "attention": {"window": 3}},
    ],
)
def test_macs_match_hook_counts(changes):
    config = SwinConfig().with_options(**SMALL_OPTIONS).with_options(**changes)
    assert config.macs() == count_macs_by_hooks(config)


MODEL_NAME_ALIASES = {
    "swin-t/4": "Swin-T/4",
    "swin_tiny_patch4_window7_224.ms_in1k": "Swin-T/4",
    "swin_base_patch4_window12_384.ms_in22k_ft_in1k": "Swin-B/4-window12",
    "microsoft/swin-small-patch4-window7-224": "Swin-S/4",
    "swin_b": "Swin-B/4",
    "swinv2_tiny_window8_256.ms_in1k": "SwinV2-T/4",
    "swinv2_large_window12to24_192to384.ms_in22k_ft_in1k": "SwinV2-L/4-window12to24",
    "microsoft/swinv2-base-patch4-window12-192-22k": "SwinV2-B/4-window12",
    "swin_v2_s": "SwinV2-S/4",
    "SwinV2-32x1-1/2": "SwinV2-32x1-1/2",
    "Swin-32x2-2/2-window4": "Swin-32x2-2/2-window4",
    "Swin-64x2-4-2/4": "Swin-64x2-4-2/4",
}


@pytest.mark.parametrize("spelling", MODEL_NAME_ALIASES)
def test_names(spelling):
    config = config_from_name(spelling)
    assert config.name() == MODEL_NAME_ALIASES[spelling]
    assert config_from_name(config.name()) == config


def test_names_contain_image_size_and_window():
    assert config_from_name("Swin-B/4-window12").image == (384, 384)
    assert config_from_name("Swin-T/4", 384).attention.window == 7
    larger_window = config_from_name("SwinV2-L/4-window12to16")
    assert larger_window.image == (256, 256) and larger_window.attention.pretrained_window == (12, 12, 12, 6)
    assert larger_window.windows == ((16, 16),) * 3 + ((8, 8),)
    small = config_from_name("Swin-64x2-4-2/2-window4", 32)
    assert (small.widths, small.blocks, small.heads) == ((64, 128, 256), (2, 4, 2), (2, 4, 8))
    assert (small.patch_size, small.patch, small.grid, small.windows) == ((2, 2), (8, 8), (4, 4), ((4, 4),) * 3)


@pytest.mark.parametrize(
    "wrong", ["Swin-Q/4", "Swin-T", "Swin-32x/4", "Swin-T/0", "Swin-T/4-window0", "Swin-T/4-window7to12"]
)
def test_unknown_names_are_rejected(wrong):
    with pytest.raises(UsageError, match="unknown model"):
        config_from_name(wrong)


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"blocks": (2, 0)}, "do not define stages"),
        ({"heads": (2,)}, "do not define stages"),
        ({"heads": (3, 3)}, "not divisible by 3 heads"),
        ({"attention": {"window": 0}}, "at least 1"),
        ({"attention": {"pad": "none"}}, "pad=none"),
        ({"version": 3}, "version=3"),
        ({"attention": {"pretrained_window": (3, 3)}}, "version 2"),
        ({"version": 2, "attention": {"pretrained_window": (3,)}}, "each of 2 stages"),
        ({"image": (16,)}, "two axes"),
        ({"mlp": {"ratio": 0.01}}, "no hidden channel"),
        ({"family": "vit"}, "is not the family of a SwinConfig"),
    ],
)
def test_invalid_configs_are_rejected(changes, message):
    with pytest.raises(UsageError, match=message):
        SwinConfig().with_options(**SMALL_OPTIONS).with_options(**changes)
    with pytest.raises(UsageError, match="has no option depths"):
        create_untrained_model("Swin-T/4", depths=(2, 2))


#: exported only in slow tests, because their graphs combine features of the other models
SLOW_EXPORT_MODELS = (
    "three stages, no bias, one channel",
    "windows that do not",
    "V2, windows that do not divide the grid, no bias",
    "V2, positions of other windows, timm's padding",
)


@pytest.mark.parametrize(
    "promise, name",
    [
        pytest.param(
            promise,
            name,
            marks=[pytest.mark.slow] * (promise is contracts.check_export_matches and name in SLOW_EXPORT_MODELS),
            id=f"{promise.__name__}-{name}",
        )
        for promise in contracts.ALL_CONTRACTS
        for name in MODEL_OPTIONS
    ],
)
def test_model_contract(name, promise):
    model = build_random_swin(name)
    promise(model, torch.randn(3, model.config.channels, *model.config.image))


@pytest.mark.parametrize("name", MODEL_OPTIONS)
def test_model_accepts_other_image_sizes(name):
    model = build_random_swin(name)
    channels = model.config.channels
    contracts.check_other_image_sizes(model, torch.randn(2, channels, 32, 32), torch.randn(2, channels, 9, 41))


@torch.inference_mode()
def test_masked_padding_does_not_change_the_output():
    """A 7 x 5 grid padded for windows of 4 gives the same output for any padding values."""
    model = build_random_swin("windows that divide the grid").eval()
    windows = model.stages[0].blocks[1].attention.part
    x = torch.randn(2, 7, 5, 8)
    output, cut = windows(x), windows.partition_windows
    windows.partition_windows = lambda x: (
        cut(x) + 9.0 * (cut(torch.ones_like(x)) == 0) if x.is_floating_point() else cut(x)
    )
    assert torch.equal(windows(x), output)


@torch.inference_mode()
def test_feature_maps_match_the_forward_pass():
    model = build_random_swin("three stages, no bias, one channel").eval()
    images = torch.randn(2, 1, 20, 36)
    maps = model.features_at(images, [8, 2, 4])
    assert [tuple(x.shape) for x in maps] == [(2, 3, 5, 32), (2, 10, 18, 8), (2, 5, 9, 16)]
    assert torch.equal(model.norm(maps[0]).flatten(1, 2), model.features(images))
    for strides in ([], [3]):
        with pytest.raises(ValueError, match="strides"):
            model.features_at(images, strides)


def test_layer_decay_groups_patch_merging_with_the_next_block():
    config = SwinConfig().with_options(**SMALL_OPTIONS)
    model = build_without_init(config)
    layers = {name: config.parameter_layer(name) for name, _ in model.named_parameters()}
    assert {layers["projection.weight"], layers["first_norm.bias"]} == {0}
    assert [layers[f"stages.{s}.blocks.{b}.mlp.norm.weight"] for s in (0, 1) for b in (0, 1)] == [1, 2, 3, 4]
    assert layers["stages.1.merge.reduction.weight"] == 3
    assert {layers["norm.weight"], layers["head.weight"]} == {5}
    assert len(model.blocks()) == config.depth == 4


def test_stochastic_depth_rises_over_all_stages():
    model = build_model(SwinConfig().with_options(**SMALL_OPTIONS, regularization={"drop_path": 0.3}))
    assert [block.attention.drop_path for block in model.blocks()] == pytest.approx([0, 0.1, 0.2, 0.3])


def test_recomputation_changes_no_gradient():
    model, images = build_random_swin("windows that do not").train(), torch.randn(2, 3, 16, 16)
    gradients = []
    for again in (False, True):
        for stage in model.stages:
            stage.recompute = again
        gradients.append(torch.autograd.grad(model(images).square().sum(), [*model.parameters()]))
    assert all(torch.equal(gradient, expected) for gradient, expected in zip(*gradients, strict=True))


def test_initialisation_matches_the_microsoft_code():
    model = build_model(SwinConfig().with_options(**SMALL_OPTIONS).with_options(width=64))
    assert model.head.weight.abs().sum() == 0
    assert model.stages[0].blocks[0].mlp.part.fc1.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.stages[1].merge.reduction.weight.std().item() == pytest.approx(0.02, rel=0.05)
    table = model.stages[0].blocks[1].attention.part.part.position.table
    assert table.shape == (7, 7, 2) and table.std().item() == pytest.approx(0.02, rel=0.3)


def test_initial_swin_v2_block_is_the_identity():
    """The norms at the end of its branches start at 0 (arXiv:2111.09883, appendix)."""
    model = build_model(SwinConfig().with_options(**SMALL_OPTIONS).with_options(version=2)).eval()
    x = torch.randn(2, 8, 8, 8)
    assert torch.equal(model.blocks()[0](x), x)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("packed", [False, True])
@torch.inference_mode()
def test_frozen_models_match(version, packed):
    torch.manual_seed(0)
    model = build_model(
        SwinConfig().with_options(**SMALL_OPTIONS).with_options(version=version, attention={"window": 3})
    ).eval()
    for name, parameter in model.named_parameters():
        if name.startswith("head") or name.endswith("norm.weight"):
            torch.nn.init.normal_(parameter)
    images = torch.randn(2, 3, 18, 14)
    output = model(images)
    assert torch.allclose(freeze_for_inference(model, packed=packed)(images), output, atol=1e-4)
    rough = freeze_for_inference(model, torch.bfloat16, packed)(images)
    assert rough.dtype == torch.float32
    assert (rough - output).abs().max() < 0.1 * output.abs().max()
