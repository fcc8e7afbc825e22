import math

import pytest
import torch

from vitreous.errors import UsageError
from vitreous.models.config import transformer_config
from vitreous.models.initial import init_mimetic
from vitreous.models.names import MODEL_NAMES, config_from_name
from vitreous.models.zoo import create_untrained_model

#: arXiv:2010.11929 and its code: without a head, with 1000 classes, with 1000 classes and the tanh layer
PARAMETER_COUNTS = {
    "ViT-Ti/16": (5_524_416, 5_717_416, 5_754_472),
    "ViT-S/32": (22_493_952, 22_878_952, 23_026_792),
    "ViT-S/16": (21_665_664, 22_050_664, 22_198_504),
    "ViT-B/32": (87_455_232, 88_224_232, 88_814_824),
    "ViT-B/16": (85_798_656, 86_567_656, 87_158_248),
    "ViT-B/8": (85_807_872, 86_576_872, 87_167_464),
    "ViT-L/32": (305_510_400, 306_535_400, 307_585_000),
    "ViT-L/16": (303_301_632, 304_326_632, 305_376_232),
    "ViT-H/14": (630_764_800, 632_045_800, 633_685_480),
    "ViT-g/14": (1_011_202_432, 1_012_611_432, None),
}
#: the same with the 21,843 classes of ImageNet-21k, and with the tanh layer before them
COUNTS_21K = {
    "ViT-Ti/16": (9_740_115, 9_777_171),
    "ViT-S/32": (30_903_507, 31_051_347),
    "ViT-S/16": (30_075_219, 30_223_059),
    "ViT-B/32": (104_252_499, 104_843_091),
    "ViT-B/16": (102_595_923, 103_186_515),
    "ViT-B/8": (102_605_139, 103_195_731),
    "ViT-L/32": (327_899_475, 328_949_075),
    "ViT-L/16": (325_690_707, 326_740_307),
    "ViT-H/14": (658_745_683, 660_385_363),
    "ViT-G/14": (1_842_775_680 + 21_843 * 1665, None),
}
PUBLISHED_GMACS = {
    ("ViT-Ti/16", 224): 1.254,
    ("ViT-B/16", 384): 55.484,
    ("ViT-L/16", 512): 361.986,
    ("ViT-H/14", 518): 1016.717,
    ("ViT-B/8", 224): 78.148,
}


def count_parameters(*arguments, **changes):
    with torch.device("meta"):
        return sum(p.numel() for p in create_untrained_model(*arguments, **changes).parameters())


@pytest.mark.parametrize("name", PARAMETER_COUNTS)
def test_parameter_counts_are_exact(name):
    headless, headed, pretraining = PARAMETER_COUNTS[name]
    width = config_from_name(name).width
    assert count_parameters(name, num_classes=0) == headless
    assert count_parameters(name) == headed
    if pretraining:
        assert count_parameters(name, head={"representation": width}) == pretraining


@pytest.mark.parametrize("name", COUNTS_21K)
def test_imagenet_21k_parameter_counts(name):
    headed, pretraining = COUNTS_21K[name]
    assert count_parameters(name, num_classes=21843) == headed
    if pretraining:
        assert (
            count_parameters(name, num_classes=21843, head={"representation": config_from_name(name).width})
            == pretraining
        )


def test_parameter_counts_at_other_sizes_and_poolings():
    assert count_parameters("ViT-B/16", 384) == 86_859_496
    assert count_parameters("ViT-L/16", 512) == 305_174_504
    assert count_parameters("ViT-H/14", 518) == 633_470_440
    mean = {"pool": "mean", "class_token": False, "positions": {"slots": 0}}
    assert count_parameters("ViT-S/16", **mean) == 22_049_896
    assert count_parameters("ViT-B/32", **mean) == 88_222_696


@pytest.mark.parametrize("name,size", PUBLISHED_GMACS)
def test_cost_matches_the_published_formula(name, size):
    assert config_from_name(name, size).macs() / 1e9 == pytest.approx(PUBLISHED_GMACS[name, size], abs=6e-4)


@pytest.mark.parametrize(
    "spelling", ["ViT-B/16", "b/16", "vit_base_patch16_224", "vit_b_16", "google/vit-base-patch16-224", "VIT-B/16"]
)
def test_model_name_spellings_are_recognised(spelling):
    config = config_from_name(spelling)
    assert config.name() == "ViT-B/16"
    assert config.image == (224, 224)


def test_custom_model_names_are_parsed():
    config = config_from_name("ViT-96x3/4", 32)
    assert (config.width, config.depth, config.heads, config.grid) == (96, 3, 3, (8, 8))
    assert config.name() == "ViT-96x3/4"
    same = {name: config_from_name(name).name() for name in MODEL_NAMES}
    # plain ViTs with other training methods
    plain_vits = {name for name in MODEL_NAMES if name.startswith(("DINO-", "MAE-"))}
    assert {name for name, parsed in same.items() if parsed != name} == plain_vits


