"""Alarms of objectives without labels: raised for features and targets that collapsed, and not for healthy ones."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from vitreous.evaluation.rankme import feature_deviation, rankme
from vitreous.models.names import configure
from vitreous.models.zoo import build
from vitreous.objectives.base import Progress
from vitreous.objectives.dino import DINO, DINOConfig
from vitreous.objectives.dinov2 import DINOv2, DINOv2Config
from vitreous.objectives.mae import MAE, MAEConfig
from vitreous.objectives.masked import MaskedPatches

WIDTH, PROTOTYPES = 32, 64
HEAD = {"prototypes": PROTOTYPES, "head_width": 16, "bottleneck": 8}
LATER = Progress(5, 50, 100)


@pytest.fixture(scope="module")
def objectives():
    """One of each, of a tiny model."""
    config = replace(configure(f"ViT-{WIDTH}x1/8", 16), classes=0)
    return {
        "mae": MAE(build(config), MAEConfig(decoder_width=16, decoder_depth=1, decoder_heads=2)),
        "masked": MaskedPatches(build(config)),
        "dino": DINO(build(config), DINOConfig(**HEAD)),
        "dinov2": DINOv2(build(config), DINOv2Config(**HEAD)),
    }


def figures_of(rows, **more):
    """What an evaluation says of features (n, d)."""
    return {"rankme": rankme(rows), "feature_deviation": feature_deviation(rows), **more}


@pytest.mark.parametrize("name", ["mae", "masked", "dino", "dinov2"])
def test_features_that_collapsed_raise_an_alarm_and_healthy_ones_do_not(objectives, name):
    objective, draw = objectives[name], np.random.default_rng(0)
    healthy = draw.normal(size=(200, WIDTH)) + 1.0
    assert not list(objective.warnings(figures_of(healthy, highest_rankme=30.0), LATER))
    same = np.tile(draw.normal(size=(1, WIDTH)), (200, 1)) + 1e-4 * draw.normal(size=(200, WIDTH))
    found = dict(objective.warnings(figures_of(same), LATER))
    assert found.keys() == {"same features", "one direction"}
    assert all(objective.mends in text and "--" in text for text in found.values())
    few = draw.normal(size=(200, 2)) @ draw.normal(size=(2, WIDTH))
    assert dict(objective.warnings(figures_of(few, highest_rankme=25.0), LATER)).keys() == {"fallen rank"}
    assert not list(objective.warnings(figures_of(few, highest_rankme=4.0), LATER))
    assert not list(objective.warnings(figures_of(same), Progress(0, 1, 100)))  # the run has hardly begun


@pytest.mark.parametrize("name", ["dino", "dinov2"])
def test_targets_that_collapsed_raise_an_alarm(objectives, name):
    objective, most = objectives[name], math.log(PROTOTYPES)
    healthy = {"teacher_entropy": 0.6 * most, "prototype_entropy": 0.9 * most, "feature_deviation": 0.1}
    assert not list(objective.warnings(healthy, LATER))
    uniform = {**healthy, "teacher_entropy": most, "prototype_entropy": most}
    assert dict(objective.warnings(uniform, LATER)).keys() == {"uniform teacher"}
    one = {**healthy, "teacher_entropy": 0.0, "prototype_entropy": 0.0}
    assert dict(objective.warnings(one, LATER)).keys() == {"one prototype"}
    alike = {**healthy, "feature_deviation": 0.0}
    assert dict(objective.warnings(alike, LATER)).keys() == {"same features"}
