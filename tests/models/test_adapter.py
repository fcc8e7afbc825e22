"""ViT-Adapter: published sizes, an unchanged ViT, and feature maps of four strides."""

from dataclasses import replace

import pytest
import torch

from tests import contracts
from vitreous.config import from_builtins, to_builtins
from vitreous.errors import UsageError
from vitreous.models.config import AdapterConfig, ModelConfig, transformer_config
from vitreous.models.configs.adapter import add_adapter
from vitreous.models.configs.hybrid import ConvStemConfig
from vitreous.models.names import config_from_name
from vitreous.models.zoo import build_model, build_without_init
from vitreous.nn.adapter import ReferencePoints
from vitreous.nn.frozen import freeze_for_inference

SMALL_VIT_OPTIONS = {"classes": 0, "width": 16, "depth": 5, "heads": 2, "mlp": {"hidden": 32}}
MEAN_POOL_OPTIONS = SMALL_VIT_OPTIONS | {"class_token": False, "pool": "mean", "norm": {"final": "none"}}
ADAPTER_OPTIONS = {"heads": 2, "ratio": 0.5, "prior": 8}
BACKBONES = {
    "plain": transformer_config(image=(64, 96), patch=(16, 16), **MEAN_POOL_OPTIONS),
    "tokens in front": transformer_config(
        **SMALL_VIT_OPTIONS, image=(64, 96), patch=(8, 8), registers=2, norm={"layer_scale": 1.0}
    ),
    "windows and tokens": transformer_config(
        **SMALL_VIT_OPTIONS, image=(64, 96), patch=(8, 8), attention={"window": 3, "global_blocks": (4,)}
    ),
    "patches of 14": transformer_config(image=(56, 84), patch=(14, 14), **SMALL_VIT_OPTIONS),
    "vitdet": transformer_config(
        family="sam",
        **MEAN_POOL_OPTIONS,
        image=(64, 96),
        patch=(8, 8),
        attention={"window": 3, "global_blocks": (1, 3)},
    ),
    "hybrid": transformer_config(
        family="hybrid",
        image=(64, 96),
        patch=(8, 8),
        stem=ConvStemConfig(widths=(4, 8), blocks=(0, 0)),
        **SMALL_VIT_OPTIONS,
    ),
}


def build_adapter(name, norm="group", gates=True):
    torch.manual_seed(0)
    model = build_model(AdapterConfig(backbone=BACKBONES[name], norm=norm, **ADAPTER_OPTIONS))
    if gates:
        contracts.randomise(model)
    return model.eval()


PUBLISHED_PARAMETERS = {
    "Ti": (7_966_640, 1_171_520, 1_116_912),
    "S": (27_503_888, 1_307_456, 3_928_272),
    "B": (99_495_392, 1_579_328, 9_732_768),
}


@pytest.mark.parametrize("size", PUBLISHED_PARAMETERS)
def test_parameter_counts_match_the_published_ones(size):
    plain = {"classes": 0, "class_token": False, "pool": "mean", "norm": {"final": "none", "layer_scale": 1.0}}
    config = add_adapter(config_from_name(f"ViT-{size}/16").with_options(**plain))
    model = build_without_init(config)
    total, prior, interactions = (
        sum(p.numel() for p in module.parameters()) for module in (model, model.prior, model.interactions)
    )
    assert (total + config.backbone.width, prior, interactions) == PUBLISHED_PARAMETERS[size]
    assert config.name() == f"ViT-{size}/16 with an adapter"
    assert config.blocks_per_interaction == (3, 3, 3, 3) and config.strides == (4, 8, 16, 32)


@pytest.mark.parametrize("name", BACKBONES)
def test_zero_gates_leave_the_vit_unchanged(name):
    model, images = build_adapter(name, gates=False), torch.randn(2, 3, *BACKBONES[name].image)
    contracts.randomise(model.backbone)
    levels = [torch.randn_like(x) for x in model.prior(torch.randn(2, 3, 64, 96))[1:]]
    tokens = model.run_interactions(images, levels)[0][-1]
    plain = model.backbone.features_at(images, [BACKBONES[name].patch[0]])[0]
    assert torch.equal(tokens.movedim(1, -1), plain)
    for interaction in model.interactions:
        torch.nn.init.ones_(interaction.injector.gate)
    assert not torch.allclose(model.run_interactions(images, levels)[0][-1].movedim(1, -1), plain, atol=1e-3)