@pytest.mark.parametrize(
    "wrong,hint", [("ViT-Q/16", "did you mean ViT-"), ("resnet50", "vitreous models"), ("ViT-B/0", "1 pixel or more")]
)
def test_unknown_names_are_rejected_with_a_suggestion(wrong, hint):
    with pytest.raises(UsageError) as error:
        config_from_name(wrong)
    assert hint in error.value.hint


def test_unknown_fields_are_rejected():
    with pytest.raises(UsageError, match="a ViT has no option widht") as error:
        create_untrained_model("ViT-B/16", widht=3)
    assert "did you mean width" in error.value.hint


def test_indivisible_image_size_error_suggests_valid_sizes():
    with pytest.raises(UsageError) as error:
        create_untrained_model("ViT-B/16", 222)
    assert str(error.value) == "image size 222 is not divisible by patch size 16\n  use image_size=224, or patch_size=6"
    with pytest.raises(UsageError, match="use image_size=8, or patch_size=3"):
        create_untrained_model("ViT-mu/2", 9)
    model = create_untrained_model("ViT-mu/8", 32, 3)
    with pytest.raises(UsageError, match="image size 36x32"):
        model(torch.randn(1, 3, 36, 32))
    with pytest.raises(ValueError, match="takes 3 channels, the images have 1"):
        model(torch.randn(1, 1, 32, 32))


@pytest.mark.parametrize("changes", [{"width": 10, "heads": 3}, {"class_token": False}, {"depth": 0}, {"classes": -1}])
def test_invalid_configs_are_rejected(changes):
    with pytest.raises(UsageError):
        transformer_config(**changes)


def test_model_methods_compose_to_the_forward_pass():
    model = create_untrained_model("ViT-mu/8", (32, 48), 5, registers=2).eval()
    images = torch.randn(2, 3, 32, 48)
    tokens = model.project(images)
    assert tokens.shape == (2, 4, 6, 32)
    placed = model.add_positions(tokens)
    assert placed.shape == (2, 24, 32)
    encoded = model.encode(placed)
    assert torch.equal(encoded, model.features(images))
    assert encoded.shape == (2, 3 + 24, 32)
    assert model.encode(placed[:, :10]).shape == (2, 3 + 10, 32)
    assert torch.equal(model.classify(model.pool(encoded)), model(images))


def test_initialisation_matches_the_paper():
    torch.manual_seed(0)
    model = create_untrained_model("ViT-S/16", head={"representation": 384})
    block = model.encoder.blocks[0]
    assert model.projection.weight.std().item() == pytest.approx((16 * 16 * 3) ** -0.5, rel=0.02)
    assert model.position.table.std().item() == pytest.approx(0.02, rel=0.02)
    assert model.representation.weight.std().item() == pytest.approx(384**-0.5, rel=0.02)
    assert block.mlp.part.fc1.weight.abs().max().item() == pytest.approx(math.sqrt(6 / (384 + 1536)), rel=0.01)
    assert block.mlp.part.fc1.bias.std().item() == pytest.approx(1e-6, rel=0.1)
    zeros = [model.prefix, model.projection.bias, block.attention.part.qkv.bias, model.head.weight, model.head.bias]
    assert all(not tensor.any() for tensor in zeros)


def test_mimetic_attention_products_are_near_the_identity():
    torch.manual_seed(0)
    model = create_untrained_model("ViT-64x1/4", 16)
    init_mimetic(model)
    attention = model.encoder.blocks[0].attention.part
    q, k, v = attention.qkv.weight.detach().chunk(3)
    values = v.T @ attention.out.weight.T
    assert values.diagonal().mean().item() == pytest.approx(-0.4, abs=0.05)
    assert values[~torch.eye(64, dtype=torch.bool)].std().item() == pytest.approx(0.4 * 64**-0.5, rel=0.25)
    head = q[:32].T @ k[:32]
    assert torch.linalg.matrix_rank(head) == 32
    assert head.diagonal().mean() > 0.3
    assert torch.isfinite(model(torch.randn(1, 3, 16, 16))).all()


def test_meta_models_have_shapes_and_import_no_compiler():
    """In a separate process: a command that only reads a bundle must not spend two seconds on unnecessary imports."""
    import subprocess
    import sys

    script = """
import sys
from vitreous.models.names import config_from_name
from vitreous.models.zoo import build_model, build_without_init
config = config_from_name("ViT-mu/16").with_options(
    pool="attention", registers=2, head={"representation": 5}, norm={"layer_scale": 0.1}
)
model, real = build_without_init(config), build_model(config)
assert all(p.is_meta for p in model.parameters())
assert {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in real.named_parameters()}
model.load_state_dict(real.state_dict(), assign=True)
assert all(a.equal(b) for a, b in zip(model.parameters(), real.parameters()))
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(
    "options", [{"attention": {"kind": "rotary"}}, {"positions": {"kind": "axes"}, "width": 65, "heads": 5}]
)
def test_sizes_that_layers_do_not_support_are_usage_errors(options):
    with pytest.raises(UsageError, match=r"cannot be built: .*(channels per head|not divisible)"):
        create_untrained_model("ViT-66x2/8", image_size=16, num_classes=2, **{"heads": 2} | options)
