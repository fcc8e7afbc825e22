"""ViTDet's backbone: windows with unmasked padding, two kinds of propagation across them, and loading of plain ViT
weights."""

from dataclasses import replace

import pytest
import torch

from tests import contracts
from vitreous.errors import UsageError, WeightsError
from vitreous.models.config import (
    AttentionConfig,
    MlpConfig,
    NormConfig,
    PositionConfig,
    SAMConfig,
    ViTConfig,
    transformer_config,
)
from vitreous.models.names import config_from_name
from vitreous.models.zoo import build_model, build_without_init
from vitreous.nn.windows import ConvPropagation
from vitreous.tasks.features import FeatureExtraction
from vitreous.weights.adopt import load_pretrained_weights
from vitreous.weights.inflation import resample_patch_projection

SMALL_CONFIG = SAMConfig(
    image=(32, 32),
    patch=(4, 4),
    classes=0,
    width=16,
    depth=4,
    heads=2,
    class_token=False,
    pool="mean",
    position_grid=(4, 4),
    mlp=MlpConfig(hidden=32),
    norm=NormConfig(final="none"),
    attention=AttentionConfig(kind="decomposed", window=3, global_blocks=(1, 3)),
    positions=PositionConfig(resize="bicubic"),
)
PLAIN_CONFIG = ViTConfig(
    image=(16, 16),
    patch=(4, 4),
    classes=0,
    width=16,
    depth=4,
    heads=2,
    mlp=MlpConfig(hidden=32),
    positions=PositionConfig(resize="bicubic"),
)


@pytest.mark.parametrize(("name", "published"), [("B/16", 85_889_024), ("L/16", 303_432_704), ("H/16", 631_116_800)])
def test_parameter_counts_match_the_published_ones(name, published):
    """detectron2's files contain a position embedding of the pre-training class token, which is unused."""
    config = config_from_name(f"ViTDet-{name}")
    assert (config.image, config.grid, config.table_grid) == ((1024, 1024), (64, 64), (14, 14))
    assert sum(p.numel() for p in build_without_init(config).parameters()) + config.width == published
    assert config.name() == f"ViTDet-{name}"
    convolutional = config.with_options(conv_blocks=config.attention.global_blocks, attention={"global_blocks": ()})
    assert convolutional.name() == f"ViTDet-{name}"


def test_conv_propagation_has_the_published_parameter_count():
    assert sum(p.numel() for p in ConvPropagation(768).parameters()) == 1_920_000


def test_initial_conv_propagation_is_the_identity():
    torch.manual_seed(0)
    x = torch.randn(2, 5, 7, 16)
    assert torch.equal(ConvPropagation(16)(x), x)
    propagation = contracts.randomise(ConvPropagation(16))
    assert not torch.allclose(propagation(x), x, atol=0.1)
    alone = torch.zeros(1, 9, 9, 16)
    alone[0, 4, 4] = 1
    reached = (propagation(alone) - propagation(torch.zeros_like(alone))).detach().abs().amax(-1)[0]
    assert reached[3:6, 3:6].min() > 0 and reached.sum().item() == pytest.approx(reached[3:6, 3:6].sum().item())


def test_vitdet_without_windows_matches_a_plain_vit():
    """With one window over the whole grid and zero tables, tokens equal those of the ViT without a class token."""
    torch.manual_seed(0)
    plain = contracts.randomise(
        build_model(PLAIN_CONFIG.with_options(class_token=False, pool="mean", norm={"final": "none"}))
    ).eval()
    config = SMALL_CONFIG.with_options(image=(16, 16), attention={"window": 4, "global_blocks": ()})
    model = build_model(config).eval()
    load_pretrained_weights(model, make_pretrained_weights(plain))
    images = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(model.features(images), plain.features(images), atol=2e-4, rtol=1e-5)


def make_pretrained_weights(model):
    """A model as weights for `load_pretrained_weights`."""
    from vitreous.data.modalities.images import ImagePreprocess
    from vitreous.weights.adopt import PretrainedWeights

    preprocess = ImagePreprocess(model.config.image, 3, (0.5,) * 3, (0.5,) * 3)
    return PretrainedWeights("memory", "a model", model.config, preprocess, FeatureExtraction(), model.state_dict)


