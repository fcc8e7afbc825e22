"""Backbones with the heads of Faster and Mask R-CNN."""

from dataclasses import replace

import pytest
import torch

from vitreous.config import from_builtins, to_builtins
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.errors import UsageError
from vitreous.models.config import (
    AdapterConfig,
    BiTConfig,
    DetectorConfig,
    ModelConfig,
    SwinAttentionConfig,
    SwinConfig,
    transformer_config,
)
from vitreous.models.configs.hybrid import ConvStemConfig
from vitreous.models.zoo import build_model
from vitreous.nn.frozen import freeze_for_inference
from vitreous.tasks.detection import Detection
from vitreous.weights.bundle import Bundle, load_bundle

SMALL_VIT_OPTIONS = {"classes": 0, "width": 16, "depth": 2, "heads": 2, "mlp": {"hidden": 32}}
BACKBONES = {
    "vit": transformer_config(image=(48, 64), patch=(8, 8), **SMALL_VIT_OPTIONS),
    "hybrid": transformer_config(
        family="hybrid",
        image=(48, 64),
        patch=(8, 8),
        stem=ConvStemConfig(widths=(8, 8, 16), blocks=(0, 0, 0)),
        **SMALL_VIT_OPTIONS,
    ),
    "bit": BiTConfig(image=(48, 64), classes=0, blocks=(1, 1, 1), width=8),
    "adapter": AdapterConfig(
        backbone=transformer_config(image=(48, 64), patch=(8, 8), **SMALL_VIT_OPTIONS), heads=2, interactions=2, prior=8
    ),
    "swin": SwinConfig(
        image=(48, 64),
        patch_size=(4, 4),
        classes=0,
        width=8,
        blocks=(1, 1),
        heads=(2, 2),
        attention=SwinAttentionConfig(window=2),
    ),
}
SMALL_DETECTOR_OPTIONS = {"width": 16, "hidden": 32, "proposals": 40, "detections": 12, "threshold": 0.0}


def make_detector_config(name: str, **changes) -> DetectorConfig:
    return DetectorConfig(backbone=BACKBONES[name], classes=3, **SMALL_DETECTOR_OPTIONS | changes)


def build_detector(config: DetectorConfig):
    torch.manual_seed(0)
    model = build_model(config)
    for layer, deviation in (
        (model.regions.box.predictor.cls_score, 2.0),
        (model.regions.box.predictor.bbox_pred, 0.5),
    ):
        torch.nn.init.normal_(layer.weight, std=deviation)  # so that detections differ from each other
    return model


def make_targets(size: tuple[int, int] = (48, 64)) -> dict:
    """Two images: one with an object of each of two classes and a crowd, one without objects."""
    boxes = torch.tensor([[4.0, 4, 24, 28], [30, 10, 60, 40], [0, 30, 30, 48]])
    masks = torch.zeros(3, *size, dtype=torch.bool)
    for mask, (left, top, right, bottom) in zip(masks, boxes.int().tolist(), strict=True):
        mask[top:bottom, left:right] = True
    return {
        "boxes": [boxes, boxes[:0]],
        "labels": [torch.tensor([0, 2, 1]), torch.zeros(0, dtype=torch.int64)],
        "crowd": [torch.tensor([False, False, True]), torch.zeros(0, dtype=torch.bool)],
        "keys": torch.tensor([1, 2]),
        "masks": [masks, masks[:0]],
    }


