"""Fit a bundle's softmax temperature on validation images and store it with the weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from vitreous.data.run_data import open_run_data
from vitreous.errors import UsageError
from vitreous.inference.open_model import open_bundle
from vitreous.reports.answers import EvaluationSettings, SplitPredictions, predict_open_split
from vitreous.tasks.calibration import (
    compute_image_nll,
    compute_probabilities,
    expected_calibration_error,
    fit_temperature,
)
from vitreous.training.folder import RunFolder
from vitreous.weights.adopt import locate_bundle
from vitreous.weights.bundle import set_temperature

CALIBRATION_SPLIT = "val"  # not test, which is reserved for evaluation, nor train, which the model was fitted to


def calibrate_temperature(
    run: str | os.PathLike[str], data: str | os.PathLike[str] | None, evaluation_settings: EvaluationSettings
) -> dict[str, Any]:
    """Fit a softmax temperature on the validation images of a run, or of `data` for a bundle without a run, and store
    it in the bundle.

    Returns the temperature, a description of the images it was fitted on, and their NLL and ECE before and after.
    Raises UsageError for weights that are not a bundle, and for data without a validation split; DataError if no
    temperature is optimal.
    """
    folder, is_run = locate_bundle(Path(run)), RunFolder(Path(run)).config.is_file()
    if folder is None:
        hint = f"convert it: vitreous convert {run} FOLDER"
        raise UsageError(f"{run} is not a bundle, so a temperature cannot be stored in it", hint)
    source, dataset = open_run_data(run, None if is_run else data, CALIBRATION_SPLIT)
    if CALIBRATION_SPLIT not in dataset.splits or (
        dataset.unsplit and not is_run
    ):  # unsplit data: the model may have been trained on all images
        problem = f"{source} has no val split, which temperature scaling needs"
        raise UsageError(problem, "use a run, or data with a val split")
    predictions = predict_open_split(
        run,
        open_bundle(run),
        source=source,
        dataset=dataset,
        split=CALIBRATION_SPLIT,
        evaluation_settings=evaluation_settings,
    )
    targets, readable = get_loss_targets(predictions), predictions.readable
    temperature = fit_temperature(predictions.raw_logits[readable], targets[readable])
    fitted_on = {"data": predictions.source, "split": CALIBRATION_SPLIT, "images": int(readable.sum())}
    set_temperature(folder, temperature, fitted_on)
    metrics = {"before": measure_nll_and_ece(predictions, 1.0), "after": measure_nll_and_ece(predictions, temperature)}
    return {"temperature": temperature, "fitted_on": fitted_on, "val": metrics}


def describe_temperature_effect(predictions: SplitPredictions) -> dict[str, Any] | None:
    """Return NLL and ECE of the evaluated images without and with the bundle's temperature; None if it is 1."""
    if predictions.bundle.classification.temperature == 1:
        return None
    return {
        "temperature": predictions.bundle.classification.temperature,
        "fitted_on": predictions.bundle.provenance.get("temperature"),
        predictions.name: {
            "before": measure_nll_and_ece(predictions, 1.0),
            "after": measure_nll_and_ece(predictions, predictions.bundle.classification.temperature),
        },
    }


def measure_nll_and_ece(predictions: SplitPredictions, temperature: float) -> dict[str, float | None]:
    """Return NLL in nats and ECE of the readable images at a temperature; ECE is None for multi-label data."""
    readable = predictions.readable
    logits, targets = (
        predictions.raw_logits[readable].astype(np.float64) / temperature,
        get_loss_targets(predictions)[readable],
    )
    is_correct = logits.argmax(1) == predictions.split.labels[readable] if predictions.split.labels.ndim == 1 else None
    ece = (
        None
        if is_correct is None
        else expected_calibration_error(
            compute_probabilities(logits, predictions.bundle.classification.loss).max(1), is_correct
        )
    )
    return {"nll": float(compute_image_nll(logits, targets).mean()), "ece": ece}


def get_loss_targets(predictions: SplitPredictions) -> np.ndarray:
    """Return the labels as targets of the bundle's loss: class indices (n,) for softmax, else (n, K) in {0, 1}."""
    labels = predictions.split.labels
    if labels.ndim == 2 or predictions.bundle.classification.loss == "softmax":
        return labels
    return np.eye(len(predictions.bundle.classes), dtype=np.float32)[labels]
