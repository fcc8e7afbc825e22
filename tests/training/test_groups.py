"""Weight decay and learning-rate factors of each parameter follow the rules of the authors' code."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.objectives.sessions import MODEL_CONFIG, OBJECTIVE_CONFIGS
from vitreous.models.config import AttentionConfig, MlpConfig, NormConfig, SAMConfig, SwinAttentionConfig, SwinConfig
from vitreous.models.zoo import build_model
from vitreous.nn.pyramid import LayerNorm2d
from vitreous.nn.windows import RelativePositionBias
from vitreous.objectives.base import ObjectiveSetting
from vitreous.objectives.detection import DetectionConfig
from vitreous.objectives.segmentation import SegmentationConfig
from vitreous.training.groups import choose_group, choose_group_kind, learning_rate_factor
from vitreous.training.run import OptimizerConfig

VITDET = SAMConfig(
    image=(64, 64), patch=(16, 16), classes=0, width=32, depth=4, heads=2, class_token=False, pool="mean",
    attention=AttentionConfig("decomposed", window=2, global_blocks=(1, 3)), conv_blocks=(1, 3), position_grid=(2, 2),
    mlp=MlpConfig(64), norm=NormConfig("none"),
)  # fmt: skip
SWIN = SwinConfig(
    image=(64, 64),
    patch_size=(4, 4),
    classes=0,
    width=16,
    blocks=(1, 1, 1, 1),
    heads=(1, 1, 2, 2),
    attention=SwinAttentionConfig(window=2),
)
OBJECTIVE_SETTING = ObjectiveSetting(classes=("a", "b"))


def build_detector():
    """ViTDet with convolutional propagation and Mask R-CNN heads."""
    return DetectionConfig(masks=True, heads="vitdet", width=32, hidden=32).build(
        build_model(VITDET), OBJECTIVE_SETTING
    )


def map_weight_decay(module, rule):
    """Whether each parameter decays, by parameter name."""
    return {name: choose_group_kind(name, p, rule) != "plain" for name, p in module.named_parameters()}


def map_parameter_owners(module):
    """The module of each parameter and its parent module, by parameter name."""
    owners = {}
    for name, submodule in module.named_modules():
        around = module.get_submodule(name.rpartition(".")[0])
        owners |= {
            f"{name}.{key}".lstrip("."): (submodule, around) for key, _ in submodule.named_parameters(recurse=False)
        }
    return owners


def test_vitdet_decays_all_but_layer_norms_of_blocks_and_positions():
    """`weight_decay_norm=0` applies to torch.nn.LayerNorm, not to detectron2's LayerNorm over channels."""
    module = build_detector()
    expected = {
        name: not (isinstance(owner, nn.LayerNorm) and not isinstance(around, LayerNorm2d))
        and not name.endswith("position.table")
        for name, (owner, around) in map_parameter_owners(module).items()
    }
    assert map_weight_decay(module, "vitdet") == expected
    assert sum(not value for value in expected.values()) == 4 * 4 + 1
    assert all(map_weight_decay(module, "all").values())


def test_layer_decay_of_vitdet_does_not_reach_convolutional_propagation():
    """As in `get_vit_lr_decay_rate` of detectron2: blocks decay, except parameters with `.residual.` in the name."""
    options, module = OptimizerConfig(layer_decay=0.5), build_detector()
    for name, _ in module.named_parameters():
        layer = VITDET.depth + 1
        if name.startswith(("model.backbone.position", "model.backbone.projection")):
            layer = 0
        elif ".blocks." in name and ".after." not in name:
            layer = 1 + int(name.partition(".blocks.")[2].partition(".")[0])
        assert learning_rate_factor(options, VITDET, module, name) == 0.5 ** (VITDET.depth + 1 - layer), name


def test_swin_segmentation_decays_biases_but_no_backbone_norms():
    """The `custom_keys` are norm, absolute_pos_embed and relative_position_bias_table; norms of the head are named
    `bn`."""
    module = SegmentationConfig(head="upernet", head_width=1).build(build_model(SWIN), OBJECTIVE_SETTING)
    expected = {
        name: not isinstance(owner, (nn.LayerNorm, RelativePositionBias))
        for name, (owner, _) in map_parameter_owners(module).items()
    }
    assert map_weight_decay(module, "mmdet") == expected
    assert any(name.endswith("qkv.bias") and value for name, value in expected.items())


@pytest.mark.parametrize("name", ["mae", "dino", "dinov2-sinkhorn"])
def test_tokens_positions_and_prototype_lengths_decay_as_published(name):
    """The published code decays tensors with more than one axis; `mask_token` there is (1, D)."""
    config = OBJECTIVE_CONFIGS[name]
    config = replace(config, unit_prototypes=False) if "dino" in name else config
    module = config.build(
        build_model(MODEL_CONFIG.with_options(registers=1, positions={"kind": "learned"}, norm={"layer_scale": 0.1})),
        ObjectiveSetting(),
    )
    decays = {key: value for key, value in map_weight_decay(module, "multi-axis").items() if "teacher" not in key}
    for key, value in decays.items():
        exempt = key.endswith((".bias", ".scale")) or ".norm." in key
        assert value == (not exempt), key
    matrices_only = map_weight_decay(module, "matrices")
    added = {key for key, value in decays.items() if value and not matrices_only[key]}
    assert {"model.prefix", "model.slots", "model.position.table"} <= added


@pytest.mark.parametrize("name", ["dino", "dinov2-sinkhorn"])
def test_prototypes_have_separate_groups(name):
    module = OBJECTIVE_CONFIGS[name].build(build_model(MODEL_CONFIG), ObjectiveSetting())
    options = OptimizerConfig(layer_decay=0.9, rates=(("projection", 0.2),))
    groups = {
        key: choose_group(options, MODEL_CONFIG, module, key, p)
        for key, p in module.named_parameters()
        if p.requires_grad
    }
    frozen = {key for key, group in groups.items() if group.starts_frozen}
    assert frozen == {key for key in groups if "prototypes" in key or "lengths" in key}
    assert len({group.text for group in groups.values()}) == len(set(groups.values()))
    if "mask_token" in groups:
        assert groups["mask_token"].factor == pytest.approx(0.9**3)
        assert groups["model.projection.weight"].factor == pytest.approx(0.2 * 0.9**3)


def test_a_mask_token_is_clipped_with_the_backbone():
    from vitreous.training.flat import FlatParameters

    module = OBJECTIVE_CONFIGS["dinov2"].build(build_model(MODEL_CONFIG), ObjectiveSetting())
    flat = FlatParameters(module, torch.float32, torch.device("cpu"))
    flat.zero_grad()
    gradients = flat.views(flat.master_grad)
    gradients["mask_token"].fill_(1.0)
    gradients["model.projection.weight"].fill_(2.0)
    joint_norm = torch.cat([gradients["mask_token"].flatten(), gradients["model.projection.weight"].flatten()]).norm()
    flat.clip(1.0, "part")
    assert torch.allclose(gradients["mask_token"], torch.full((32,), 1 / joint_norm.item()), rtol=1e-4)
