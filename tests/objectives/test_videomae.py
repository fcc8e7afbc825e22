"""VideoMAE: tube masks, targets per channel, published parameter counts, and runs on clips."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import vitreous
from tests.data.films import make_moving_square, write_clip, write_moves
from tests.objectives.test_clips import TRAIN_OPTIONS, StoppingListener
from vitreous.data.augmentation.augment import Augment
from vitreous.data.augmentation.masks import tube_masks
from vitreous.data.keys import derive_keys
from vitreous.errors import UsageError
from vitreous.models.config import ViTConfig
from vitreous.models.names import config_from_name
from vitreous.models.zoo import build_model
from vitreous.objectives.base import ObjectiveSetting, TrainingProgress
from vitreous.objectives.mae import MAE, MAEConfig
from vitreous.recipes.registry import build_example_run
from vitreous.training.folder import RunFolder
from vitreous.weights.bundle import load_bundle

TINY_MAE_CONFIG = MAEConfig(
    mask=0.75, tubes=True, decoder_width=24, decoder_depth=1, decoder_heads=2, normalise_channels=True
)  # fmt: skip
DECODER_SETTINGS = {
    "objective.decoder_width": ["24"],
    "objective.decoder_depth": ["1"],
    "objective.decoder_heads": ["2"],
}


def make_tiny_config(**fields):
    """Return a config of VideoMAE's encoder for clips of 4 frames of 16 pixels."""
    shape = {"image": (4, 16, 16), "classes": 0, "norm": {"final": "tokens"}, **fields}
    return config_from_name("VideoMAE-32x2/4x2").with_options(**shape)


def make_batch(clips):
    """Return a batch as the loader does."""
    return {"images": clips, "positions": torch.arange(len(clips)), "samples": torch.arange(len(clips))}


def test_tube_masks_are_constant_over_time():
    keep, mask = tube_masks(derive_keys(np.arange(64)), (8, 14, 14), 0.9)
    assert keep.shape == (64, 160) and mask.shape == (64, 8, 14, 14)
    assert (mask == mask[:, :1]).all() and (mask[:, 0].sum((1, 2)) == 176).all()
    is_visible = ~mask.reshape(64, -1)
    assert all(
        (np.flatnonzero(row) == visible_indices).all() for row, visible_indices in zip(is_visible, keep, strict=True)
    )
    assert len({row.tobytes() for row in mask}) == 64
    assert (np.abs(mask[:, 0].mean(0) - 176 / 196) < 0.2).all()  # all positions are masked equally often
    for share in (0.0, 1.0):
        with pytest.raises(UsageError, match="visible"):
            tube_masks(np.arange(2), (8, 14, 14), share)


def test_targets_are_normalised_per_channel_and_tubelet():
    objective = MAE(build_model(make_tiny_config()), TINY_MAE_CONFIG)
    clips = torch.randn(2, 3, 4, 16, 16) * torch.tensor([1.0, 3.0, 0.1])[:, None, None, None] + 2
    batch = objective.prepare(make_batch(clips), TrainingProgress())
    assert batch["masked"].shape == (2, 24) and batch["visible"].shape == (2, 8)
    for sample in range(2):
        for position, target in zip(batch["masked"][sample].tolist(), batch["targets"][sample], strict=True):
            t, i, j = position // 16, position % 16 // 4, position % 4
            for channel, values in enumerate(target.view(3, -1)):
                pixels = clips[sample, channel, 2 * t : 2 * t + 2, 4 * i : 4 * i + 4, 4 * j : 4 * j + 4].flatten()
                mean = pixels.sum() / 32
                variance = ((pixels - mean) ** 2).sum() / 31
                assert torch.allclose(values, (pixels - mean) / (variance**0.5 + 1e-6), atol=1e-5)


def test_pretraining_parameter_counts_match_the_paper():
    run = build_example_run("videomae")
    with torch.device("meta"):
        objective = run.objective.build(build_model(run.model), ObjectiveSetting())
    counts = [sum(p.numel() for p in module.parameters()) for module in (objective, objective.model, objective.decoder)]
    between = 768 * 384 + 384  # the decoder's input layer and the mask token
    assert counts == [94_210_944, 86_227_200, 7_688_448 + between]
    assert run.objective.count_visible_patches(run.model.grid) == 160 and run.preprocess.stride == 4
    sizes = {size: build_example_run("videomae", f"VideoMAE-{size}/16x2").objective for size in "SLH"}
    assert [(c.decoder_width, c.decoder_heads) for c in sizes.values()] == [(192, 3), (512, 8), (640, 8)]


def test_videomae_overfits_few_clips():
    torch.manual_seed(0)
    objective = MAE(build_model(make_tiny_config()), TINY_MAE_CONFIG)
    objective.config.initialise(objective.model)
    clips = torch.stack([torch.from_numpy(make_moving_square(seed, seed % 2 == 0, 4)) for seed in range(2)])
    batch = objective.prepare(make_batch(clips.permute(0, 4, 1, 2, 3).float() / 127.5 - 1), TrainingProgress())
    optimiser = torch.optim.AdamW(objective.parameters(), lr=5e-3)
    losses = []
    for _ in range(120):
        optimiser.zero_grad()
        loss = objective(batch)["loss"]
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0], (losses[0], losses[-1])


