"""Masked autoencoding: the same loss and gradients as transformers' ViTMAE, and the paper's invariants."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from vitreous.data.augmentation.augment import Augment
from vitreous.data.split import ArraySplit
from vitreous.errors import UsageError
from vitreous.models.config import MlpConfig, PositionConfig, ViTConfig
from vitreous.models.names import config_from_name
from vitreous.models.zoo import build_model
from vitreous.nn.grid import patchify, unpatchify
from vitreous.objectives.base import ObjectiveSetting, TrainingProgress
from vitreous.objectives.mae import MAE, MAEConfig

SMALL = ViTConfig(
    image=(32, 32),
    patch=(8, 8),
    classes=0,
    width=32,
    depth=2,
    heads=2,
    mlp=MlpConfig(hidden=64),
    positions=PositionConfig(kind="sincos"),
)
DECODER = MAEConfig(decoder_width=16, decoder_depth=2, decoder_heads=2)


def batch_of(images):
    """A batch as the loader gives it."""
    return {"images": images, "positions": torch.arange(len(images)), "samples": torch.arange(len(images))}


@pytest.fixture
def mae():
    torch.manual_seed(0)
    return MAE(build_model(SMALL), DECODER)


def renamed(theirs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of transformers' ViTMAE by our names, pixels of a patch in our order."""
    pixels = torch.arange(3 * 64).view(3, 8, 8).permute(1, 2, 0).flatten().argsort()  # theirs have channels last
    head = "decoder.decoder_pred"
    tensors = {
        "model.projection.weight": theirs["vit.embeddings.patch_embeddings.projection.weight"].flatten(1),
        "model.projection.bias": theirs["vit.embeddings.patch_embeddings.projection.bias"],
        "model.prefix": theirs["vit.embeddings.cls_token"][0],
        "decoder.mask_token": theirs["decoder.mask_token"].flatten(),
        **{f"decoder.head.{part}": theirs[f"{head}.{part}"][pixels] for part in ("weight", "bias")},
    }
    for own, other in (
        ("model.encoder.norm", "vit.layernorm"),
        ("decoder.embed", "decoder.decoder_embed"),
        ("decoder.encoder.norm", "decoder.decoder_norm"),
    ):
        tensors |= {f"{own}.{part}": theirs[f"{other}.{part}"] for part in ("weight", "bias")}
    inside = {
        "attention.norm": "layernorm_before",
        "attention.part.out": "attention.o_proj",
        "mlp.norm": "layernorm_after",
        "mlp.part.fc1": "mlp.fc1",
        "mlp.part.fc2": "mlp.fc2",
    }
    for own, other in (("model.encoder.blocks", "vit.layers"), ("decoder.encoder.blocks", "decoder.decoder_layers")):
        for block, part in ((block, part) for block in range(2) for part in ("weight", "bias")):
            where = f"{other}.{block}"
            tensors |= {f"{own}.{block}.{a}.{part}": theirs[f"{where}.{b}.{part}"] for a, b in inside.items()}
            qkv = [theirs[f"{where}.attention.{letter}_proj.{part}"] for letter in "qkv"]
            tensors[f"{own}.{block}.attention.part.qkv.{part}"] = torch.cat(qkv)
    return tensors