def test_vit_weights_load_without_class_token_and_final_norm():
    torch.manual_seed(0)
    plain, model = (
        contracts.randomise(build_model(PLAIN_CONFIG)),
        build_model(SMALL_CONFIG.with_options(conv_blocks=(2,))),
    )
    adoption = load_pretrained_weights(model, make_pretrained_weights(plain))
    assert sorted(adoption.unused) == ["encoder.norm.bias", "encoder.norm.weight", "prefix"]
    assert all(name.endswith(("rows", "columns")) or ".after." in name for name in adoption.initialised)
    assert torch.equal(model.position.table, plain.position.table) and not adoption.resized
    windowed = model.encoder.blocks[0].attention.part.part.qkv.weight
    assert torch.equal(windowed, plain.encoder.blocks[0].attention.part.qkv.weight)
    larger = build_model(SMALL_CONFIG.with_options(position_grid=()))
    assert load_pretrained_weights(larger, make_pretrained_weights(plain)).resized == "4 -> 8"
    torch.testing.assert_close(larger.position.table, model.position.read((8, 8)))
    with pytest.raises(WeightsError, match=r"unknown encoder\.blocks\.2\.after\.conv1\.weight"):
        load_pretrained_weights(build_model(SMALL_CONFIG), make_pretrained_weights(model))


def test_sam_weights_load_without_the_neck():
    torch.manual_seed(0)
    sam = contracts.randomise(build_model(SMALL_CONFIG.with_options(neck=8, position_grid=())))
    model = build_model(SMALL_CONFIG.with_options(position_grid=(), attention={"window": 5, "global_blocks": (3,)}))
    adoption = load_pretrained_weights(model, make_pretrained_weights(sam))
    assert adoption.unused and all(name.startswith("neck.") for name in adoption.unused) and not adoption.initialised
    tables = (sam.encoder.blocks[1].attention.part.rows, model.encoder.blocks[1].attention.part.part.rows)
    assert [len(table) for table in tables] == [15, 9]


def test_fixed_positions_are_loaded_into_a_table():
    plain = build_model(PLAIN_CONFIG.with_options(positions={"kind": "sincos"}))
    model = build_model(SMALL_CONFIG)
    load_pretrained_weights(model, make_pretrained_weights(plain))
    assert torch.equal(model.position.table, plain.position.read((4, 4)))


def test_resampled_patch_projection_preserves_tokens():
    torch.manual_seed(0)
    weight = torch.randn(8, 3 * 14 * 14)
    larger = resample_patch_projection(weight, 3, (14, 14), (16, 16))
    patch = torch.randn(5, 3, 14, 14)
    enlarged = torch.nn.functional.interpolate(patch, size=(16, 16), mode="bilinear", align_corners=False)
    torch.testing.assert_close(enlarged.flatten(1) @ larger.T, patch.flatten(1) @ weight.T, atol=1e-4, rtol=1e-4)
    plain = build_model(replace(PLAIN_CONFIG, patch=(2, 2), image=(8, 8)))
    adoption = load_pretrained_weights(build_model(SMALL_CONFIG), make_pretrained_weights(plain))
    assert adoption.patches == "2 -> 4" and "patches 2 -> 4" in adoption.text()


def test_layer_decay_matches_the_paper():
    """arXiv:2203.16527, appendix A: 0.7 to the power of a layer's distance from the head; detectron2 excludes
    convolutional propagation."""
    config = config_from_name("ViTDet-B/16").with_options(conv_blocks=(2,))
    layers = {name: config.parameter_layer(name) for name, _ in build_without_init(config).named_parameters()}
    rates = {name: 0.7 ** (config.depth + 1 - layer) for name, layer in layers.items()}
    assert rates["position.table"] == rates["projection.weight"] == pytest.approx(0.009689, abs=1e-6)
    assert rates["encoder.blocks.0.attention.norm.weight"] == pytest.approx(0.013841, abs=1e-6)
    assert rates["encoder.blocks.11.mlp.norm.weight"] == pytest.approx(0.7)
    assert layers["encoder.blocks.2.attention.part.rows"] == 3 and rates["encoder.blocks.2.after.conv1.weight"] == 1
    assert rates["encoder.blocks.11.attention.part.columns"] == pytest.approx(0.7)


def test_conv_propagation_macs_match_its_convolutions():
    config = SMALL_CONFIG.with_options(conv_blocks=(0, 2))
    assert config.macs() - SMALL_CONFIG.macs() == 2 * 64 * (2 * 16 * 8 + 9 * 8 * 8)


@pytest.mark.parametrize(
    "changes", [{"conv_blocks": (4,)}, {"position_grid": (4,)}, {"position_grid": (0, 4)}, {"neck": -1}]
)
def test_invalid_configs_are_rejected(changes):
    with pytest.raises(UsageError):
        SMALL_CONFIG.with_options(**changes)


def test_detector_options_select_the_sam_family():
    grid = {"class_token": False, "pool": "mean", "attention": {"kind": "decomposed"}}
    assert transformer_config(conv_blocks=(1,), **grid).family == "sam"
    with pytest.raises(UsageError, match="decomposed"):
        transformer_config(position_grid=(14, 14), class_token=False, pool="mean")