def test_encoder_sees_only_visible_pixels():
    objective = MAE(build_model(make_tiny_config()), TINY_MAE_CONFIG).eval()
    clips, keys = torch.randn(2, 3, 4, 16, 16), derive_keys(np.arange(2))
    visible_clips, restored, hidden, _ = objective.reconstruct(clips, keys)
    assert (hidden == hidden[:, :1]).all() and hidden.shape == (2, 2, 4, 4)
    visible_pixels = ~hidden.repeat_interleave(2, 1).repeat_interleave(4, 2).repeat_interleave(4, 3)[:, None].expand_as(
        clips
    )
    assert (
        torch.equal(restored[visible_pixels], clips[visible_pixels])
        and not visible_clips[~visible_pixels].any()
        and torch.isfinite(restored).all()
    )
    visible, masked = objective.draw_masks(keys, clips.device)
    changed_clips = torch.where(visible_pixels, clips, torch.full_like(clips, 7.0))
    with torch.no_grad():
        assert torch.equal(objective.predict(clips, visible, masked), objective.predict(changed_clips, visible, masked))


@pytest.mark.parametrize(("config", "model", "problem"), [
    (TINY_MAE_CONFIG, ViTConfig(image=(32, 32), patch=(8, 8), classes=0), "images have no time axis"),
    (replace(TINY_MAE_CONFIG, mask=0.01), make_tiny_config(), "leaves no"), (replace(TINY_MAE_CONFIG, mask=0.99, tubes=False), make_tiny_config(), "leaves no"),
    (TINY_MAE_CONFIG, make_tiny_config().with_options(attention={"key_bias": True}, arrangement="factorised-attention", positions={"kind": "learned"}), "attend to every"),
])  # fmt: skip
def test_invalid_videomae_configs_are_rejected(config, model, problem):
    with pytest.raises(UsageError, match=problem):
        config.check(model, (), Augment())
    with pytest.raises(UsageError, match=r"'objective.normalise': \['true'\]"):
        replace(TINY_MAE_CONFIG, normalise=False)


@pytest.fixture(scope="module")
def moving_squares(tmp_path_factory):
    """Return clips of squares that move left or right."""
    return write_moves(tmp_path_factory.mktemp("clips"), 12, (".gif", ""))


@pytest.fixture(scope="module")
def videomae_run(moving_squares, tmp_path_factory):
    """Return a `videomae` run on the clips."""
    out = tmp_path_factory.mktemp("runs") / "run"
    options = {
        **TRAIN_OPTIONS,
        "model": "VideoMAE-32x2/4x2",
        "steps": 6,
        "save_every": 2,
        "frames": 4,
        "evaluate_every": 3,
    }
    vitreous.train(str(moving_squares), out=str(out), recipe="videomae", settings=DECODER_SETTINGS, **options)
    return out, options


def test_videomae_encoder_initialises_a_classifier(moving_squares, videomae_run, tmp_path):
    out, _ = videomae_run
    bundle = load_bundle(out / "model")
    assert bundle.model.config.name() == "VideoMAE-32x2/4x2" and bundle.model.config.norm.final == "tokens"
    lines = [json.loads(line) for line in (out / "metrics.jsonl").open()]
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    assert len(losses) == 6 and np.isfinite(losses).all() and any("val/knn_top1" in line for line in lines)
    learned = json.loads((out / "learned.json").read_text())
    assert learned["reconstructions"]["rows"] and "each channel" in learned["reconstructions"]["caption"]
    document = vitreous.train(
        str(moving_squares), out=str(tmp_path / "classes"), init=str(out), steps=2, **TRAIN_OPTIONS
    )
    model = load_bundle(tmp_path / "classes" / "model").model
    assert document["val"]["images"] == 2 and model.config.classes == 2 and model.config.image == (4, 16, 16)


def test_resumed_videomae_run_is_bit_identical(moving_squares, videomae_run, tmp_path):
    out, options = videomae_run
    with pytest.raises(KeyError):
        vitreous.train(
            str(moving_squares), out=str(tmp_path / "run"), recipe="videomae", settings=DECODER_SETTINGS, listener=StoppingListener(36), log_every=1,
            **{**options, "workers": 2},
        )  # fmt: skip
    vitreous.train(out=str(tmp_path / "run"), resume=True)
    for name in ("weights.safetensors", "objective.safetensors"):
        assert (tmp_path / "run" / "model" / name).read_bytes() == (out / "model" / name).read_bytes()


def test_videomae_trains_on_a_flat_folder_of_clips(tmp_path):
    for seed in range(8):
        write_clip(tmp_path / "clips" / f"{seed}.gif", make_moving_square(seed, True))
    options = {**TRAIN_OPTIONS, "batch_size": 4, "steps": 2, "frames": 4}
    for recipe, name in (("videomae", "VideoMAE-64x6/4x2"), ("mae", "ViViT-64x6/4x2")):
        document = vitreous.train(str(tmp_path / "clips"), out=str(tmp_path / recipe), recipe=recipe, **options)
        stored = RunFolder(tmp_path / recipe).run()
        assert document["steps"] == 2 and "knn_top1" not in document["val"] and stored.model.name() == name
        assert stored.objective.tubes is (recipe == "videomae")


@pytest.mark.parametrize(("recipe", "data", "problem"), [
    ("videomae", "digits", "is for clips, but the data are images"), ("dino", "CLIPS", "needs images"),
])  # fmt: skip
def test_recipes_for_other_data_are_rejected(moving_squares, tmp_path, recipe, data, problem):
    data = str(moving_squares) if data == "CLIPS" else data
    with pytest.raises(UsageError, match=problem):
        vitreous.train(data, out=str(tmp_path / "run"), recipe=recipe, steps=1)
