from functools import partial
from typing import get_args

import pytest
import torch

from tests import contracts
from vitreous.config import from_builtins, to_builtins
from vitreous.errors import UsageError
from vitreous.models.bit import BiT
from vitreous.models.config import BiTConfig, NumericsName, StemConfig
from vitreous.nn.resnet import NUMERICS, AxialAttention, ResNetStem, StandardizedConv

BLOCKS_BY_DEPTH = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3), 200: (3, 24, 36, 3)}

#: depth, factor: parameters without a head, from arXiv:1912.11370 and its code
PARAMETER_COUNTS = {
    (50, 1): 23_500_352,
    (50, 2): 93_891_712,
    (50, 3): 211_174_080,
    (101, 1): 42_492_480,
    (101, 3): 381_789_888,
    (152, 1): 58_136_128,
    (152, 2): 232_238_208,
    (152, 4): 928_340_224,
    (200, 3): 562_488_000,
}
#: depth, factor, classes: parameters with a head
PARAMETER_COUNTS_WITH_HEAD = {
    (50, 1, 1000): 25_549_352,
    (50, 1, 21843): 68_256_659,
    (152, 2, 1000): 236_335_208,
    (152, 4, 1000): 936_533_224,
    (152, 4, 21843): 1_107_299_923,
}
#: depth, factor: GMACs without a head at 224 px, as published
PUBLISHED_GMACS = {
    (50, 1): "4.087",
    (50, 2): "16.11",
    (101, 1): "7.80",
    (152, 1): "11.51",
    (152, 2): "45.81",
    (152, 4): "182.8",
    (200, 3): "134.3",
}

SMALL_OPTIONS = {"image": (32, 32), "classes": 5, "blocks": (1, 2), "width": 16}
MODEL_OPTIONS = {
    "plain": {},
    "google's numerics, twice as wide, two channels": {"numerics": "google", "factor": 2, "channels": 2},
    "axial, oblong and odd": {"image": (26, 37), "axial": True},
}


def build_random_bit(changes):
    torch.manual_seed(0)
    return contracts.randomise(BiT(BiTConfig(**{**SMALL_OPTIONS, **changes})))


def draw_images(model, scale=(1, 1)):
    return torch.randn(3, model.config.channels, *(i * s for i, s in zip(model.config.image, scale, strict=True)))


def count_parameters(config):
    with torch.device("meta"):
        return sum(p.numel() for p in BiT(config).parameters())


@pytest.mark.parametrize("depth,factor", PARAMETER_COUNTS)
def test_parameter_counts_are_exact(depth, factor):
    assert (
        count_parameters(BiTConfig(classes=0, blocks=BLOCKS_BY_DEPTH[depth], factor=factor))
        == PARAMETER_COUNTS[depth, factor]
    )


@pytest.mark.parametrize("depth,factor,classes", PARAMETER_COUNTS_WITH_HEAD)
def test_parameter_counts_with_a_head_are_exact(depth, factor, classes):
    assert (
        count_parameters(BiTConfig(classes=classes, blocks=BLOCKS_BY_DEPTH[depth], factor=factor))
        == PARAMETER_COUNTS_WITH_HEAD[depth, factor, classes]
    )


@pytest.mark.parametrize("depth,factor", PUBLISHED_GMACS)
def test_macs_match_the_published_values(depth, factor):
    printed = PUBLISHED_GMACS[depth, factor]
    decimals = len(printed.split(".")[1])
    assert f"{BiTConfig(classes=0, blocks=BLOCKS_BY_DEPTH[depth], factor=factor).macs() / 1e9:.{decimals}f}" == printed


