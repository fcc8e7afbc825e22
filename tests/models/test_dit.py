"""DiT: parameter counts and costs of the paper, adaLN-Zero, and the model of diffusers with the same weights."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import vitreous
from tests.contracts import randomise
from vitreous.config import from_builtins, to_builtins
from vitreous.errors import UsageError
from vitreous.models.configs.dit import DiTConfig
from vitreous.models.dit import DiT
from vitreous.models.names import config_from_name
from vitreous.models.zoo import build_without_init
from vitreous.nn.condition import AdaLNBlock, timestep_embedding
from vitreous.nn.frozen import freeze_for_inference
from vitreous.nn.grid import patchify, unpatchify

#: trainable parameters, and 10^9 multiply-adds for latents of 32 x 32 (the paper's "Gflops")
PUBLISHED_SIZES = {
    "XL/2": (674_834_720, 118.62),
    "XL/4": (675_000_704, 29.04),
    "XL/8": (675_664_640, 7.39),
    "L/2": (457_840_672, 80.70),
    "L/4": (457_988_224, 19.70),
    "L/8": (458_578_432, 5.01),
    "B/2": (130_315_808, 23.01),
    "B/4": (130_426_496, 5.57),
    "B/8": (130_869_248, 1.42),
    "S/2": (32_865_056, 6.06),
    "S/4": (32_920_448, 1.41),
    "S/8": (33_142_016, 0.36),
}
TINY_CONFIG = DiTConfig(image=(8, 8), channels=3, classes=5, width=32, depth=2, heads=2, hidden=64)


def build_tiny_dit(**changes):
    torch.manual_seed(0)
    return randomise(DiT(replace(TINY_CONFIG, **changes))).eval()


def make_batch(channels=3, side=8):
    torch.manual_seed(1)
    return torch.randn(3, channels, side, side), torch.tensor([0.0, 17.0, 999.0]), torch.tensor([0, 4, 5])


@pytest.mark.parametrize("size", PUBLISHED_SIZES)
def test_parameter_counts_and_macs_match_the_paper(size):
    config = config_from_name(f"DiT-{size}")
    parameters, cost = PUBLISHED_SIZES[size]
    assert sum(p.numel() for p in build_without_init(config).parameters()) == parameters
    assert config.macs() / 1e9 == pytest.approx(cost, abs=0.006)
    assert config.name() == f"DiT-{size}" and config.learned_variance and config.channels == 4


def test_macs_at_larger_latents_match_the_paper():
    assert config_from_name("DiT-XL/2", 64).macs() / 1e9 == pytest.approx(524.54, abs=0.1)


def test_model_names_round_trip():
    assert config_from_name("dit-64x3/2").name() == "DiT-64x3/2" and config_from_name("DiT-64x3/4").patch == (4, 4)
    assert from_builtins(DiTConfig, to_builtins(TINY_CONFIG)) == TINY_CONFIG
    for wrong in ("DiT-XXL/2", "DiT-64x3/0"):
        with pytest.raises(UsageError):
            config_from_name(wrong)
    with pytest.raises(UsageError, match="heads"):
        replace(TINY_CONFIG, heads=3)
    with pytest.raises(UsageError, match="image size 9x8 is not divisible"):
        replace(TINY_CONFIG, image=(9, 8))


def test_initial_model_outputs_zero_and_blocks_are_the_identity():
    model = vitreous.create("DiT-64x2/2", channels=3, num_classes=5, image_size=8)
    images, time, labels = make_batch()
    assert model(images, time, labels).abs().max() == 0
    x, condition = torch.randn(2, 16, 64), torch.randn(2, 64)
    for block in model.blocks():
        assert torch.equal(block(x, condition), x)


def test_block_matches_the_formula():
    model = build_tiny_dit()
    block: AdaLNBlock = model.blocks()[0]
    x, c = torch.randn(2, 16, 32), torch.randn(2, 32)
    m = block.modulation(c)[:, None].chunk(6, -1)
    norm = lambda y: torch.nn.functional.layer_norm(y, (32,), eps=1e-6)  # noqa: E731
    expected = x + m[2] * block.attention(norm(x) * (1 + m[1]) + m[0])
    expected = expected + m[5] * block.mlp(norm(expected) * (1 + m[4]) + m[3])
    assert torch.allclose(block(x, c), expected, atol=1e-5)


def test_time_embeddings_are_cosines_and_then_sines():
    table = timestep_embedding(torch.tensor([0.0, 3.0]), 8)
    assert table[0].tolist() == [1.0] * 4 + [0.0] * 4
    expected = [math.cos(3 * 10000 ** (-i / 4)) for i in range(4)] + [math.sin(3 * 10000 ** (-i / 4)) for i in range(4)]
    assert table[1].tolist() == pytest.approx(expected, abs=1e-6)


def test_output_is_batch_independent_and_conditioned_on_time_and_class():
    model = build_tiny_dit()
    images, time, labels = make_batch()
    together = model(images, time, labels)
    alone = torch.cat([model(*(tensor[i : i + 1] for tensor in (images, time, labels))) for i in range(3)])
    assert torch.allclose(together, alone, atol=1e-4 * together.abs().max().item())
    assert (model(images, time + 1, labels) - together).abs().max() > 1e-3
    assert (model(images, time, (labels + 1) % 6) - together).abs().max() > 1e-3
    # the last embedding is the "no class" embedding
    assert torch.equal(model(images, time), model(images, time, torch.full((3,), 5)))


def test_every_parameter_gets_a_gradient():
    model = build_tiny_dit(qk_norm=True).train()
    images, time, labels = make_batch()
    model(images, time, labels).square().sum().backward()
    assert not [name for name, p in model.named_parameters() if not p.grad.abs().sum() > 0]


def test_outputs_are_equivariant_to_the_order_of_patches():
    model = build_tiny_dit()
    images, time, labels = make_batch()
    tokens, order = model.add_positions(model.project(images)), torch.randperm(16)
    condition = model.condition(time, labels)
    assert torch.allclose(
        model.encode(tokens[:, order], condition), model.encode(tokens, condition)[:, order], atol=1e-4
    )


def test_other_image_sizes_and_clips():
    model = build_tiny_dit()
    _, time, labels = make_batch()
    assert model(torch.randn(3, 3, 12, 6), time, labels).shape == (3, 6, 12, 6)
    clips = build_tiny_dit(image=(4, 8, 8), patch=(2, 2, 2), width=36, heads=2, learned_variance=False)
    assert clips(torch.randn(3, 3, 4, 8, 8), time, labels).shape == (3, 3, 4, 8, 8)
    with pytest.raises(ValueError, match="channels"):
        model(torch.randn(3, 4, 8, 8), time, labels)
    with pytest.raises(ValueError, match="no classes"):
        build_tiny_dit(classes=0)(torch.randn(3, 3, 8, 8), time, labels)


CLIP_OPTIONS = {"image": (4, 8, 12), "patch": (1, 4, 4), "width": 36, "depth": 3, "learned_variance": False}


def test_clip_blocks_alternate_between_space_and_time():
    model = build_tiny_dit(**CLIP_OPTIONS, arrangement="alternating")
    clips, (_, time, labels) = torch.randn(3, 3, 4, 8, 12), make_batch()
    assert model(clips, time, labels).shape == clips.shape
    condition = model.condition(time, labels)
    x = model.add_positions(model.project(clips)).unflatten(1, (4, 6))
    for index, block in enumerate(model.blocks()):
        if index % 2:
            loop = torch.stack([AdaLNBlock.forward(block, x[:, :, position], condition) for position in range(6)], 2)
        else:
            loop = torch.stack([block(x[:, slot], condition) for slot in range(4)], 1)
        x = block(x, condition)
        assert torch.allclose(x, loop, atol=1e-5)
    expected = model.last(x.flatten(1, 2), condition)
    assert torch.allclose(model.encode(model.add_positions(model.project(clips)), condition), expected, atol=1e-5)
    longer = torch.randn(3, 3, 7, 4, 8)
    assert model(longer, time, labels).shape == longer.shape
    assert [features.shape for features in model.features_after(clips, [0, 3], time, labels)] == [(3, 24, 36)] * 2
    with torch.inference_mode():
        assert torch.allclose(freeze_for_inference(model)(clips, time, labels), model(clips, time, labels), atol=1e-4)


def test_alternating_blocks_names_costs_and_errors():
    config = config_from_name("DiT-96x4/2x4x4-alternating", (8, 16, 16))
    assert config.name() == "DiT-96x4/2x4x4-alternating" and config.grid == (4, 4, 4)
    joint = replace(config, arrangement="joint")
    less = 2 * (64 * 2 * (64 - 16) * 96) + 2 * (64 * 2 * (64 - 4) * 96)  # keys outside a query's row or column
    assert joint.macs() - config.macs() == less
    for changes in ({"image": (8, 8), "patch": (2, 2)}, {**CLIP_OPTIONS, "depth": 1}):
        with pytest.raises(UsageError, match="alternating blocks require a depth of at least 2 and images with 3 axes"):
            replace(TINY_CONFIG, **{**changes, "arrangement": "alternating"})


def test_layer_indices_for_layer_decay():
    names = ("projection.weight", "time.fc1.weight", "encoder.blocks.1.modulation.weight", "last.linear.weight")
    assert [TINY_CONFIG.parameter_layer(name) for name in names] == [0, 0, 2, 3]


@pytest.mark.parametrize("qk_norm", [False, True])
def test_a_frozen_copy_has_the_same_outputs(qk_norm):
    model = build_tiny_dit(qk_norm=qk_norm)
    images, time, labels = make_batch()
    expected = model(images, time, labels)
    with torch.inference_mode():
        assert torch.allclose(
            freeze_for_inference(model, packed=True)(images, time, labels), expected, atol=2e-5 * expected.abs().max()
        )
        half = freeze_for_inference(model, torch.bfloat16)(images.bfloat16(), time, labels).float()
    assert (half - expected).norm() / expected.norm() < 2e-2


def build_diffusers_dit(config):
    diffusers = pytest.importorskip("diffusers", reason="a test dependency")
    theirs = diffusers.DiTTransformer2DModel(
        num_attention_heads=config.heads,
        attention_head_dim=config.width // config.heads,
        in_channels=config.channels,
        out_channels=config.out_channels,
        num_layers=config.depth,
        sample_size=config.image[0],
        patch_size=config.patch[0],
        num_embeds_ada_norm=config.classes,
        norm_eps=1e-6,
    )
    randomise(theirs)
    first_norm = theirs.transformer_blocks[0].norm1.emb.state_dict()
    for block in theirs.transformer_blocks:  # a converted DiT has the same in all blocks
        block.norm1.emb.load_state_dict(first_norm)
    return theirs.eval()


@pytest.mark.parametrize("side", [8, 12])
def test_outputs_match_diffusers(side, tmp_path):
    """Random weights written by diffusers and read here, at two sizes. At other sizes than the model's, diffusers
    resizes positions; the authors' code does not."""
    config = replace(TINY_CONFIG, hidden=128, image=(side, side))
    theirs = build_diffusers_dit(config)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_dit_bundle(tmp_path / "theirs")
    assert ours.model.config == replace(config, time_shift=1)
    images, time, labels = make_batch(side=side)
    with torch.no_grad():
        expected = theirs(images, timestep=time.long(), class_labels=labels).sample
        outputs = ours.model(images, time, labels)
    assert (outputs - expected).abs().max() <= 1e-5 * expected.abs().max()


def load_dit_bundle(folder):
    from vitreous.weights.adopt import open_weights

    return open_weights(folder).build_bundle()


def test_patch_pixel_order_is_converted_from_the_authors_layout():
    """The layout is (h, w, p, q, c) there and (h, w, c, p, q) here; the loaded weights generate the same image."""
    from vitreous.weights.formats.dit import CHANNELS_LAST

    config = replace(TINY_CONFIG, learned_variance=False)
    weights = torch.randn(12, 7)
    (ours,) = CHANNELS_LAST.to_native([weights], config)
    x = torch.randn(1, 4, 4, 7)
    theirs = (x @ weights.T).unflatten(-1, (2, 2, 3)).permute(0, 5, 1, 3, 2, 4).reshape(1, 3, 8, 8)
    assert torch.allclose(unpatchify(x @ ours.T, (2, 2)), theirs, atol=1e-5)
    assert torch.equal(CHANNELS_LAST.to_foreign([ours], config)[0], weights)
    assert patchify(theirs, (2, 2)).shape == (1, 4, 4, 12)
