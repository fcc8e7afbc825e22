"""Backbones with dense heads."""

from dataclasses import replace

import pytest
import torch

from vitreous.config import from_builtins, to_builtins
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.errors import UsageError
from vitreous.models.config import (
    AdapterConfig,
    BiTConfig,
    ModelConfig,
    SegmenterConfig,
    SwinAttentionConfig,
    SwinConfig,
    transformer_config,
)
from vitreous.models.configs.hybrid import ConvStemConfig
from vitreous.models.zoo import build_model
from vitreous.nn.frozen import freeze_for_inference
from vitreous.tasks.segmentation import Segmentation
from vitreous.weights.bundle import Bundle, load_bundle

SMALL_VIT_OPTIONS = {"classes": 0, "width": 16, "depth": 3, "heads": 2, "mlp": {"hidden": 32}}
BACKBONES = {
    "vit": transformer_config(image=(16, 24), patch=(8, 8), **SMALL_VIT_OPTIONS),
    "hybrid": transformer_config(
        family="hybrid",
        image=(16, 24),
        patch=(8, 8),
        stem=ConvStemConfig(widths=(8, 8, 16), blocks=(0, 0, 0)),
        **SMALL_VIT_OPTIONS,
    ),
    "swin": SwinConfig(
        image=(16, 24),
        patch_size=(2, 2),
        classes=0,
        width=8,
        blocks=(1, 1, 1),
        heads=(2, 2, 2),
        attention=SwinAttentionConfig(window=2),
    ),
    "bit": BiTConfig(image=(32, 48), classes=0, blocks=(1, 1, 1), width=8),
    "adapter": AdapterConfig(
        backbone=transformer_config(image=(32, 64), patch=(8, 8), **SMALL_VIT_OPTIONS), heads=2, interactions=3, prior=8
    ),
    "vitdet": transformer_config(
        family="sam",
        **SMALL_VIT_OPTIONS,
        image=(16, 24),
        patch=(4, 4),
        class_token=False,
        pool="mean",
        attention={"window": 3, "global_blocks": (2,)},
        norm={"final": "none"},
    ),
    "volume": transformer_config(image=(4, 8, 8), patch=(2, 4, 4), channels=1, **SMALL_VIT_OPTIONS),
}
HEAD_NAMES = ("linear", "multiscale", "unet", "upernet")


def build_segmenter(backbone: str, head: str):
    torch.manual_seed(0)
    model = build_model(SegmenterConfig(backbone=BACKBONES[backbone], head=head, classes=3, head_width=4))
    return model


@pytest.mark.parametrize("head", HEAD_NAMES)
@pytest.mark.parametrize("name", BACKBONES)
def test_segmentation_logits_are_batch_independent(name, head):
    model, config = build_segmenter(name, head), BACKBONES[name]
    images = torch.randn(3, config.channels, *config.image)
    logits = model(images)
    assert logits.shape == (3, 3, *config.image)
    assert torch.allclose(model(images[1:2]), logits[1:2], atol=1e-5)
    logits.square().mean().backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None or not parameter.requires_grad, parameter_name
    larger = tuple(2 * side for side in config.image)
    assert model(torch.randn(1, config.channels, *larger)).shape == (1, 3, *larger)
    assert model.config.macs() > config.macs()
    with torch.inference_mode():
        assert torch.allclose(freeze_for_inference(model, packed=True)(images), logits, atol=1e-4)
        assert torch.allclose(freeze_for_inference(model, torch.bfloat16)(images), logits, atol=0.1)


@pytest.mark.parametrize("name", BACKBONES)
def test_bundle_round_trip_preserves_outputs(name, tmp_path):
    model, config = build_segmenter(name, "unet").eval(), BACKBONES[name]
    assert from_builtins(ModelConfig, to_builtins(model.config)) == model.config
    assert "unet head" in model.config.name()
    Bundle(model, Segmentation(("a", "b", "c")), ImagePreprocess((16, 24), config.channels, (0.5,) * config.channels,
           (0.5,) * config.channels)).save(tmp_path / "bundle")  # fmt: skip
    again = load_bundle(tmp_path / "bundle")
    assert again.task == Segmentation(("a", "b", "c"))
    images = torch.randn(1, config.channels, *config.image)
    assert torch.equal(again.model(images), model(images))


def test_unsupported_backbones_are_rejected():
    with pytest.raises(UsageError, match="classes=0"):
        SegmenterConfig(backbone=replace(BACKBONES["vit"], classes=2))
    with pytest.raises(UsageError, match="powers of two"):
        SegmenterConfig(backbone=replace(BACKBONES["vit"], patch=(14, 14), image=(28, 28)))
    with pytest.raises(UsageError, match="at least 2 classes"):
        SegmenterConfig(backbone=BACKBONES["vit"], classes=1)
