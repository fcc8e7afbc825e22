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
FIRST, LATER = Progress(1, 1, 100), Progress(5, 50, 100)


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
    start = {"highest_rankme": 30.0, "first_deviation": feature_deviation(healthy)}
    assert not list(objective.warnings(figures_of(healthy, **start), LATER))
    same = np.tile(draw.normal(size=(1, WIDTH)), (200, 1)) + 1e-4 * draw.normal(size=(200, WIDTH))
    found = dict(objective.warnings(figures_of(same, **start), FIRST))  # at the first evaluation, however early
    assert found.keys() == {"same features", "one direction"}
    assert all(objective.mends in text and "--" in text for text in found.values())
    assert "mean cosine 1.0000, 0.5" in found["same features"] and f"of {WIDTH})" in found["one direction"]
    few = draw.normal(size=(200, 1)) @ draw.normal(size=(1, WIDTH)) + 0.01 * draw.normal(size=(200, WIDTH))
    assert dict(objective.warnings(figures_of(few, highest_rankme=25.0), LATER)).keys() == {"fallen rank"}


def test_a_fall_is_measured_from_the_encoder_that_the_run_starts_with(objectives):
    """An untrained encoder may have few directions and features that are nearly the same: only less is an alarm."""
    objective, at = objectives["mae"], 1 / math.sqrt(WIDTH)

    def alarms(**scalars):
        return [name for name, _ in objective.warnings(scalars, FIRST)]

    assert alarms(rankme=1.5, highest_rankme=6.1, feature_deviation=0.2 * at, first_deviation=0.2 * at) == [
        "fallen rank"
    ]
    assert alarms(rankme=1.5, highest_rankme=5.9) == []  # more than a quarter is left
    assert alarms(rankme=1.7, highest_rankme=20.0) == []  # a quarter is not, but more than a twentieth of the width
    assert alarms(feature_deviation=0.06 * at, first_deviation=0.11 * at) == []  # mean cosine 0.996, and 0.988 before
    assert alarms(feature_deviation=0.05 * at, first_deviation=0.11 * at) == ["same features"]
    assert alarms(feature_deviation=0.11 * at, first_deviation=0.9 * at) == []  # mean cosine 0.988


def test_an_alarm_names_the_cause_and_the_setting(objectives):
    build_dino = objectives["dino"].config
    for settings, cause in (
        ({}, "no loss forbids it; use --objective.koleo 0.1"),
        ({"batch_norm": True}, "the head's batch norm hides what all features share; use --objective.koleo 0.1"),
        ({"batch_norm": True, "koleo": 0.1}, "raise --objective.koleo (now 0.1)"),
    ):
        objective = DINO(objectives["dino"].model, replace(build_dino, **settings))
        assert objective.mends.startswith(cause)
    assert objectives["dinov2"].mends.startswith("raise --objective.koleo (now 0.1)")


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
