"""`inspect`, `embed` and `convert` of detection and segmentation models use the backbone, or report why they cannot."""

from pathlib import Path

import numpy as np
import pytest
import torch

import vitreous
from tests.conftest import make_image
from tests.models.test_adapter import ADAPTER_OPTIONS
from tests.models.test_adapter import BACKBONES as PLAIN
from tests.models.test_detector import BACKBONES, SMALL_DETECTOR_OPTIONS
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.inspection import cost
from vitreous.models.config import AdapterConfig, BiTConfig, DetectorConfig, SegmenterConfig
from vitreous.models.zoo import build_model
from vitreous.progress import NullListener
from vitreous.reports.inspect import FIGURES, inspect
from vitreous.tasks.detection import Detection
from vitreous.tasks.segmentation import Segmentation
from vitreous.weights.bundle import Bundle
from vitreous.weights.convert import convert

CLASS_NAMES = ("ant", "bee", "cat")
UNAVAILABLE_FIGURES = {"gradient", "nearest", "reconstruction"}  # need classes, data or a decoder
#: model -> unavailable figures in addition to these
MODELS = {
    "detector on windows": (DetectorConfig(backbone=PLAIN["vitdet"], classes=3, **SMALL_DETECTOR_OPTIONS), {"rollout"}),
    "detector on an adapter": (
        DetectorConfig(
            backbone=AdapterConfig(backbone=PLAIN["plain"], **ADAPTER_OPTIONS), classes=3, **SMALL_DETECTOR_OPTIONS
        ),
        set(),
    ),
    "detector on a ResNet": (
        DetectorConfig(
            backbone=BiTConfig(image=(64, 96), blocks=(1, 1), width=16, classes=0), classes=3, **SMALL_DETECTOR_OPTIONS
        ),
        {"positions", "distance", "rollout", "attention", "segments", "fourier"},
    ),
    "segmenter on a Swin": (
        SegmenterConfig(backbone=BACKBONES["swin"], classes=3, head="multiscale"),
        {"rollout", "attention", "segments", "fourier"},
    ),
}


class NoteListener(NullListener):
    def __init__(self):
        self.texts = []

    def note(self, text):
        self.texts.append(text)


def save_model(home: Path, name: str) -> Path:
    config = MODELS[name][0]
    torch.manual_seed(0)
    task = Detection(CLASS_NAMES) if config.finds_objects else Segmentation(CLASS_NAMES)
    Bundle(build_model(config).eval(), task, ImagePreprocess(config.image)).save(home / "model")
    (home / "photos").mkdir()
    for number in range(4):
        make_image(number, (120, 70), number).save(home / "photos" / f"{number}.png")
    return home / "model"


@pytest.mark.parametrize("name", MODELS)
def test_figures_use_the_backbone_or_give_a_reason(tmp_path, name, monkeypatch):
    monkeypatch.setattr(cost, "TIMING_SECONDS", 0.0)  # the number of passes is tested in tests/inspection
    model, notes = save_model(tmp_path, name), NoteListener()
    layers = (3,) if name == "detector on windows" else ()  # a block with global attention
    images = tmp_path / "photos"
    document = inspect(model, images, listener=notes, all=True, device="cpu", batch_sizes=(1,), layers=layers)
    assert set(document["skipped"]) == UNAVAILABLE_FIGURES | MODELS[name][1]
    assert all(len(reason) > 20 for reason in document["skipped"].values())
    drawn_figures = {figure["name"].partition("-")[0] for figure in document["figures"]}
    assert drawn_figures == FIGURES.keys() - document["skipped"].keys() - {"clips", "slices", "curves"}
    assert any("only the backbone is used" in text for text in notes.texts)
    assert any("figures show the ViT without its adapter" in text for text in notes.texts) == ("adapter" in name)
    for figure in document["figures"]:
        numbers = np.load(tmp_path / "model" / "inspect" / figure["npz"])
        assert all(np.isfinite(numbers[key]).all() for key in numbers if numbers[key].dtype.kind == "f")


def test_embed_uses_the_backbone_features(tmp_path):
    predictor = vitreous.load(save_model(tmp_path, "detector on windows"), precision="fp32")
    backbone = predictor.model.backbone.eval()
    with torch.no_grad():
        pixels = predictor.transform(tmp_path / "photos" / "0.png")[None]
        expected = backbone.pool(backbone.features(pixels))[0].numpy()
    assert predictor.embed(tmp_path / "photos" / "0.png") == pytest.approx(expected, abs=1e-5)


def test_other_formats_export_only_the_backbone_with_a_note(tmp_path):
    notes, model = [], save_model(tmp_path, "segmenter on a Swin")
    document = convert(model, tmp_path / "swin", "timm", note=notes.append)
    assert any("only the backbone of" in text for text in notes) and document["model"].startswith("Swin")
    exported, full_model = (vitreous.load(model_path, headless=True).model for model_path in (document["out"], model))
    images = torch.rand(1, 3, *full_model.config.image, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.allclose(exported.features(images), full_model.backbone.features(images), atol=1e-5)
    assert "backbone" not in " ".join(convert(model, tmp_path / "copy", note=notes.append)["notes"])
