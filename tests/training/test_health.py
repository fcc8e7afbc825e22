"""Warnings about runs that probably have a mistake."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

from tests.conftest import make_folder
from tests.training.test_loop import make_session, make_synthetic_split
from vitreous.data.sources import open_data
from vitreous.data.split import ArraySplit
from vitreous.errors import UsageError
from vitreous.tasks.classification_metrics import evaluate_classification
from vitreous.training.health import NORM_HISTORY, SLOW_LOADING_LINES, HealthMonitor
from vitreous.training.run import OptimizerConfig


@pytest.fixture
def messages():
    return []


def test_validation_images_in_the_training_set_are_reported(messages, tmp_path):
    split, partly_shared = (
        make_synthetic_split(),
        ArraySplit(make_synthetic_split().pixels[:10] ^ 1, make_synthetic_split().labels[:10]),
    )
    HealthMonitor(messages.append).data(split, partly_shared)
    assert not messages
    HealthMonitor(messages.append).data(split, split)
    assert "all sampled validation images" in messages[0]
    photos = make_folder(tmp_path / "photos", {"train": 4, "val": 4})
    copied = photos / "val" / "ant" / "copy.png"
    copied.write_bytes((photos / "train" / "bee" / "1.png").read_bytes())
    data = open_data(photos)
    HealthMonitor(messages.append).data(data.split("train"), data.split("val"))
    assert "1 of 13 sampled validation images" in messages[1] and len(messages) == 2


def test_exploding_gradients_are_reported_once(messages):
    health = HealthMonitor(messages.append)
    run = SimpleNamespace(optimizer=OptimizerConfig(clip=None))
    for step, norm in enumerate([1.0] * NORM_HISTORY + [math.inf, 50.0, 150.0, 200.0]):
        health.step(SimpleNamespace(step=step, norm=norm, run=run))
    assert len(messages) == 1 and "gradient norm 150" in messages[0] and "--clip-grad" in messages[0]


def test_slow_data_loading_is_reported_with_a_hint(messages):
    health = HealthMonitor(messages.append)
    state = SimpleNamespace(run=SimpleNamespace(data=SimpleNamespace(workers=2)))
    for waiting in [0.9] * (SLOW_LOADING_LINES - 1) + [0.1] + [0.5] * SLOW_LOADING_LINES:
        health.line(waiting, state, False)
    assert messages == [
        "the model waits for images 50% of the time; raise --workers (now 2), or use smaller image files"
    ]


def test_constant_predictions_are_reported(messages):
    health, labels = HealthMonitor(messages.append), np.array([0, 1, 2, 2])
    health.report(evaluate_classification(np.eye(3)[labels], labels, ("a", "b", "c")), ("a", "b", "c"))
    assert not messages
    health.report(evaluate_classification(np.tile([0.0, 1.0, 0.0], (4, 1)), labels, ("a", "b", "c")), ("a", "b", "c"))
    assert "all 4 validation images are predicted as b" in messages[0]


def test_a_learning_rate_of_zero_is_rejected(tmp_path):
    with pytest.raises(UsageError, match="must be above 0"):
        make_session(tmp_path, optimizer=OptimizerConfig(lr=0.0))
