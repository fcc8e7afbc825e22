"""Attributes that every model config has, as a field, constant or property; type checkers do not compare these."""

from __future__ import annotations

import pytest

from vitreous.models.config import ForeignConfig, ModelConfig
from vitreous.models.configs.groups import AttentionGroup, ConfigGroup, PositionGroup
from vitreous.models.families import FAMILIES, config_type
from vitreous.models.names import config_from_name

NAMES = ("ViT-B/16", "R50+ViT-B/16", "Conv+ViT-S/16", "Axial-ViT-B/16", "CLIP-B/16", "SAM-B/16", "ViViT-B/16x2")
NAMES += ("VideoMAE-B/16x2", "BiT-R50x1", "Swin-T/4", "DiT-S/4", "SigLIP-B/16-text")
CONFIGS = [config_from_name(name) for name in NAMES]
CONFIGS += [config_type(family)() for family in ("adapter", "segmenter", "detector")]
CONFIGS += [ForeignConfig("a module", (8, 8), (4, 4), 6)]
REQUIRED = {"family": str, "image": tuple, "patch": tuple, "channels": int, "classes": int, "width": int, "depth": int}
LENGTHS = ("image", "patch", "position_grid", "global_blocks")


def get_declared_types(base_class: type) -> dict[str, type]:
    """The types of the defaults of a base class."""
    values = {name: value for name, value in vars(base_class).items() if not name.startswith("__")}
    value_types = (bool, int, float, str, tuple, ConfigGroup)
    return {name: type(value) for name, value in values.items() if isinstance(value, value_types)}


def check_values(owner: object, types: dict[str, type]) -> None:
    """Check the types of attributes; a bool is not accepted as an integer."""
    for name, declared in types.items():
        value = getattr(owner, name)
        assert isinstance(value, declared) and isinstance(value, bool) == (declared is bool), name
        assert name not in LENGTHS or all(type(length) is int for length in value), name


def test_every_family_is_covered():
    assert {config.family for config in CONFIGS} == set(FAMILIES)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name())
def test_values_have_the_types_of_the_defaults(config):
    types = get_declared_types(ModelConfig)
    assert {"prefix", "front", "positions", "has_attention", "can_be_stored"} <= types.keys()
    check_values(config, REQUIRED | types)
    check_values(config.positions, get_declared_types(PositionGroup))
    check_values(config.attention, get_declared_types(AttentionGroup))
    assert config.backbone is None or isinstance(config.backbone, ModelConfig)
