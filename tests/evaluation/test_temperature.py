"""Known temperatures are recovered; calibration errors match torchmetrics and an explicit loop."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vitreous.errors import DataError
from vitreous.tasks.calibration import (
    CALIBRATION_BINS,
    compute_image_nll,
    compute_probabilities,
    expected_calibration_error,
    fit_temperature,
)


def draw_scaled_logits(temperature: float, images: int = 20_000, classes: int = 6, is_multilabel: bool = False):
    """Logits of the distribution of the labels, multiplied by `temperature`."""
    generator = np.random.default_rng(1)
    logits = generator.normal(size=(images, classes)) * 2
    if is_multilabel:
        return logits * temperature, (generator.random(logits.shape) < 1 / (1 + np.exp(-logits))).astype(np.float32)
    drawn = (logits + generator.gumbel(size=logits.shape)).argmax(1)
    return logits * temperature, drawn


@pytest.mark.parametrize("is_multilabel", [False, True])
@pytest.mark.parametrize("temperature", [0.4, 1.0, 2.5])
def test_the_true_temperature_is_recovered(temperature, is_multilabel):
    assert fit_temperature(*draw_scaled_logits(temperature, is_multilabel=is_multilabel)) == pytest.approx(
        temperature, rel=0.03
    )


@pytest.mark.parametrize("is_multilabel", [False, True])
def test_the_fitted_temperature_minimises_the_loss(is_multilabel):
    logits, labels = draw_scaled_logits(1.7, 300, is_multilabel=is_multilabel)
    temperature = fit_temperature(logits, labels)
    grid = temperature * np.linspace(0.5, 2, 3001)
    values = np.array([compute_image_nll(logits / t, labels).mean() for t in grid])
    assert grid[values.argmin()] == pytest.approx(temperature, rel=1e-3)
    assert compute_image_nll(logits / temperature, labels).mean() <= values.min() + 1e-12


def test_temperature_calibrates_and_keeps_predictions():
    logits, labels = draw_scaled_logits(3.0)
    temperature = fit_temperature(logits, labels)
    uncalibrated, calibrated = compute_probabilities(logits), compute_probabilities(logits / temperature)
    right = logits.argmax(1) == labels
    assert (
        expected_calibration_error(calibrated.max(1), right)
        < 0.02
        < 0.1
        < expected_calibration_error(uncalibrated.max(1), right)
    )
    assert (uncalibrated.argmax(1) == calibrated.argmax(1)).all()


def test_labels_without_an_optimal_temperature_are_rejected():
    labels = np.arange(30) % 3
    with pytest.raises(DataError, match="are predicted correctly"):
        fit_temperature(np.eye(3)[labels] * 0.1, labels)
    with pytest.raises(DataError, match="no better than chance"):
        fit_temperature(-np.eye(3)[labels], labels)
    with pytest.raises(DataError):
        fit_temperature(np.zeros((30, 3)), labels)


def test_losses_and_probabilities_match_torch():
    logits, labels = draw_scaled_logits(1.0, 200)
    tensor = torch.from_numpy(logits)
    assert compute_image_nll(logits, labels) == pytest.approx(
        torch.nn.functional.cross_entropy(tensor, torch.from_numpy(labels), reduction="none").numpy()
    )
    multilabel = draw_scaled_logits(1.0, 200, is_multilabel=True)[1]
    loss = torch.nn.functional.binary_cross_entropy_with_logits(
        tensor, torch.from_numpy(multilabel).double(), reduction="none"
    )
    assert compute_image_nll(logits, multilabel) == pytest.approx(loss.sum(1).numpy())
    assert compute_probabilities(logits) == pytest.approx(tensor.softmax(1).numpy())
    assert compute_probabilities(logits, "binary") == pytest.approx(tensor.sigmoid().numpy())


def test_the_calibration_error_matches_torchmetrics_and_a_loop():
    # the import takes seconds
    from torchmetrics.functional.classification import multiclass_calibration_error

    logits, labels = draw_scaled_logits(2.0, 1500)
    p = compute_probabilities(logits)
    error = expected_calibration_error(p.max(1), p.argmax(1) == labels)
    theirs = multiclass_calibration_error(
        torch.from_numpy(p), torch.from_numpy(labels), p.shape[1], n_bins=CALIBRATION_BINS, norm="l1"
    )
    assert error == pytest.approx(float(theirs), abs=1e-6)
    total = 0.0
    for low in range(CALIBRATION_BINS):
        inside = [i for i in range(len(p)) if low / CALIBRATION_BINS <= p[i].max() < (low + 1) / CALIBRATION_BINS]
        if inside:
            accuracy = np.mean([p[i].argmax() == labels[i] for i in inside])
            total += len(inside) / len(p) * abs(accuracy - np.mean([p[i].max() for i in inside]))
    assert error == pytest.approx(total)