@pytest.mark.parametrize("heads", ["vitdet", "light"])
@pytest.mark.parametrize("name", BACKBONES)
def test_detections_have_fixed_shapes_and_are_batch_independent(name, heads):
    model = build_detector(make_detector_config(name, heads=heads, masks=True, threshold=0.3)).eval()
    images = torch.randn(3, 3, 48, 64)
    with torch.inference_mode():
        boxes, scores, labels, masks = model(images)
        alone = model(images[1:2])
    assert boxes.shape == (3, 12, 4) and scores.shape == labels.shape == (3, 12) and masks.shape == (3, 12, 28, 28)
    assert all(torch.allclose(single[0].float(), many[1].float(), atol=1e-4) for single, many in zip(
        alone, (boxes, scores, labels, masks), strict=True))  # fmt: skip
    assert (scores.diff(dim=1) <= 0).all() and labels.dtype == torch.int64 and labels.min() >= 0 and labels.max() < 3
    there_is = scores > 0
    assert there_is.any() and (scores[there_is] > 0.3).all() and (boxes[~there_is] == 0).all()
    assert (boxes[there_is][:, 2:] > boxes[there_is][:, :2]).all() and boxes[..., ::2].max() <= 64
    assert boxes.min() >= 0 and boxes[..., 1::2].max() <= 48


@pytest.mark.parametrize("change", [{}, {"masks": True}, {"heads": "light", "agnostic": True}, {"finest": 8}])
@pytest.mark.parametrize("name", BACKBONES)
def test_every_trainable_parameter_gets_a_gradient(name, change):
    model, targets = build_detector(make_detector_config(name, **change)), make_targets()
    losses = model.losses(torch.randn(2, 3, 48, 64), targets)
    assert set(losses) == {"objectness", "proposals", "classes", "boxes"} | (
        {"masks"} if change.get("masks") else set()
    )
    assert all(loss.dtype == torch.float32 and loss.isfinite() and loss > 0 for loss in losses.values())
    sum(losses.values()).backward()
    lacking = [parameter_name for parameter_name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert not lacking


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("name", BACKBONES)
def test_bundle_round_trip_preserves_outputs(name, masks, tmp_path):
    model = build_detector(make_detector_config(name, masks=masks)).eval()
    assert from_builtins(ModelConfig, to_builtins(model.config)) == model.config
    assert model.config.name().endswith("with Mask R-CNN" if masks else "with Faster R-CNN")
    task = Detection(("a", "b", "c"), masks)
    Bundle(model, task, ImagePreprocess((48, 64))).save(tmp_path / "bundle")
    again = load_bundle(tmp_path / "bundle")
    assert again.task == task and again.task.classes == ("a", "b", "c") and not again.classes
    images = torch.randn(1, 3, 48, 64)
    with torch.inference_mode():
        outputs = model(images)
        assert all(torch.equal(output, expected) for output, expected in zip(again.model(images), outputs, strict=True))
        packed = freeze_for_inference(model, packed=True)(images)
    assert torch.allclose(packed[1], outputs[1], atol=1e-4)
    assert model.config.macs() > model.config.backbone.macs()


def test_levels_follow_the_backbone_and_the_finest_stride():
    assert make_detector_config("vit").strides == (4, 8, 16, 32) and make_detector_config("vit", finest=8).strides == (
        8,
        16,
        32,
    )
    assert make_detector_config("vit", finest=2).strides == (2, 4, 8, 16, 32)
    assert make_detector_config("hybrid").strides == make_detector_config("swin").strides == (4, 8, 16, 32, 64)
    for name in BACKBONES:
        for finest in (4, 8):
            model = build_detector(make_detector_config(name, finest=finest))
            levels = model.levels(torch.randn(1, 3, 48, 64))
            sizes = [(-(-48 // stride), -(-64 // stride)) for stride in model.config.strides]
            assert [tuple(level.shape[2:]) for level in levels] == sizes


def test_unsupported_backbones_and_options_are_rejected():
    with pytest.raises(UsageError, match="classes=0"):
        DetectorConfig(backbone=replace(BACKBONES["vit"], classes=2))
    with pytest.raises(UsageError, match="volumes"):
        DetectorConfig(backbone=transformer_config(image=(4, 8, 8), patch=(2, 4, 4), channels=1, **SMALL_VIT_OPTIONS))
    with pytest.raises(UsageError, match="finest"):
        make_detector_config("vit", finest=64)
    for change in ({"nms": 0.0}, {"threshold": 1.0}, {"width": 0}, {"anchor": 0.0}):
        with pytest.raises(UsageError):
            make_detector_config("vit", **change)