@pytest.mark.parametrize("normalise", [True, False])
def test_loss_and_gradients_are_those_of_transformers(mae, normalise):
    from transformers import ViTMAEConfig, ViTMAEForPreTraining

    settings = ViTMAEConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=32, patch_size=8,
        decoder_hidden_size=16, decoder_num_hidden_layers=2, decoder_num_attention_heads=2,
        decoder_intermediate_size=64, norm_pix_loss=normalise, layer_norm_eps=1e-6, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(1)
    theirs = ViTMAEForPreTraining(settings).train()
    theirs.vit.embeddings.patch_embeddings.projection._is_hf_initialized = False  # else positions stay zero
    theirs.vit.embeddings.initialize_weights()
    theirs.decoder.initialize_weights(16)
    mae = MAE(mae.model, replace(DECODER, normalise=normalise))
    mae.load_state_dict(renamed({name: p.detach() for name, p in theirs.named_parameters()}))
    batch = mae.prepare(batch_of(torch.randn(3, 3, 32, 32)), TrainingProgress())
    order = torch.cat([batch["visible"], batch["masked"]], 1)
    noise = torch.empty(3, 16).scatter_(1, order, torch.arange(16.0).expand(3, 16))
    expected = theirs(batch["images"], noise=noise).loss
    expected.backward()
    loss = mae(batch)["loss"]
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    moving = {name: p for name, p in theirs.named_parameters() if p.requires_grad}
    expected = renamed({name: p.grad for name, p in moving.items()})
    assert expected.keys() == dict(mae.named_parameters()).keys()
    for name, parameter in mae.named_parameters():
        assert torch.allclose(parameter.grad, expected[name], atol=1e-5), name


def test_a_quarter_of_the_patches_is_seen_each_image_its_own():
    mae = MAE(build_model(replace(config_from_name("ViT-Ti/16"), classes=0, depth=1)), DECODER)
    batch = mae.prepare(batch_of(torch.randn(2, 3, 224, 224)), TrainingProgress())
    assert batch["visible"].shape == (2, 49) and batch["masked"].shape == (2, 147)
    both = torch.cat([batch["visible"], batch["masked"]], 1)
    assert (both.sort(1).values == torch.arange(196)).all()
    assert not torch.equal(batch["visible"][0].sort().values, batch["visible"][1].sort().values)


def test_masks_are_a_function_of_the_place_in_the_stream(mae):
    images = torch.randn(4, 3, 32, 32)
    whole = mae.prepare(batch_of(images), TrainingProgress())
    part = mae.prepare({name: entry[2:] for name, entry in batch_of(images).items()}, TrainingProgress())
    assert torch.equal(whole["visible"][2:], part["visible"]) and torch.equal(whole["targets"][2:], part["targets"])


def test_zero_predictions_have_the_loss_of_the_unbiased_variance(mae):
    batch = mae.prepare(batch_of(torch.randn(4, 3, 32, 32)), TrainingProgress())
    values = 3 * 8 * 8
    assert batch["targets"].square().mean().item() == pytest.approx((values - 1) / values, rel=1e-4)


def test_masked_patches_are_not_seen(mae):
    images = torch.randn(2, 3, 32, 32)
    batch = mae.prepare(batch_of(images), TrainingProgress())
    patches = patchify(images, (8, 8)).flatten(1, 2)
    changed = patches.scatter(1, batch["masked"][..., None].expand(-1, -1, 192), 7.0)
    other = unpatchify(changed.unflatten(1, (4, 4)), (8, 8))
    places = batch["visible"], batch["masked"]
    assert torch.allclose(mae.predict(images, *places), mae.predict(other, *places), atol=1e-6)


def test_a_reconstruction_keeps_what_was_seen_and_fills_the_rest(mae):
    images = torch.randn(2, 3, 32, 32)
    seen, restored, hidden, predicted = mae.reconstruct(images, np.arange(2))
    shown = seen != 0
    assert hidden.sum().item() == 24 and torch.equal(hidden, predicted)
    assert shown.float().mean().item() == pytest.approx(0.25)
    assert torch.equal(restored[shown], images[shown]) and torch.isfinite(restored).all()
    assert not torch.equal(restored[~shown], images[~shown])


def test_any_number_of_axes():
    config = ViTConfig(
        image=(4, 16, 16),
        patch=(2, 8, 8),
        classes=0,
        width=36,
        depth=1,
        heads=2,
        mlp=MlpConfig(hidden=32),
        positions=PositionConfig(kind="sincos"),
    )
    mae = MAE(build_model(config), replace(DECODER, decoder_width=24))
    batch = mae.prepare(batch_of(torch.randn(2, 3, 4, 16, 16)), TrainingProgress())
    assert batch["visible"].shape == (2, 2) and batch["targets"].shape == (2, 6, 3 * 2 * 64)
    assert torch.isfinite(mae(batch)["loss"])


