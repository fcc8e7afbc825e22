"""Alarms of objectives without labels: raised for features and targets that collapsed, and not for healthy ones."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from vitreous.evaluation.rankme import compute_feature_std, compute_rankme
from vitreous.models.names import config_from_name
from vitreous.models.zoo import build_model
from vitreous.objectives.base import TrainingProgress
from vitreous.objectives.dino import DINO, DINOConfig
from vitreous.objectives.dinov2 import DINOv2, DINOv2Config
from vitreous.objectives.mae import MAE, MAEConfig
from vitreous.objectives.masked import MaskedPatchesObjective

WIDTH, PROTOTYPES = 32, 64
HEAD = {"prototypes": PROTOTYPES, "head_width": 16, "bottleneck": 8}
FIRST, LATER = TrainingProgress(1, 1, 100), TrainingProgress(5, 50, 100)


@pytest.fixture(scope="module")
def objectives():
    """One of each, of a tiny model."""
    config = replace(config_from_name(f"ViT-{WIDTH}x1/8", 16), classes=0)
    return {
        "mae": MAE(build_model(config), MAEConfig(decoder_width=16, decoder_depth=1, decoder_heads=2)),
        "masked": MaskedPatchesObjective(build_model(config)),
        "dino": DINO(build_model(config), DINOConfig(**HEAD)),
        "dinov2": DINOv2(build_model(config), DINOv2Config(**HEAD)),
    }


def figures_of(rows, **more):
    """What an evaluation says of features (n, d)."""
    return {"rankme": compute_rankme(rows), "feature_std": compute_feature_std(rows), **more}


@pytest.mark.parametrize("name", ["mae", "masked", "dino", "dinov2"])
def test_features_that_collapsed_raise_an_alarm_and_healthy_ones_do_not(objectives, name):
    objective, draw = objectives[name], np.random.default_rng(0)
    healthy = draw.normal(size=(200, WIDTH)) + 1.0
    start = {"highest_rankme": 30.0, "first_feature_std": compute_feature_std(healthy)}
    assert not list(objective.warnings(figures_of(healthy, **start), LATER))
    same = np.tile(draw.normal(size=(1, WIDTH)), (200, 1)) + 1e-4 * draw.normal(size=(200, WIDTH))
    found = dict(objective.warnings(figures_of(same, **start), FIRST))  # at the first evaluation, however early
    assert found.keys() == {"same features", "one direction"}
    assert all(objective.collapse_hint in text and "--" in text for text in found.values())
    assert "mean cosine 1.0000, 0.5" in found["same features"] and f"of {WIDTH})" in found["one direction"]
    few = draw.normal(size=(200, 2)) @ draw.normal(size=(2, WIDTH))
    assert dict(objective.warnings(figures_of(few, highest_rankme=25.0), LATER)).keys() == {"fallen rank"}


@pytest.mark.parametrize("name", ["dino", "dinov2"])
def test_where_views_are_compared_a_fall_from_the_first_encoder_is_a_collapse(objectives, name):
    """An untrained encoder may have few directions and features that are nearly the same: only less is an alarm."""
    unit = 1 / math.sqrt(WIDTH)

    def alarms(objective=objectives[name], **scalars):
        return [alarm for alarm, _ in objective.warnings(scalars, FIRST)]

    assert alarms(rankme=3.1, highest_rankme=6.3) == ["fallen rank"]
    assert alarms(rankme=3.1, highest_rankme=6.1) == []  # half is left
    assert alarms(rankme=3.3, highest_rankme=20.0) == []  # more than a tenth of the width
    assert alarms(feature_std=0.06 * unit, first_feature_std=0.11 * unit) == []  # cosine 0.996, and 0.988 before
    assert alarms(feature_std=0.05 * unit, first_feature_std=0.11 * unit) == ["same features"]
    assert alarms(feature_std=0.11 * unit, first_feature_std=0.9 * unit) == []  # 0.988


@pytest.mark.parametrize("name", ["mae", "masked"])
def test_where_pixels_are_restored_features_that_share_much_are_none(objectives, name):
    """MAE on 2,000 images of CIFAR-10, at the start and after 17 steps: it restores pixels all the same."""
    measured = {"rankme": 1.9, "highest_rankme": 8.3, "feature_std": 0.0027, "first_feature_std": 0.0175}
    assert not list(objectives[name].warnings(measured, FIRST))


def test_the_first_evaluation_of_a_run_that_collapsed_is_an_alarm(objectives):
    """DINO without KoLeo on 9,000 images of CIFAR-10, width 128: at the start, after 66 steps and after 100."""
    start = {"highest_rankme": 22.3, "first_feature_std": 0.0227}
    dino = DINO(
        build_model(replace(config_from_name("ViT-128x1/8", 16), classes=0)), DINOConfig(**HEAD, batch_norm=True)
    )
    ((name, text),) = dino.warnings({"rankme": 8.83, "feature_std": 0.033} | start, FIRST)
    assert name == "fallen rank" and text.startswith("features have lost most directions (RankMe 22.3, now 8.8 of 128)")
    ((name, _),) = dino.warnings({"rankme": 5.09, "feature_std": 0.0234} | start, FIRST)
    assert name == "fallen rank"
    with_koleo = {"rankme": 51.3, "feature_std": 0.0804}  # after 53 steps
    assert not list(dino.warnings(with_koleo | start, FIRST))


def test_an_alarm_names_the_cause_and_the_setting(objectives):
    build_dino = objectives["dino"].config
    for settings, cause in (
        ({}, "no loss term prevents it; use --objective.koleo 0.1"),
        (
            {"batch_norm": True},
            "the head's batch norm hides the component that all features share; use --objective.koleo 0.1",
        ),
        ({"batch_norm": True, "koleo": 0.1}, "raise --objective.koleo (now 0.1)"),
    ):
        objective = DINO(objectives["dino"].model, replace(build_dino, **settings))
        assert objective.collapse_hint.startswith(cause)
    assert objectives["dinov2"].collapse_hint.startswith("raise --objective.koleo (now 0.1)")


@pytest.mark.parametrize("name", ["dino", "dinov2"])
def test_targets_that_collapsed_raise_an_alarm(objectives, name):
    objective, most = objectives[name], math.log(PROTOTYPES)
    healthy = {"teacher_entropy": 0.6 * most, "prototype_entropy": 0.9 * most, "feature_std": 0.1}
    assert not list(objective.warnings(healthy, LATER))
    uniform = {**healthy, "teacher_entropy": most, "prototype_entropy": most}
    assert dict(objective.warnings(uniform, LATER)).keys() == {"uniform teacher"}
    one = {**healthy, "teacher_entropy": 0.0, "prototype_entropy": 0.0}
    assert dict(objective.warnings(one, LATER)).keys() == {"one prototype"}
    alike = {**healthy, "feature_std": 0.0}
    assert dict(objective.warnings(alike, LATER)).keys() == {"same features"}
