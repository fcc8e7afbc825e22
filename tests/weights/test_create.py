"""`vitreous.create` with weights, and with timm's option names."""

from __future__ import annotations

import logging

import pytest
import torch

import vitreous
from vitreous.errors import UsageError, WeightsError


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory):
    """Return a model of two classes with a nonzero head, and its bundle."""
    torch.manual_seed(0)
    model = vitreous.create("ViT-32x2/8", image_size=32, num_classes=2).eval()
    torch.nn.init.normal_(model.head.weight)
    return model, vitreous.save(model, tmp_path_factory.mktemp("weights") / "bundle")


def test_timm_names_are_ours():
    names = {"img_size": 48, "in_chans": 1, "num_classes": 3, "drop_path_rate": 0.1, "drop_rate": 0.2}
    config = vitreous.create("ViT-32x2/8", **names, global_pool="avg", reg_tokens=2, pretrained=False).config
    assert (config.image, config.channels, config.classes) == ((48, 48), 1, 3)
    assert (config.regularization.drop_path, config.regularization.dropout, config.pool, config.registers) == (
        0.1,
        0.2,
        "mean",
        2,
    )


def test_created_models_reproduce_the_outputs_of_the_weights(saved_model):
    model, folder = saved_model
    images = torch.randn(2, 3, 32, 32)
    for created in (vitreous.create(weights=folder), vitreous.create("ViT-32x2/8", pretrained_path=folder)):
        assert torch.equal(created.eval()(images), model(images))
        assert created.config == model.config and all(p.requires_grad for p in created.parameters())


def test_classes_image_size_and_channels_can_change(saved_model, caplog):
    model, folder = saved_model
    with caplog.at_level(logging.INFO, "vitreous"):
        changed = vitreous.create(
            weights=folder, num_classes=7, image_size=48, channels=1, regularization={"drop_path": 0.2}
        ).eval()
    assert "head is new" in caplog.text and "4 -> 6" in caplog.text and "3 -> 1" in caplog.text
    assert not changed(torch.randn(2, 1, 48, 48)).any() and changed.config.regularization.drop_path == 0.2
    state, changed_state = model.state_dict(), changed.state_dict()
    assert all(torch.equal(changed_state[name], state[name]) for name in state if ".blocks." in name)
    images = torch.randn(2, 3, 32, 32)
    headless = vitreous.create(weights=folder, num_classes=0).eval()
    assert torch.allclose(headless(images), model.pool(model.features(images)), atol=1e-5)


def test_weights_of_timm_are_loaded(tmp_path):
    import timm
    from safetensors.torch import save_file

    theirs = timm.create_model("vit_tiny_patch16_224", num_classes=5).eval()
    save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    ours = vitreous.create("vit_tiny_patch16_224", weights=tmp_path / "model.safetensors").eval()
    images = torch.randn(1, 3, 224, 224)
    assert torch.allclose(ours(images), theirs(images), atol=1e-4)


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "needs a name or weights"),
        ({"name": "ViT-B/16", "pretrained": True}, "does not select weights"),
        ({"name": "ViT-B/16", "img_size": 32, "image_size": 32}, "are the same option"),
        ({"name": "ViT-B/16", "drop_rate": 0.1, "regularization": {"dropout": 0.1}}, "are the same option"),
        ({"name": "ViT-B/16", "weights": True}, "is ViT-32x2/8, not ViT-B/16"),
        ({"weights": True, "width": 64}, "width is defined by the weights"),
        ({"weights": True, "regularization": {"drop_paht": 0.1}}, "did you mean regularization.drop_path"),
        ({"weights": True, "drop_path": 0.1}, "with weights, change only regularization.dropout"),
        ({"name": "ViT-B/16", "drop_path": 0.1}, "use regularization="),
        ({"name": "ViT-B/16", "attention": {"windw": 7}}, "attention.windw"),
        ({"weights": True, "image_size": 33}, "not divisible by patch size 8"),
        ({"name": "ViT-B/16", "num_clases": 3}, "did you mean num_classes"),
    ],
)
def test_invalid_options_are_rejected(saved_model, options, message):
    options = options | ({"weights": saved_model[1]} if "weights" in options else {})
    with pytest.raises(UsageError, match=message):
        vitreous.create(**options)


def test_missing_weights_are_reported(tmp_path):
    with pytest.raises(WeightsError, match="no weights at"):
        vitreous.create(weights=tmp_path / "nothing")
