"""Collapse warnings of self-supervised objectives: raised for collapsed features and targets, not for healthy ones."""

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

EMBED_DIM, NUM_PROTOTYPES = 32, 64
HEAD_OPTIONS = {"prototypes": NUM_PROTOTYPES, "head_width": 16, "bottleneck": 8}
EARLY_PROGRESS, LATER_PROGRESS = TrainingProgress(1, 1, 100), TrainingProgress(5, 50, 100)


@pytest.fixture(scope="module")
def objectives():
    """Return one objective of each kind with a tiny model."""
    config = replace(config_from_name(f"ViT-{EMBED_DIM}x1/8", 16), classes=0)
    return {
        "mae": MAE(build_model(config), MAEConfig(decoder_width=16, decoder_depth=1, decoder_heads=2)),
        "masked": MaskedPatchesObjective(build_model(config)),
        "dino": DINO(build_model(config), DINOConfig(**HEAD_OPTIONS)),
        "dinov2": DINOv2(build_model(config), DINOv2Config(**HEAD_OPTIONS)),
    }


def compute_feature_metrics(rows, **metrics):
    """Return an evaluation's metrics of features (n, d)."""
    return {"rankme": compute_rankme(rows), "feature_std": compute_feature_std(rows), **metrics}


@pytest.mark.parametrize("name", ["mae", "masked", "dino", "dinov2"])
def test_only_collapsed_features_raise_a_warning(objectives, name):
    objective, draw = objectives[name], np.random.default_rng(0)
    healthy = draw.normal(size=(200, EMBED_DIM)) + 1.0
    start = {"highest_rankme": 30.0, "first_feature_std": compute_feature_std(healthy)}
    assert not list(objective.warnings(compute_feature_metrics(healthy, **start), LATER_PROGRESS))
    identical = np.tile(draw.normal(size=(1, EMBED_DIM)), (200, 1)) + 1e-4 * draw.normal(size=(200, EMBED_DIM))
    # even at an early first evaluation
    alarms = dict(objective.warnings(compute_feature_metrics(identical, **start), EARLY_PROGRESS))
    assert alarms.keys() == {"same features", "one direction"}
    assert all(objective.collapse_hint in text and "--" in text for text in alarms.values())
    assert "mean cosine 1.0000, 0.5" in alarms["same features"] and f"of {EMBED_DIM})" in alarms["one direction"]
    low_rank = draw.normal(size=(200, 2)) @ draw.normal(size=(2, EMBED_DIM))
    assert dict(objective.warnings(compute_feature_metrics(low_rank, highest_rankme=25.0), LATER_PROGRESS)).keys() == {
        "fallen rank"
    }


@pytest.mark.parametrize("name", ["dino", "dinov2"])
def test_dino_warns_only_when_features_fall_below_initialisation(objectives, name):
    """Untrained encoders may have low rank and similar features, so only a decrease is a warning."""
    unit = 1 / math.sqrt(EMBED_DIM)

    def get_warnings(objective=objectives[name], **scalars):
        return [alarm for alarm, _ in objective.warnings(scalars, EARLY_PROGRESS)]

    assert get_warnings(rankme=3.1, highest_rankme=6.3) == ["fallen rank"]
    assert get_warnings(rankme=3.1, highest_rankme=6.1) == []  # more than half of the rank remains
    assert get_warnings(rankme=3.3, highest_rankme=20.0) == []  # more than a tenth of the width
    assert get_warnings(feature_std=0.06 * unit, first_feature_std=0.11 * unit) == []  # mean cosine 0.996, was 0.988
    assert get_warnings(feature_std=0.05 * unit, first_feature_std=0.11 * unit) == ["same features"]
    assert get_warnings(feature_std=0.11 * unit, first_feature_std=0.9 * unit) == []  # mean cosine 0.988


@pytest.mark.parametrize("name", ["mae", "masked"])
def test_reconstruction_objectives_accept_similar_features(objectives, name):
    """Metrics of MAE on 2,000 CIFAR-10 images, at the start and after 17 steps; it reconstructs despite them."""
    measured = {"rankme": 1.9, "highest_rankme": 8.3, "feature_std": 0.0027, "first_feature_std": 0.0175}
    assert not list(objectives[name].warnings(measured, EARLY_PROGRESS))


def test_collapse_is_detected_at_the_first_evaluation(objectives):
    """Metrics of DINO without KoLeo on 9,000 CIFAR-10 images, width 128, after 0, 66 and 100 steps."""
    start = {"highest_rankme": 22.3, "first_feature_std": 0.0227}
    dino = DINO(
        build_model(replace(config_from_name("ViT-128x1/8", 16), classes=0)),
        DINOConfig(**HEAD_OPTIONS, batch_norm=True),
    )
    ((name, text),) = dino.warnings({"rankme": 8.83, "feature_std": 0.033} | start, EARLY_PROGRESS)
    assert name == "fallen rank" and text.startswith("features have lost most directions (RankMe 22.3, now 8.8 of 128)")
    ((name, _),) = dino.warnings({"rankme": 5.09, "feature_std": 0.0234} | start, EARLY_PROGRESS)
    assert name == "fallen rank"
    with_koleo = {"rankme": 51.3, "feature_std": 0.0804}  # after 53 steps
    assert not list(dino.warnings(with_koleo | start, EARLY_PROGRESS))


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
def test_collapsed_targets_raise_a_warning(objectives, name):
    objective, most = objectives[name], math.log(NUM_PROTOTYPES)
    healthy = {"teacher_entropy": 0.6 * most, "prototype_entropy": 0.9 * most, "feature_std": 0.1}
    assert not list(objective.warnings(healthy, LATER_PROGRESS))
    uniform = {**healthy, "teacher_entropy": most, "prototype_entropy": most}
    assert dict(objective.warnings(uniform, LATER_PROGRESS)).keys() == {"uniform teacher"}
    one_prototype = {**healthy, "teacher_entropy": 0.0, "prototype_entropy": 0.0}
    assert dict(objective.warnings(one_prototype, LATER_PROGRESS)).keys() == {"one prototype"}
    same_features = {**healthy, "feature_std": 0.0}
    assert dict(objective.warnings(same_features, LATER_PROGRESS)).keys() == {"same features"}