def count_macs(model, images):
    """Multiply-adds of a forward pass of one image, counted by hooks."""
    total = 0

    def convolution(module, _, output):
        nonlocal total
        total += output[0].numel() * module.weight[0].numel()

    def attention(module, inputs, _):
        nonlocal total
        _, width, *size = inputs[0].shape
        for length, lines in (size, size[::-1]):
            head, pairs = width // 8, lines * 8 * length**2
            total += lines * length * width * 2 * width + pairs * (3 * head // 2 + 2 * head)

    for module in model.modules():
        hook = {StandardizedConv: convolution, AxialAttention: attention}.get(type(module))
        if hook:
            module.register_forward_hook(hook)
    with torch.inference_mode():
        model(images)
    return total


@pytest.mark.parametrize("size", [(32, 32), (35, 62)])
@pytest.mark.parametrize("axial", [False, True])
def test_macs_match_the_layers(axial, size):
    config = BiTConfig(**{**SMALL_OPTIONS, "axial": axial, "blocks": (1, 2, 1)})
    head = config.width_out * config.classes
    assert config.macs(size) == count_macs(BiT(config), torch.randn(1, 3, *size)) + head
    if not axial:
        assert StemConfig((1, 2, 1), 16).macs(size, 3) == count_macs(
            ResNetStem((1, 2, 1), 16), torch.randn(1, 3, *size)
        )


def test_axial_resnet50_replaces_every_3x3_convolution():
    config = BiTConfig(axial=True)
    with torch.device("meta"):
        model = BiT(config)
    kernels = [module.kernel for module in model.modules() if isinstance(module, StandardizedConv)]
    assert sorted(set(kernels)) == [1, 7] and kernels.count(7) == 1
    axial = [module for module in model.modules() if isinstance(module, AxialAttention)]
    lengths = {tuple(len(line.relative) // 2 + 1 for line in (module.row, module.column)) for module in axial}
    assert len(axial) == 16 and lengths == {(56, 56), (28, 28), (14, 14), (7, 7)}
    assert count_parameters(config) < count_parameters(BiTConfig())


@pytest.mark.parametrize("name", MODEL_OPTIONS)
@pytest.mark.parametrize("promise", contracts.ALL_CONTRACTS)
def test_model_contract(name, promise):
    model = build_random_bit(MODEL_OPTIONS[name])
    promise(model, draw_images(model))


@pytest.mark.parametrize("name", MODEL_OPTIONS)
def test_model_accepts_other_image_sizes(name):
    model = build_random_bit(MODEL_OPTIONS[name])
    contracts.check_other_image_sizes(model, draw_images(model, (2, 2)), draw_images(model, (1, 3)))


@pytest.mark.parametrize("image", [(224, 224), (225, 193), (32, 97), (7, 1)])
def test_the_grid_is_the_map(image):
    config = BiTConfig(image=image, classes=0, width=8, blocks=(1, 1, 1, 1))
    assert (config.patch, config.prefix, config.regularization.dropout, config.regularization.drop_path) == (
        (32, 32),
        0,
        0.0,
        0.0,
    )
    model, images = BiT(config), torch.randn(2, 3, *image)
    assert model.body(images).shape == (2, config.width_out, *config.grid)
    assert model.features(images).shape == (2, config.grid[0] * config.grid[1], config.width_out)
    assert model(images).shape == (2, config.width_out)


def test_model_methods_compose_and_the_initial_head_is_zero():
    model = BiT(BiTConfig(**SMALL_OPTIONS)).eval()
    images = torch.randn(2, 3, 32, 48)
    assert not model(images).any()
    contracts.randomise(model)
    tokens = model.features(images)
    assert torch.equal(tokens[:, 5], model.body(images)[:, :, 0, 5]) and (tokens >= 0).all()
    assert torch.equal(model.classify(model.pool(tokens)), model(images))
    with pytest.raises(ValueError, match="takes 3 channels, the images have 1"):
        model(torch.randn(1, 1, 32, 32))


def test_initial_values():
    torch.manual_seed(0)
    model = BiT(BiTConfig(image=(64, 64), blocks=(1,), axial=True))
    unit = model.body.stages[0].units[0]
    assert model.body.root.conv.weight.std().item() == pytest.approx(147**-0.5, rel=0.05)
    assert unit.conv3.weight.std().item() == pytest.approx(64**-0.5, rel=0.05)
    assert unit.conv2.row.qkv.weight.std().item() == pytest.approx(64**-0.5, rel=0.05)
    assert unit.conv2.column.relative.std().item() == pytest.approx(8**-0.5, rel=0.15)
    assert all((norm.weight == 1).all() and not norm.bias.any() for norm in (unit.norm1, unit.norm3, model.body.norm))


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"family": "vit"}, "is not the family of a BiTConfig"),
        ({"width": 0}, "at least 1"),
        ({"classes": -1}, "classes at least 0"),
        ({"image": (32, 32, 32)}, "two axes"),
        ({"blocks": ()}, "at least one stage"),
        ({"blocks": (3, 0)}, "at least one stage"),
        ({"numerics": "googel"}, "did you mean google"),
        ({"axial": True, "width": 24}, "not divisible by 16"),
    ],
)
def test_invalid_configs_are_rejected(changes, message):
    with pytest.raises(UsageError, match=message):
        BiTConfig(**changes)


def test_a_config_from_a_file_is_typed():
    assert set(get_args(NumericsName)) == set(NUMERICS)
    config = BiTConfig(blocks=BLOCKS_BY_DEPTH[101], factor=3)
    assert from_builtins(BiTConfig, to_builtins(config)) == config
    with pytest.raises(UsageError, match="numerics"):
        from_builtins(BiTConfig, {"numerics": "jax"})


@pytest.mark.parametrize("size", [(64, 64), (47, 70)])
@torch.inference_mode()
def test_parity_with_timm(size):
    resnetv2 = pytest.importorskip("timm.models.resnetv2")
    from timm.layers import StdConv2d

    conv = partial(StdConv2d, eps=1e-8)  # as timm's resnetv2_*_bit set it
    torch.manual_seed(0)
    theirs = resnetv2.ResNetV2(
        (1, 2, 1), (128, 256, 512), num_classes=7, stem_chs=32, stem_type="fixed", conv_layer=conv
    ).eval()
    for parameter in theirs.parameters():
        parameter += torch.randn_like(parameter) * (0.1 if parameter.ndim > 1 else 0.5)
    ours = BiT(BiTConfig(classes=7, blocks=(1, 2, 1), width=32, numerics="timm")).eval()
    state = {}
    for name, tensor in theirs.state_dict().items():
        name = name.replace("stem.", "root.").replace(".blocks.", ".units.").replace("downsample.", "shortcut.")
        head = name.startswith("head.fc.")
        state[name.replace("head.fc.", "head.") if head else f"body.{name}"] = (
            tensor.flatten(1) if name == "head.fc.weight" else tensor
        )
    ours.load_state_dict(state)
    images = torch.randn(2, 3, *size)
    for output, reference in ((ours.body(images), theirs.forward_features(images)), (ours(images), theirs(images))):
        assert ((output - reference).abs().max() / reference.abs().max()).item() <= 1e-5
