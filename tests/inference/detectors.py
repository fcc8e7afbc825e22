"""Small detectors with weights drawn at random, as bundles, and pictures that they find objects on."""

from __future__ import annotations

from pathlib import Path

import torch
from PIL import Image

from tests.inference.made import make_photo
from tests.models.test_detector import BACKBONES, build_detector, make_detector_config
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.models.config import DetectorConfig
from vitreous.tasks.detection import Detection
from vitreous.weights.bundle import Bundle

CLASSES = ("ant", "bee", "cat")
__all__ = ["BACKBONES", "CLASSES", "build_detector_bundle", "write_photos", "save_detector"]


def build_detector_bundle(name: str = "vit", masks: bool = True, **changes: object) -> Bundle:
    """A detector of 48 x 64 pixels; random scores are above 0.05 for most rows."""
    config = make_detector_config(name, masks=masks, **{"threshold": 0.05, **changes})
    assert isinstance(config, DetectorConfig)
    model = build_detector(config).eval()
    if model.regions.mask is not None:
        with torch.no_grad():
            model.regions.mask[-1].mask_fcn_logits.weight.mul_(20)
    return Bundle(model, Detection(CLASSES, masks), ImagePreprocess((48, 64)))


def save_detector(home: Path, name: str = "vit", masks: bool = True, **changes: object) -> Path:
    """The same as a folder."""
    build_detector_bundle(name, masks, **changes).save(home)
    return home


def write_photos(home: Path, count: int = 8) -> list[Path]:
    """So many pictures of sizes that differ."""
    home.mkdir(parents=True, exist_ok=True)
    places = [home / f"{number}.png" for number in range(count)]
    for number, place in enumerate(places):
        picture: Image.Image = make_photo(90 - 7 * number, 40 + 9 * number, number)
        picture.save(place)
    return places