@pytest.mark.parametrize(
    ("name", "count", "trainable"), [("ViT-B/16", 111_907_840, 111_655_680), ("ViT-L/16", 329_541_888, 329_239_296)]
)
def test_parameters_are_counted_as_published(name, count, trainable):
    config = config_from_name(name).with_options(classes=0, positions={"kind": "sincos"})
    with torch.device("meta"):
        model = build_model(config)
    own = sum(p.numel() for p in model.parameters())
    width, tokens = 512, 197
    decoder = config.width * width + width + width + 8 * (12 * width**2 + 13 * width) + 2 * width + width * 768 + 768
    assert own + decoder == trainable
    assert own + decoder + tokens * (config.width + width) == count


@pytest.mark.parametrize("mask", [0.0, 0.99, 1.0])
def test_masks_that_leave_nothing_are_refused(mask):
    with pytest.raises(UsageError, match="leaves"):
        MAEConfig(mask=mask).check(SMALL, (), Augment())


def test_models_that_need_every_patch_are_refused():
    for name in ("BiT-R50x1", "Swin-T/4"):
        with pytest.raises(UsageError, match="plain ViT"):
            MAEConfig().check(config_from_name(name), (), Augment())


def test_a_stem_of_convolutions_carries_no_hidden_pixel_into_what_is_seen():
    """Neighbouring tokens of a hybrid read each other's pixels: hidden ones are 0 before the stem."""
    config = config_from_name("Conv+ViT-128x4/8", 32).with_options(classes=0, width=32, heads=4, mlp={"hidden": 64})
    objective = MAEConfig(decoder_width=16, decoder_depth=1, decoder_heads=4).build(
        build_model(config), ObjectiveSetting()
    )
    images = torch.randn(2, 3, 32, 32, requires_grad=True)
    batch = objective.prepare(batch_of(images.detach()), TrainingProgress())
    objective.predict(images, batch["visible"], batch["masked"]).square().sum().backward()
    moved = patchify(images.grad.abs(), (8, 8)).flatten(1, 2).amax(-1)  # (B, N)
    assert not moved.gather(1, batch["masked"]).any()
    assert moved.gather(1, batch["visible"]).all()


def test_decoders_that_cannot_be_are_refused():
    for settings in ({"decoder_width": 30}, {"decoder_heads": 7}, {"decoder_depth": -1}):
        with pytest.raises(UsageError, match="decoder"):
            MAEConfig(**settings)


def test_setting_is_kept():
    assert MAE(build_model(SMALL), DECODER, ObjectiveSetting(seed=3)).setting.seed == 3


@pytest.mark.parametrize(
    "name,decoder,count",
    [
        ("ViT-B/16", 26_109_184 - 197 * 512, 111_655_680),
        ("ViT-L/16", None, 329_239_296),
        ("ViT-H/14", None, 656_613_964),
    ],
)
def test_parameters_of_the_published_models_without_fixed_positions(name, decoder, count):
    config = config_from_name(name, 224).with_options(classes=0, positions={"kind": "sincos"})  # type: ignore[arg-type, call-arg]
    with torch.device("meta"):
        own = MAEConfig().build(build_model(config), ObjectiveSetting())
    assert sum(p.numel() for p in own.parameters() if p.requires_grad) == count
    if decoder:
        assert sum(p.numel() for p in own.decoder.parameters()) == decoder


@pytest.mark.parametrize(("classes", "name"), [((), "rankme"), (("cell",), "rankme"), (("cat", "dog"), "knn_top1")])
def test_neighbours_judge_where_there_are_classes_to_tell_apart(classes, name):
    objective = MAE(build_model(SMALL), DECODER, ObjectiveSetting(classes=classes))
    train = ArraySplit(np.zeros((4, 8, 8), np.uint8), np.zeros(4, np.int64))
    assert [one.name for one in objective.evaluators(train)] == [name]
