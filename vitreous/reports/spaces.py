"""Feature spaces in which generated images are compared with real ones.

Images are (n, H, W, C) uint8, latents (n, H, W, C) float32, clips (n, T, H, W, C).
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from vitreous.data.loader import EvalLoader
from vitreous.data.split import ArraySplit
from vitreous.errors import UsageError, WeightsError
from vitreous.evaluation.inception import FIRST_WEIGHT_NAME, Inception
from vitreous.inference.engine import compute_split_logits, make_engine
from vitreous.inference.features import load_or_compute_features
from vitreous.inference.open_model import open_bundle
from vitreous.reports.answers import EvaluationSettings
from vitreous.weights.bundle import Bundle
from vitreous.weights.files import open_weights_file

INCEPTION_FILES = "weights-inception-2015-12-05-6726825d.pth of torch-fidelity, or pt_inception-2015-12-05-6726825d.pth"
PIXELS, LATENTS, INCEPTION = "pixels", "latents", "inception"
SpaceFeatures = dict[str, np.ndarray]  # "features" (n, d) float32, and further arrays that only some spaces have


class FeatureSpace(Protocol):
    """A feature space for comparing images; its metrics are labelled with `name`."""

    name: str

    def features(self, images: np.ndarray, labels: np.ndarray | None = None) -> SpaceFeatures:
        """Compute the features of images; `labels` are the (n,) int64 classes they were generated for."""
        ...


class PixelSpace:
    """The feature space of pixels, scaled to [0, 1], or of the values of latents."""

    def __init__(self, name: str = PIXELS) -> None:
        self.name, self.peak = name, 255 if name == PIXELS else 1

    def features(self, images: np.ndarray, labels: np.ndarray | None = None) -> SpaceFeatures:
        """Flatten images to rows (n, H W C), or clips to (n, T H W C)."""
        return {"features": images.reshape(len(images), -1).astype(np.float32) / self.peak}


class InceptionSpace:
    """The feature space of FID: Inception, loaded from a weights file.

    Raises UsageError if torch-fidelity is not installed, WeightsError for a file of another network.
    """

    def __init__(self, path: str, device: str) -> None:
        self.name = INCEPTION
        try:
            self.network = Inception(open_weights_file(path).read(), device)
        except ValueError as error:
            raise WeightsError(
                f"{path} does not contain the Inception network of FID ({error})", f"use {INCEPTION_FILES}"
            ) from None

    def features(self, images: np.ndarray, labels: np.ndarray | None = None) -> SpaceFeatures:
        """Compute `rows` (n, 2048), `spatial` (n, 2023) and `logits` (n, 1008) of images with 1 or 3 channels.

        Raises UsageError for images with other channels, and for clips.
        """
        if images.ndim != 4:
            raise UsageError("Inception needs images, not clips", "leave --features out, or use a model for clips")
        if images.dtype != np.uint8 or images.shape[-1] not in (1, 3):
            raise UsageError(f"Inception needs RGB or grey images, not {images.shape[-1]} channels")
        return self.network.features(images)


class ModelSpace:
    """The feature space of a model: a run, a bundle or weights.

    If the model has all `classes` of the generated images, it also classifies each image.
    """

    def __init__(
        self, source: str, bundle: Bundle, classes: tuple[str, ...], evaluation_settings: EvaluationSettings
    ) -> None:
        self.name, self.bundle, self.evaluation_settings = source, bundle, evaluation_settings
        has_classes = bool(classes) and set(classes) <= set(bundle.classes)
        self.class_order = [bundle.classes.index(class_name) for class_name in classes] if has_classes else []
        self.compute_features = partial(
            load_or_compute_features,
            bundle.model,
            bundle.preprocess,
            how=evaluation_settings.inference_options,
            workers=0,
            keep=False,
        )

    def features(self, images: np.ndarray, labels: np.ndarray | None = None) -> SpaceFeatures:
        """Compute `rows` (n, d) and, if labels are passed and the model has the classes, `recognised` (n,) bool.

        `recognised`: whether the model predicts the class of the label. Raises UsageError for clips if the model takes
        images, and for images if it takes clips.
        """
        split, bundle = wrap_as_split(images), self.bundle
        if (clips := images.ndim == 5) != bundle.preprocess.is_animated:
            expected, received = ("images", "clips") if clips else ("clips", "images")
            raise UsageError(
                f"{self.name} needs {expected}, not {received}", f"use a model for {received}, or leave --features out"
            )
        features = {"features": np.array(self.compute_features(split).features)}
        if labels is not None and self.class_order:
            engine = make_engine(bundle.model, bundle.preprocess, self.evaluation_settings.inference_options)
            logits, _ = compute_split_logits(engine, EvalLoader(split, bundle.preprocess))
            features["recognised"] = logits[:, self.class_order].argmax(1) == labels
        return features


def is_inception_file(path: str) -> bool:
    """Return whether a path is a weights file of Inception, as published for torch-fidelity and pytorch-fid."""
    if not Path(path).is_file():
        return False
    try:
        return FIRST_WEIGHT_NAME in open_weights_file(path).entries
    except WeightsError:
        return False


def open_feature_space(
    features: str, classes: tuple[str, ...], evaluation_settings: EvaluationSettings, device: str
) -> FeatureSpace:
    """Open a feature space: `pixels`, `latents`, an Inception weights file, or a model. Raises UsageError or
    WeightsError if it cannot be opened."""
    if features in (PIXELS, LATENTS):
        return PixelSpace(features)
    if is_inception_file(features):
        return InceptionSpace(features, device)
    bundle = open_bundle(features, headless=True, note=evaluation_settings.listener.note)
    return ModelSpace(os.fspath(features), bundle, classes, evaluation_settings)


def wrap_as_split(images: np.ndarray) -> ArraySplit:
    """Wrap images (n, H, W, C) or clips (n, T, H, W, C) uint8 as a split without labels."""
    pixels: Any = images[..., 0] if images.ndim == 4 and images.shape[-1] == 1 else images
    return ArraySplit(pixels, np.zeros((len(images), 0), np.float32))
