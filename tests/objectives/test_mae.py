"""Masked autoencoding: loss and gradients match transformers' ViTMAE, and invariants of the paper hold."""

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

SMALL_CONFIG = ViTConfig(
    image=(32, 32),
    patch=(8, 8),
    classes=0,
    width=32,
    depth=2,
    heads=2,
    mlp=MlpConfig(hidden=64),
    positions=PositionConfig(kind="sincos"),
)
SMALL_MAE_CONFIG = MAEConfig(decoder_width=16, decoder_depth=2, decoder_heads=2)


def make_batch(images):
    """Return a batch as the loader does."""
    return {"images": images, "positions": torch.arange(len(images)), "samples": torch.arange(len(images))}


@pytest.fixture
def mae_objective():
    torch.manual_seed(0)
    return MAE(build_model(SMALL_CONFIG), SMALL_MAE_CONFIG)


def convert_transformers_state(theirs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rename the tensors of transformers' ViTMAE to our names, and reorder the pixels of patches."""
    # the reference stores patch pixels channels-last
    pixels = torch.arange(3 * 64).view(3, 8, 8).permute(1, 2, 0).flatten().argsort()
    head = "decoder.decoder_pred"
    tensors = {
        "model.projection.weight": theirs["vit.embeddings.patch_embeddings.projection.weight"].flatten(1),
        "model.projection.bias": theirs["vit.embeddings.patch_embeddings.projection.bias"],
        "model.prefix": theirs["vit.embeddings.cls_token"][0],
        "decoder.mask_token": theirs["decoder.mask_token"].flatten(),
        **{f"decoder.head.{parameter}": theirs[f"{head}.{parameter}"][pixels] for parameter in ("weight", "bias")},
    }
    for our_name, their_name in (
        ("model.encoder.norm", "vit.layernorm"),
        ("decoder.embed", "decoder.decoder_embed"),
        ("decoder.encoder.norm", "decoder.decoder_norm"),
    ):
        tensors |= {f"{our_name}.{parameter}": theirs[f"{their_name}.{parameter}"] for parameter in ("weight", "bias")}
    inside = {
        "attention.norm": "layernorm_before",
        "attention.part.out": "attention.o_proj",
        "mlp.norm": "layernorm_after",
        "mlp.part.fc1": "mlp.fc1",
        "mlp.part.fc2": "mlp.fc2",
    }
    for our_name, their_name in (
        ("model.encoder.blocks", "vit.layers"),
        ("decoder.encoder.blocks", "decoder.decoder_layers"),
    ):
        for block, parameter in ((block, parameter) for block in range(2) for parameter in ("weight", "bias")):
            block_prefix = f"{their_name}.{block}"
            tensors |= {
                f"{our_name}.{block}.{a}.{parameter}": theirs[f"{block_prefix}.{b}.{parameter}"]
                for a, b in inside.items()
            }
            qkv = [theirs[f"{block_prefix}.attention.{letter}_proj.{parameter}"] for letter in "qkv"]
            tensors[f"{our_name}.{block}.attention.part.qkv.{parameter}"] = torch.cat(qkv)
    return tensors


@pytest.mark.parametrize("normalise", [True, False])
def test_loss_and_gradients_match_transformers(mae_objective, normalise):
    from transformers import ViTMAEConfig, ViTMAEForPreTraining

    settings = ViTMAEConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=32, patch_size=8,
        decoder_hidden_size=16, decoder_num_hidden_layers=2, decoder_num_attention_heads=2,
        decoder_intermediate_size=64, norm_pix_loss=normalise, layer_norm_eps=1e-6, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(1)
    theirs = ViTMAEForPreTraining(settings).train()
    # otherwise transformers leaves positions at zero
    theirs.vit.embeddings.patch_embeddings.projection._is_hf_initialized = False
    theirs.vit.embeddings.initialize_weights()
    theirs.decoder.initialize_weights(16)
    mae_objective = MAE(mae_objective.model, replace(SMALL_MAE_CONFIG, normalise=normalise))
    mae_objective.load_state_dict(
        convert_transformers_state({name: p.detach() for name, p in theirs.named_parameters()})
    )
    batch = mae_objective.prepare(make_batch(torch.randn(3, 3, 32, 32)), TrainingProgress())
    order = torch.cat([batch["visible"], batch["masked"]], 1)
    noise = torch.empty(3, 16).scatter_(1, order, torch.arange(16.0).expand(3, 16))
    expected = theirs(batch["images"], noise=noise).loss
    expected.backward()
    loss = mae_objective(batch)["loss"]
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    moving = {name: p for name, p in theirs.named_parameters() if p.requires_grad}
    expected = convert_transformers_state({name: p.grad for name, p in moving.items()})
    assert expected.keys() == dict(mae_objective.named_parameters()).keys()
    for name, parameter in mae_objective.named_parameters():
        assert torch.allclose(parameter.grad, expected[name], atol=1e-5), name


def test_a_quarter_of_the_patches_is_visible_per_image():
    mae = MAE(build_model(replace(config_from_name("ViT-Ti/16"), classes=0, depth=1)), SMALL_MAE_CONFIG)
    batch = mae.prepare(make_batch(torch.randn(2, 3, 224, 224)), TrainingProgress())
    assert batch["visible"].shape == (2, 49) and batch["masked"].shape == (2, 147)
    all_indices = torch.cat([batch["visible"], batch["masked"]], 1)
    assert (all_indices.sort(1).values == torch.arange(196)).all()
    assert not torch.equal(batch["visible"][0].sort().values, batch["visible"][1].sort().values)


def test_masks_depend_only_on_the_sample_position(mae_objective):
    images = torch.randn(4, 3, 32, 32)
    full_batch = mae_objective.prepare(make_batch(images), TrainingProgress())
    last_samples = mae_objective.prepare(
        {name: entry[2:] for name, entry in make_batch(images).items()}, TrainingProgress()
    )
    assert torch.equal(full_batch["visible"][2:], last_samples["visible"]) and torch.equal(
        full_batch["targets"][2:], last_samples["targets"]
    )


def test_targets_are_normalised_by_the_unbiased_variance(mae_objective):
    batch = mae_objective.prepare(make_batch(torch.randn(4, 3, 32, 32)), TrainingProgress())
    values = 3 * 8 * 8
    assert batch["targets"].square().mean().item() == pytest.approx((values - 1) / values, rel=1e-4)


def test_masked_patches_do_not_affect_predictions(mae_objective):
    images = torch.randn(2, 3, 32, 32)
    batch = mae_objective.prepare(make_batch(images), TrainingProgress())
    patches = patchify(images, (8, 8)).flatten(1, 2)
    changed = patches.scatter(1, batch["masked"][..., None].expand(-1, -1, 192), 7.0)
    changed_images = unpatchify(changed.unflatten(1, (4, 4)), (8, 8))
    indices = batch["visible"], batch["masked"]
    assert torch.allclose(
        mae_objective.predict(images, *indices), mae_objective.predict(changed_images, *indices), atol=1e-6
    )


def test_reconstruction_keeps_visible_patches(mae_objective):
    images = torch.randn(2, 3, 32, 32)
    visible_images, restored, hidden, predicted = mae_objective.reconstruct(images, np.arange(2))
    is_visible = visible_images != 0
    assert hidden.sum().item() == 24 and torch.equal(hidden, predicted)
    assert is_visible.float().mean().item() == pytest.approx(0.25)
    assert torch.equal(restored[is_visible], images[is_visible]) and torch.isfinite(restored).all()
    assert not torch.equal(restored[~is_visible], images[~is_visible])


def test_mae_of_3d_inputs():
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
    mae = MAE(build_model(config), replace(SMALL_MAE_CONFIG, decoder_width=24))
    batch = mae.prepare(make_batch(torch.randn(2, 3, 4, 16, 16)), TrainingProgress())
    assert batch["visible"].shape == (2, 2) and batch["targets"].shape == (2, 6, 3 * 2 * 64)
    assert torch.isfinite(mae(batch)["loss"])


@pytest.mark.parametrize(
    ("name", "count", "trainable"), [("ViT-B/16", 111_907_840, 111_655_680), ("ViT-L/16", 329_541_888, 329_239_296)]
)
def test_published_parameter_counts_follow_the_formula(name, count, trainable):
    config = config_from_name(name).with_options(classes=0, positions={"kind": "sincos"})
    with torch.device("meta"):
        model = build_model(config)
    num_encoder = sum(p.numel() for p in model.parameters())
    width, tokens = 512, 197
    decoder = config.width * width + width + width + 8 * (12 * width**2 + 13 * width) + 2 * width + width * 768 + 768
    assert num_encoder + decoder == trainable
    assert num_encoder + decoder + tokens * (config.width + width) == count


@pytest.mark.parametrize("mask", [0.0, 0.99, 1.0])
def test_invalid_mask_ratios_are_rejected(mask):
    with pytest.raises(UsageError, match="leaves"):
        MAEConfig(mask=mask).check(SMALL_CONFIG, (), Augment())


def test_models_that_need_every_patch_are_rejected():
    for name in ("BiT-R50x1", "Swin-T/4"):
        with pytest.raises(UsageError, match="plain ViT"):
            MAEConfig().check(config_from_name(name), (), Augment())


def test_conv_stem_does_not_leak_masked_pixels():
    """Neighbouring tokens of a hybrid overlap in the stem, so masked pixels are set to 0 before it."""
    config = config_from_name("Conv+ViT-128x4/8", 32).with_options(classes=0, width=32, heads=4, mlp={"hidden": 64})
    objective = MAEConfig(decoder_width=16, decoder_depth=1, decoder_heads=4).build(
        build_model(config), ObjectiveSetting()
    )
    images = torch.randn(2, 3, 32, 32, requires_grad=True)
    batch = objective.prepare(make_batch(images.detach()), TrainingProgress())
    objective.predict(images, batch["visible"], batch["masked"]).square().sum().backward()
    pixel_gradients = patchify(images.grad.abs(), (8, 8)).flatten(1, 2).amax(-1)  # (B, N)
    assert not pixel_gradients.gather(1, batch["masked"]).any()
    assert pixel_gradients.gather(1, batch["visible"]).all()


def test_invalid_decoders_are_rejected():
    for settings in ({"decoder_width": 30}, {"decoder_heads": 7}, {"decoder_depth": -1}):
        with pytest.raises(UsageError, match="decoder"):
            MAEConfig(**settings)


def test_objective_setting_is_stored():
    assert MAE(build_model(SMALL_CONFIG), SMALL_MAE_CONFIG, ObjectiveSetting(seed=3)).setting.seed == 3


@pytest.mark.parametrize(
    "name,decoder,count",
    [
        ("ViT-B/16", 26_109_184 - 197 * 512, 111_655_680),
        ("ViT-L/16", None, 329_239_296),
        ("ViT-H/14", None, 656_613_964),
    ],
)
def test_trainable_parameter_counts_match_the_published_models(name, decoder, count):
    config = config_from_name(name, 224).with_options(classes=0, positions={"kind": "sincos"})  # type: ignore[arg-type, call-arg]
    with torch.device("meta"):
        objective = MAEConfig().build(build_model(config), ObjectiveSetting())
    assert sum(p.numel() for p in objective.parameters() if p.requires_grad) == count
    if decoder:
        assert sum(p.numel() for p in objective.decoder.parameters()) == decoder


@pytest.mark.parametrize(("classes", "name"), [((), "rankme"), (("cell",), "rankme"), (("cat", "dog"), "knn_top1")])
def test_knn_evaluator_is_used_only_with_several_classes(classes, name):
    objective = MAE(build_model(SMALL_CONFIG), SMALL_MAE_CONFIG, ObjectiveSetting(classes=classes))
    train = ArraySplit(np.zeros((4, 8, 8), np.uint8), np.zeros(4, np.int64))
    assert [evaluator.name for evaluator in objective.evaluators(train)] == [name]
