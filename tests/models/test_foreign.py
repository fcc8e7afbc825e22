"""Encoders of timm and transformers under objectives, heads and engines."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import vitreous
from tests.conftest import make_folder
from vitreous.data.augmentation.augment import Augment
from vitreous.data.preprocess import Preprocess
from vitreous.errors import UsageError
from vitreous.models.foreign import ForeignModel, wrap_backbone
from vitreous.objectives.base import Progress, Setting
from vitreous.objectives.supervised import SupervisedConfig
from vitreous.serving.predict import load, predictor_of
from vitreous.weights.bundle import Bundle
from vitreous.weights.tasks import Classification, Features

CLASSES = ("ant", "bee", "cat")


def of_timm(**changes):
    import timm

    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
    return timm.create_model("vit_tiny_patch16_224", **(sizes | {"num_classes": 5} | changes))


def of_transformers(headed=True):
    from transformers import ViTConfig, ViTForImageClassification, ViTModel

    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=16, patch_size=8
    )
    return ViTForImageClassification(config) if headed else ViTModel(config, add_pooling_layer=False)


class Patches(nn.Module):
    """The plainest encoder that there is: (B, 3, H, W) -> (B, N, 32)."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 32, 8, 8)

    def forward(self, images):
        return self.layer(images).flatten(2).mT


MODULES = {
    "timm": (of_timm, 1),
    "timm, mean": (lambda: of_timm(class_token=False, global_pool="avg"), 0),
    "timm, registers": (lambda: of_timm(reg_tokens=2), 3),
    "transformers": (of_transformers, 1),
    "transformers, bare": (lambda: of_transformers(False), 1),
    "plain": (Patches, 0),
}


def wrap(name, classes):
    torch.manual_seed(0)
    build, prefix = MODULES[name]
    sizes = {"image_size": 16, "patch_size": 8} if name == "plain" else {}
    return wrap_backbone(build(), classes, **sizes), prefix


@pytest.mark.parametrize("name", MODULES)
def test_tokens_and_what_the_head_reads_are_theirs(name):
    model, prefix = wrap(name, 0)
    images = torch.randn(2, 3, 16, 16)
    config = model.eval().config
    assert (config.image, config.patch, config.width, config.prefix) == ((16, 16), (8, 8), 32, prefix)
    tokens, module = model.features(images), model.encoder.module
    assert tokens.shape == (2, prefix + 4, 32)
    if hasattr(module, "forward_head"):
        expected = module.forward_head(module.forward_features(images), pre_logits=True)
    else:
        expected = tokens[:, 0] if prefix else tokens.mean(1)
    assert torch.equal(model(images), expected)


@pytest.mark.parametrize("name", MODULES)
def test_learns_from_labels_by_our_objective(name, tmp_path):
    root = make_folder(tmp_path / "photos", {"train": 8})
    loader = vitreous.create_loader(root, batch_size=24)
    model, _ = wrap(name, len(loader.classes))
    setting = Setting(0, loader.classes, views=Augment(mixup=0.1))
    objective = SupervisedConfig(smoothing=0.1).build(model, setting)
    optimizer, losses = torch.optim.AdamW(model.parameters(), 3e-3), []
    for epoch in range(12):
        for batch in loader:
            places = torch.arange(24) + 24 * epoch
            with torch.no_grad():
                ready = objective.prepare({**batch, "positions": places}, Progress(epoch, 24 * epoch, 24 * 12))
            loss = objective(ready)["loss"]
            optimizer.zero_grad()
            loss.backward()
            assert all(parameter.grad is not None for parameter in model.parameters())
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert objective.deployed() is model and objective.task().classes == CLASSES


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["timm", "transformers"])
def test_our_engine_embeds_and_predicts(name, precision):
    from vitreous.evaluation.inference_options import InferenceOptions

    model, _ = wrap(name, 3)
    nn.init.normal_(model.head.weight)
    read = Preprocess((16, 16))
    pictures = [np.random.default_rng(n).integers(0, 256, (20, 16, 3), np.uint8) for n in range(3)]
    images = torch.stack([read.transform(one) for one in pictures])
    how = InferenceOptions(device="cpu", precision=precision)
    predictor = predictor_of("", Bundle(model.eval(), Classification(CLASSES), read), how)
    with torch.no_grad():
        features = model.pool(model.features(images))
        assert np.allclose(predictor.embed(pictures), features, atol=1e-4)
        best = [CLASSES[place] for place in model(images).argmax(1)]
    assert [answer.names[0] for answer in predictor.predict(pictures)] == best
    alone = predictor_of("", Bundle(wrap(name, 0)[0].eval(), Features(), read), how)
    assert np.allclose(alone.embed(pictures), features, atol=1e-4)


def test_what_cannot_be_is_refused(tmp_path):
    import timm

    with pytest.raises(UsageError, match="does not tell its image size"):
        wrap_backbone(Patches())
    with pytest.raises(UsageError, match="4 tokens of 16 pixels are not patches of 4"):
        wrap_backbone(Patches(), image_size=16, patch_size=4)
    with pytest.raises(UsageError, match="does not take"):
        wrap_backbone(of_timm(), image_size=48)
    with pytest.raises(UsageError, match="not tokens"):
        wrap_backbone(timm.create_model("resnet18"), image_size=32, patch_size=32)
    model, _ = wrap("timm", 3)
    with pytest.raises(UsageError, match=r"no model of vitreous\.create"):
        vitreous.save(model, tmp_path / "model")
    with pytest.raises(UsageError, match="a model of another library"):
        ForeignModel(model.config)
    with pytest.raises(ValueError, match="takes 3 channels"):
        model(torch.zeros(1, 1, 16, 16))
    with pytest.raises(UsageError, match="no run at"):
        load(tmp_path / "model")