@pytest.mark.parametrize("name", BACKBONES)
def test_adapter_maps_fulfil_the_model_contract(name):
    model = build_adapter(name).double()  # float64, because random offsets amplify rounding errors
    images = torch.randn(2, 3, *BACKBONES[name].image, dtype=torch.float64)
    contracts.check_feature_maps_match_config(model, images)
    contracts.check_batch_independence(model, images)
    contracts.check_unused_parameters_are_frozen(model, images)
    model, images = model.float(), images.float()
    contracts.check_state_and_config_round_trip(model, images)
    assert from_builtins(ModelConfig, to_builtins(model.config)) == model.config
    maps = model.features_at(images, model.config.strides)
    assert all(x.shape[-1] == 16 and torch.isfinite(x).all() for x in maps)


def add_tokens_as_authors(model, images, per_interaction):
    """Add the tokens to our prior and interactions as the authors do (czczup/ViT-Adapter, vit_adapter.py, end of
    `forward`).

    Their segmentation backbone resizes the tokens after interaction i for map i, their detection backbone the last
    tokens for every map; both resize by a factor, not to a size.
    """
    vit, blocks = model.backbone, list(model.backbone.encoder.blocks)
    c1, *levels = model.prior(images)
    c = torch.cat([(x.flatten(2).mT + e) for x, e in zip(levels, model.level, strict=True)], 1)
    reference_points, outs = ReferencePoints(tuple(images.shape[2:]), model.config.backbone.patch, images.device), []
    x = vit.add_positions(vit.project(images))
    for interaction in model.interactions:
        x = interaction.inject(x, c, reference_points)
        for _ in range(len(model.backbone.encoder.blocks) // 4):
            x = blocks.pop(0)(x)
        c = interaction.extract_features(c, x, reference_points)
        outs.append(x.mT.unflatten(2, reference_points.grid))
    c2, c3, c4 = (
        level.mT.unflatten(2, grid)
        for level, grid in zip(
            c.split([h * w for h, w in reference_points.grids], 1), reference_points.grids, strict=True
        )
    )
    c1 = model.up(c2) + c1
    x1, x2, x3, x4 = outs if per_interaction else outs[-1:] * 4

    def rescale(x, factor):
        return torch.nn.functional.interpolate(x, scale_factor=factor, mode="bilinear", align_corners=False)

    sums = (c1 + rescale(x1, 4), c2 + rescale(x2, 2), c3 + x3, c4 + rescale(x4, 0.5))
    return [norm(y) for norm, y in zip(model.norms, sums, strict=True)]


def compute_relative_difference(x, reference):
    """The relative difference of two tensors in Euclidean norm."""
    return ((x - reference).norm() / reference.norm()).item()


@pytest.mark.parametrize("token_source", ["last", "interaction"])
@pytest.mark.parametrize("norm", ["group", "batch"])
def test_tokens_are_added_as_in_the_authors_detection_and_segmentation_backbones(token_source, norm):
    backbone = transformer_config(image=(64, 96), patch=(16, 16), **MEAN_POOL_OPTIONS | {"depth": 8})
    torch.manual_seed(0)
    config = AdapterConfig(backbone=backbone, norm=norm, token_source=token_source, **ADAPTER_OPTIONS)
    model, images = contracts.randomise(build_model(config)).eval(), torch.randn(2, 3, 64, 96)
    maps = [x.movedim(-1, 1) for x in model.features_at(images, config.strides)]
    expected = add_tokens_as_authors(model, images, token_source == "interaction")
    assert max(map(compute_relative_difference, maps, expected)) <= 1e-5
    reference = add_tokens_as_authors(model, images, token_source == "last")
    differences = [compute_relative_difference(x, y) for x, y in zip(maps, reference, strict=True)]
    assert min(differences[:3]) > 0.1 and differences[3] < 1e-5  # the coarsest map gets the last tokens in both
    contracts.check_feature_maps_match_config(model, images)
    contracts.check_unused_parameters_are_frozen(model, images)


@pytest.mark.parametrize(
    ("interactions", "expected"), [(1, (0, 0, 0, 0)), (2, (0, 0, 1, 1)), (3, (0, 1, 2, 2)), (4, (0, 1, 2, 3))]
)
def test_interactions_are_spread_over_the_maps(interactions, expected):
    config = AdapterConfig(
        backbone=BACKBONES["plain"], interactions=interactions, token_source="interaction", **ADAPTER_OPTIONS
    )
    assert config.token_interactions == expected
    assert replace(config, token_source="last").token_interactions == (interactions - 1,) * 4


def test_an_adapter_is_exported():
    backbone = transformer_config(image=(32, 32), patch=(16, 16), **SMALL_VIT_OPTIONS | {"depth": 1})
    model = contracts.randomise(build_model(AdapterConfig(backbone=backbone, interactions=1, **ADAPTER_OPTIONS)))
    contracts.check_export_matches(model, torch.randn(2, 3, 32, 32))


def test_reference_points_cover_all_levels():
    reference_points = ReferencePoints((64, 96), (16, 16), torch.device("cpu"))
    assert len(reference_points.level_points) == 21 * 2 * 3 and len(reference_points.token_points) == 4 * 6
    model = build_adapter("plain")
    levels = model.prior(torch.randn(1, 3, 64, 96))[1:]
    assert model.run_interactions(torch.randn(1, 3, 64, 96), levels)[1].shape == (1, 21 * 2 * 3, 16)
    # a point of an image has the same coordinates for any patch size and padding
    ragged = ReferencePoints((56, 84), (14, 14), torch.device("cpu"))
    assert torch.allclose(ragged.token_points[0, 0], torch.tensor([7 / 96, 7 / 64]))
    assert torch.allclose(ragged.level_points[0, 0], torch.tensor([4 / 84, 4 / 56]))


def test_the_prior_learns_while_gates_are_zero():
    model = build_adapter("plain", gates=False).train()
    weights = [torch.randn(1, *shape, 16) for shape in ((16, 24), (8, 12), (4, 6), (2, 3))]
    maps = model.features_at(torch.randn(1, 3, 64, 96), model.config.strides)
    sum((x * w).sum() for x, w in zip(maps, weights, strict=True)).backward()
    silent = {name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0}
    assert not [name for name in silent if not name.startswith("interactions.")]
    # gates are zero, and so are the layers from which new queries compute their sampling offsets
    assert all((".injector." in name and ".gate" not in name) or ".norm_levels." in name for name in silent)


def test_batch_norm_statistics_are_stored_in_the_state():
    model, images = build_adapter("plain", norm="batch", gates=False), torch.randn(4, 3, 64, 96)
    statistics = {name: x.clone() for name, x in model.state_dict().items() if "running" in name}
    assert len(statistics) == 2 * (6 + 4)
    model.eval()(images)
    assert all(torch.equal(model.state_dict()[name], x) for name, x in statistics.items())
    model.train()(images)
    assert not any(torch.equal(model.state_dict()[name], x) for name, x in statistics.items())
    half = build_model(model.config).to(torch.bfloat16).eval()
    assert half.features_at(images.to(torch.bfloat16), [32])[0].dtype == torch.bfloat16
    group = build_model(replace(model.config, norm="group"))
    assert sum(p.numel() for p in group.parameters()) == sum(p.numel() for p in model.parameters())


def test_layer_decay_applies_only_to_the_vit():
    config = AdapterConfig(backbone=BACKBONES["plain"], **ADAPTER_OPTIONS)
    names = [name for name, _ in build_without_init(config).named_parameters()]
    layers = {name: config.parameter_layer(name) for name in names}
    assert layers["backbone.projection.weight"] == layers["backbone.position.table"] == 0
    assert layers["backbone.encoder.blocks.4.mlp.norm.weight"] == 5
    assert {layers[name] for name in names if not name.startswith("backbone.")} == {6}


def test_cost_grows_with_the_image_and_counts_the_vit():
    config = AdapterConfig(backbone=BACKBONES["plain"], **ADAPTER_OPTIONS)
    first_macs = 9 * 3 * 8 * 32 * 48  # of the first convolution
    assert config.macs() - config.backbone.macs() > first_macs
    assert config.macs((128, 192)) > 3.5 * config.macs()


def test_frozen_copies_agree():
    model, images = build_adapter("tokens in front"), torch.randn(1, 3, 64, 96)
    with torch.inference_mode():
        maps = model.features_at(images, [4, 32])
        for dtype, limit in ((torch.float32, 1e-4), (torch.bfloat16, 0.1)):
            again = freeze_for_inference(model, dtype).features_at(images, [4, 32])
            for x, y in zip(maps, again, strict=True):
                assert torch.allclose(x, y.float(), atol=limit * x.abs().max().item())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backbone": transformer_config(image=(64, 64), **SMALL_VIT_OPTIONS | {"classes": 3})}, "classes=0"),
        ({"backbone": transformer_config(image=(4, 8, 8), patch=(2, 4, 4), **SMALL_VIT_OPTIONS)}, "volumes"),
        ({"heads": 3}, "heads"),
        ({"interactions": 6}, "interactions=5"),
        ({"points": 0}, "above 0"),
    ],
)
def test_invalid_adapter_configs_are_rejected(changes, message):
    with pytest.raises(UsageError) as caught:
        AdapterConfig(**{"backbone": BACKBONES["plain"], **ADAPTER_OPTIONS, **changes})
    assert message in f"{caught.value.message} {caught.value.hint}"
