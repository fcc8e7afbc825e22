"""Small detectors with random weights, as bundles, and images with detections."""

from __future__ import annotations

from pathlib import Path

import torch
from PIL import Image

from tests.inference.small_models import make_photo
from tests.models.test_detector import BACKBONES, build_detector, make_detector_config
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.models.config import DetectorConfig
from vitreous.tasks.detection import Detection
from vitreous.weights.bundle import Bundle

CLASSES = ("ant", "bee", "cat")
__all__ = ["BACKBONES", "CLASSES", "build_detector_bundle", "write_photos", "save_detector"]


def build_detector_bundle(name: str = "vit", masks: bool = True, **changes: object) -> Bundle:
    """A detector for 48 x 64 pixels; most random scores are above 0.05."""
    config = make_detector_config(name, masks=masks, **{"threshold": 0.05, **changes})
    assert isinstance(config, DetectorConfig)
    model = build_detector(config).eval()
    if model.regions.mask is not None:
        with torch.no_grad():
            model.regions.mask[-1].mask_fcn_logits.weight.mul_(20)
    return Bundle(model, Detection(CLASSES, masks), ImagePreprocess((48, 64)))


def save_detector(folder: Path, name: str = "vit", masks: bool = True, **changes: object) -> Path:
    """Save such a detector as a bundle folder."""
    build_detector_bundle(name, masks, **changes).save(folder)
    return folder


def write_photos(folder: Path, count: int = 8) -> list[Path]:
    """Write `count` images of different sizes; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{index}.png" for index in range(count)]
    for index, path in enumerate(paths):
        image: Image.Image = make_photo(90 - 7 * index, 40 + 9 * index, index)
        image.save(path)
    return paths
