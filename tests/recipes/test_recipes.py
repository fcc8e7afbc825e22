"""Recipes: published hyperparameters, two training steps of each, batch-size rules, and printed descriptions."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.conftest import make_folder
from tests.data.films import write_clip
from vitreous.cli.main import run_command
from vitreous.data.annotations.target import Target, create_empty_target
from vitreous.data.augmentation.augment import Augment
from vitreous.data.layouts.video import ClipFiles
from vitreous.data.modalities.base import IMAGENET_MOMENTS as NORM
from vitreous.data.modalities.clips import ClipPreprocess
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.data.pairs import Captions, PairSplit, PairTable
from vitreous.data.split import ArraySplit, Data
from vitreous.errors import UsageError, WeightsError
from vitreous.jobs.train import train
from vitreous.models.config import BiTConfig, MlpConfig, SwinAttentionConfig, SwinConfig, ViTConfig
from vitreous.models.names import config_from_name
from vitreous.models.zoo import build_model
from vitreous.objectives import feature_distillation
from vitreous.objectives import teacher as teachers
from vitreous.objectives.detection import DetectionConfig
from vitreous.recipes.derive import apply_train_options, derive_run_config
from vitreous.recipes.names import RECIPE_NAMES
from vitreous.recipes.options import TrainOptions
from vitreous.recipes.recipe import DatasetInfo
from vitreous.recipes.registry import RECIPES, build_example_run, get_hold_out_share, get_lr_grid
from vitreous.tasks.classification import Classification
from vitreous.training.batches import RunInputs
from vitreous.training.folder import RunFolder
from vitreous.training.loop import run_training_loop
from vitreous.training.run import Run
from vitreous.training.session import Session
from vitreous.weights.adopt import WeightsInfo, load_pretrained_weights
from vitreous.weights.bundle import Bundle, save

GOLDEN_FILE = Path(__file__).parent / "golden.json"
CURVE_RECIPES = ("vit-imagenet", "deit", "small")
IMAGENET_TRAIN_IMAGES = 1_281_167


def get_nested_attribute(run, path):
    """The value at a dotted path."""
    for name in path.split("."):
        run = getattr(run, name)
    return run


PRETRAINING_FIELDS = [
    "batch_size",
    "epochs",
    "optimizer.lr",
    "schedule.decay",
    "optimizer.weight_decay",
    "model.regularization.dropout",
    "optimizer.clip",
]


@pytest.mark.parametrize(
    "recipe,model,row",
    [  # arXiv:2010.11929, Table 3
        ("vit-jft", "ViT-B/16", (4096, 7, 8e-4, "linear", 0.1, 0.0, None)),
        ("vit-jft", "ViT-B/32", (4096, 7, 8e-4, "linear", 0.1, 0.0, None)),
        ("vit-jft", "ViT-L/32", (4096, 7, 6e-4, "linear", 0.1, 0.0, None)),
        ("vit-jft", "ViT-L/16", (4096, 14, 4e-4, "linear", 0.1, 0.0, None)),
        ("vit-jft", "ViT-H/14", (4096, 14, 3e-4, "linear", 0.1, 0.0, None)),
        ("bit-jft-adam", "BiT-R50x1", (4096, 7, 1e-3, "linear", 0.1, 0.0, None)),
        ("bit-jft-adam", "BiT-R50x2", (4096, 7, 1e-3, "linear", 0.1, 0.0, None)),
        ("bit-jft-adam", "BiT-R101x1", (4096, 7, 8e-4, "linear", 0.1, 0.0, None)),
        ("bit-jft-adam", "BiT-R152x1", (4096, 7, 6e-4, "linear", 0.1, 0.0, None)),
        ("bit-jft-adam", "BiT-R152x2", (4096, 7, 6e-4, "linear", 0.1, 0.0, None)),
        ("vit-jft", "R50+ViT-B/16", (4096, 7, 8e-4, "linear", 0.1, 0.0, None)),
        ("vit-jft", "R50+ViT-B/32", (4096, 7, 8e-4, "linear", 0.1, 0.0, None)),
        ("vit-jft", "R50+ViT-L/32", (4096, 7, 2e-4, "linear", 0.1, 0.0, None)),
        ("vit-jft", "R50+ViT-L/16", (4096, 14, 4e-4, "linear", 0.1, 0.0, None)),
        ("vit-imagenet21k", "ViT-B/16", (4096, 90, 1e-3, "linear", 0.03, 0.1, None)),
        ("vit-imagenet21k", "ViT-L/32", (4096, 90, 1e-3, "linear", 0.03, 0.1, None)),
        ("vit-imagenet", "ViT-L/16", (4096, 300, 3e-3, "cosine", 0.3, 0.1, 1.0)),
    ],
)
def test_table_3(recipe, model, row):
    run = build_example_run(recipe, model)
    assert tuple(get_nested_attribute(run, path) for path in PRETRAINING_FIELDS) == row
    assert (run.schedule.warmup_steps, run.optimizer.betas, run.optimizer.decay_on) == (10_000, (0.9, 0.999), "all")
    assert run.objective.loss == ("softmax" if recipe == "vit-imagenet" else "sigmoid")
    assert run.model.name() == model and run.model.image == (224, 224)
    if isinstance(run.model, ViTConfig):
        assert run.model.head.representation == run.model.width
    assert (run.views.crop, run.views.crop_style, run.views.flip, run.views.rand_layers) == (
        (0.05, 1.0),
        "inception",
        0.5,
        0,
    )


def test_pretraining_steps_match_the_paper():
    assert [build_example_run(name).steps for name in ("vit-jft", "vit-imagenet", "vit-imagenet21k")] == [
        517_823,
        93_836,
        312_012,
    ]
    assert (
        build_example_run("vit-imagenet21k").objective.head_bias == -10
        and build_example_run("augreg-imagenet").objective.head_bias == -6.9
    )


@pytest.mark.parametrize(
    "recipe,epochs,milestones,loss",
    [
        ("bit-jft-sgd", 7, (10 / 40, 23 / 40, 30 / 40, 37 / 40), "sigmoid"),
        ("bit-imagenet", 90, (30 / 90, 60 / 90, 80 / 90), "softmax"),
        ("bit-imagenet21k", 90, (30 / 90, 60 / 90, 80 / 90), "sigmoid"),
    ],
)
def test_bit_pretraining_hyperparameters(recipe, epochs, milestones, loss):
    run = build_example_run(recipe)
    assert (run.optimizer.name, run.optimizer.lr, run.optimizer.momentum, run.optimizer.weight_decay) == (
        "sgd",
        0.48,
        0.9,
        1e-4,
    )
    assert (run.schedule.decay, run.schedule.warmup_steps, run.schedule.milestones) == (
        "steps",
        5000,
        pytest.approx(milestones),
    )
    assert (run.batch_size, run.epochs, run.objective.loss) == (4096, epochs, loss)


@pytest.mark.parametrize(
    "recipe,steps,warmup,grid,hold_out",
    [  # arXiv:2010.11929, Table 4; arXiv:2106.10270, Table 4
        ("finetune-imagenet", 20_000, 500, (0.003, 0.01, 0.03, 0.06), 0.01),
        ("finetune-imagenet-512", 20_000, 500, (0.003, 0.01, 0.03, 0.06), 0.01),
        ("finetune-cifar", 10_000, 500, (0.001, 0.003, 0.01, 0.03), 0.02),
        ("finetune-pets", 500, 100, (0.001, 0.003, 0.01, 0.03), 0.1),
        ("finetune-flowers", 500, 100, (0.001, 0.003, 0.01, 0.03), 0.1),
        ("finetune-vtab", 2_500, 500, (0.01,), 0.2),
        ("augreg-finetune-imagenet", 20_000, 500, (0.01, 0.03), 0.01),
        ("augreg-finetune-pets", 500, 100, (0.001, 0.003, 0.01), 0.1),
        ("augreg-finetune-pets-long", 2_500, 200, (0.001, 0.003, 0.01), 0.1),
        ("augreg-finetune-cifar", 2_500, 200, (0.001, 0.003, 0.01), 0.02),
        ("augreg-finetune-cifar-long", 10_000, 500, (0.001, 0.003, 0.01), 0.02),
        ("augreg-finetune-vtab", 500, 100, (0.001, 0.003, 0.01, 0.03), 0.2),
        ("augreg-finetune-vtab-long", 2_500, 200, (0.001, 0.003, 0.01, 0.03), 0.2),
    ],
)
def test_fine_tuning_tables(recipe, steps, warmup, grid, hold_out):
    run = build_example_run(recipe)
    assert (run.steps, run.schedule.warmup_steps, run.schedule.decay, run.batch_size) == (steps, warmup, "cosine", 512)
    assert (run.optimizer.name, run.optimizer.momentum, run.optimizer.weight_decay, run.optimizer.clip) == (
        "sgd",
        0.9,
        0.0,
        1.0,
    )
    assert (get_lr_grid(run), get_lr_grid(recipe), get_hold_out_share(run), get_hold_out_share(recipe)) == (
        grid,
        grid,
        hold_out,
        hold_out,
    )
    assert run.optimizer.lr in grid
    assert run.model.head.representation is None and run.preprocess.fit == "squash"
    large = recipe.endswith("512")
    assert (run.model.image, run.ema) == (((512, 512), 0.9999) if large else ((384, 384), None))


def test_resolution_and_dropout_follow_the_model():
    assert build_example_run("finetune-imagenet-512", "ViT-H/14").model.image == (518, 518)
    assert build_example_run("finetune-cifar", "ViT-H/14").model.image == (378, 378)  # the multiple of 14 nearest 384
    assert [
        build_example_run("finetune-cifar", m).model.regularization.dropout
        for m in ("ViT-L/16", "ViT-L/32", "ViT-B/16", "R50+ViT-B/16")
    ] == [0.1, 0, 0, 0.1]
    assert build_example_run("augreg-finetune-cifar", "ViT-L/16").model.regularization.dropout == 0


def test_default_lr_grid_and_hold_out_share():
    assert get_lr_grid("") == get_lr_grid("photos") == (0.001, 0.003, 0.01, 0.03)
    assert get_hold_out_share("") is get_hold_out_share("photos") is None


@pytest.mark.parametrize(
    "images,size,model,expected,drops",
    [  # google-research/big_transfer, bit_hyperrule.py
        (5_000, (32, 32), "BiT-R50x1", (500, 100, 0.0, 128), (200, 300, 400)),
        (50_000, (32, 32), "BiT-R152x4", (10_000, 500, 0.1, 128), (3000, 6000, 9000)),
        (50_000, (300, 400), "BiT-R152x4", (10_000, 500, 0.1, 480), (3000, 6000, 9000)),
        (IMAGENET_TRAIN_IMAGES, (300, 400), "BiT-R50x1", (20_000, 500, 0.1, 384), (6000, 12_000, 18_000)),
    ],
)
def test_bit_hyperrule(images, size, model, expected, drops):
    run = derive_run("bit-hyperrule", images=images, size=size, start=config_from_name(model))
    assert (run.steps, run.schedule.warmup_steps, run.views.mixup, run.model.image[0]) == expected
    assert (run.optimizer.lr, run.optimizer.clip, run.schedule.decay) == (0.003, None, "steps")
    assert tuple(round(share * run.steps) for share in run.schedule.milestones) == drops


@pytest.mark.parametrize(
    "level,expected",
    [
        ("none", (0, 0, 0.0)),
        ("light1", (2, 0, 0.0)),
        ("light2", (2, 10, 0.2)),
        ("medium1", (2, 15, 0.2)),
        ("medium2", (2, 15, 0.5)),
        ("strong1", (2, 20, 0.5)),
        ("strong2", (2, 20, 0.8)),
    ],
)
@pytest.mark.parametrize("data", ["imagenet", "imagenet21k"])
def test_augreg(data, level, expected):
    run = build_example_run(f"augreg-{data}-{level}")
    assert (run.views.rand_layers, run.views.rand_magnitude, run.views.mixup) == expected
    assert run.views.rand_style == "big_vision"
    assert (run.batch_size, run.epochs, run.optimizer.lr, run.optimizer.weight_decay, run.optimizer.clip) == (
        4096,
        300,
        1e-3,
        0.1,
        1.0,
    )
    assert (run.schedule.warmup_steps, run.schedule.decay, run.objective.loss) == (10_000, "cosine", "sigmoid")
    assert run.model.head.representation == (768 if data == "imagenet" else None)


def test_augreg_augmentation_per_model():
    chosen = {
        ("imagenet", "ViT-Ti/16"): "light1",
        ("imagenet", "ViT-S/32"): "medium1",
        ("imagenet", "ViT-B/16"): "medium2",
        ("imagenet21k", "ViT-Ti/16"): "none",
        ("imagenet21k", "ViT-S/32"): "none",
        ("imagenet21k", "ViT-S/16"): "light1",
        ("imagenet21k", "ViT-B/32"): "light2",
        ("imagenet21k", "ViT-B/16"): "light2",
        ("imagenet21k", "ViT-L/16"): "medium2",
    }
    for (data, model), level in chosen.items():
        assert (
            build_example_run(f"augreg-{data}", model).views == build_example_run(f"augreg-{data}-{level}", model).views
        ), (data, model)


def test_plain_vit_hyperparameters():
    run, longer = build_example_run("plain-vit"), build_example_run("plain-vit-300")
    assert (run.model.name(), run.batch_size, run.epochs, longer.epochs, run.steps) == (
        "ViT-S/16",
        1024,
        90,
        300,
        112_603,
    )
    assert (run.model.positions.kind, run.model.pool, run.model.class_token, run.model.head.representation) == (
        "sincos-big-vision",
        "mean",
        False,
        384,
    )
    assert (run.optimizer.lr, run.optimizer.weight_decay, run.optimizer.clip, run.schedule.warmup_steps) == (
        1e-3,
        0.1,
        1.0,
        10_000,
    )
    assert (run.views.rand_layers, run.views.rand_magnitude, run.views.mixup, run.objective.loss) == (
        2,
        10,
        0.2,
        "softmax",
    )


def test_deit():
    run = build_example_run("deit")
    assert (run.batch_size, run.epochs, run.optimizer.lr, run.optimizer.weight_decay, run.optimizer.clip) == (
        1024,
        300,
        1e-3,
        0.05,
        None,
    )
    assert (run.schedule.warmup_steps, run.schedule.end * run.optimizer.lr) == (
        round(5 * IMAGENET_TRAIN_IMAGES / 1024),
        pytest.approx(1e-5),
    )
    augment = Augment(
        crop=(0.08, 1.0),
        crop_filter="bicubic",
        flip=0.5,
        rand_style="timm",
        rand_layers=2,
        rand_magnitude=9,
        rand_spread=0.5,
        erase=0.25,
        erase_noise=True,
        mixup=0.8,
        cutmix=1.0,
    )
    assert run.views == augment
    assert (
        run.objective.smoothing,
        run.model.regularization.drop_path,
        run.ema,
        run.data.repeats,
        run.preprocess.share,
    ) == (0.1, 0.1, 0.99996, 3, 0.875)
    assert run.preprocess.mean == (0.485, 0.456, 0.406)
    larger = build_example_run("deit-384")
    assert (larger.model.image, larger.epochs, larger.batch_size) == ((384, 384), 30, 512)
    assert (larger.optimizer.lr, larger.optimizer.weight_decay, larger.schedule.end) == (5e-6, 1e-8, 1.0)


@pytest.mark.parametrize("model,drop_path", [("Swin-T/4", 0.2), ("Swin-S/4", 0.3), ("Swin-B/4", 0.5)])
def test_swin(model, drop_path):
    """arXiv:2103.14030, A2.1, and microsoft/Swin-Transformer's config.py."""
    run = build_example_run("swin", model)
    assert (run.epochs, run.batch_size, run.ema, run.data.repeats, run.preprocess.share) == (300, 1024, None, 1, 0.875)
    assert (run.optimizer.lr, run.optimizer.weight_decay, run.optimizer.clip) == (1e-3, 0.05, 5.0)
    assert (run.schedule.warmup_steps, run.schedule.end) == (round(20 * IMAGENET_TRAIN_IMAGES / 1024), 0.01)
    assert (run.objective.smoothing, run.model.regularization.drop_path, run.model.image) == (
        0.1,
        drop_path,
        (224, 224),
    )
    views = run.views
    assert (views.rand_style, views.rand_layers, views.rand_magnitude, views.rand_spread) == ("timm", 2, 9, 0.5)
    assert (views.mixup, views.cutmix, views.erase) == (0.8, 1.0, 0.25)


def test_swin_hyperparameters_beyond_imagenet():
    large = build_example_run("swin-imagenet21k", "Swin-L/4")
    assert (large.epochs, large.batch_size, large.optimizer.lr, large.model.regularization.drop_path) == (
        90,
        4096,
        1e-3,
        0.2,
    )
    tuned = build_example_run("swin-finetune", "Swin-L/4")
    assert (tuned.epochs, tuned.optimizer.lr, tuned.optimizer.weight_decay) == (30, 4e-5, 1e-8)
    wide = build_example_run("swin-384", "Swin-B/4-window12")
    assert (wide.model.image, wide.model.attention.window, wide.model.windows) == ((384, 384), 12, ((12, 12),) * 4)
    assert (wide.model.name(), wide.model.regularization.drop_path) == ("Swin-B/4-window12", 0.5)
    assert (wide.preprocess.fit, wide.preprocess.image) == ("squash", (384, 384))
    with pytest.raises(UsageError, match="for Swin Transformers, not ViT-S/16"):
        build_example_run("swin", "ViT-S/16")


@pytest.mark.parametrize(
    "model,lr,drop_path,pixels",
    [
        ("DeiT-III-S/16", 4e-3, 0.05, 224),
        ("DeiT-III-B/16", 3e-3, 0.2, 192),
        ("DeiT-III-L/16", 3e-3, 0.45, 192),
        ("DeiT-III-H/14", 3e-3, 0.6, 154),
    ],
)
def test_deit_3(model, lr, drop_path, pixels):
    run = build_example_run("deit3", model)
    assert (run.optimizer.name, run.optimizer.lr, run.model.regularization.drop_path, run.model.image[0]) == (
        "lamb",
        lr,
        drop_path,
        pixels,
    )
    assert (run.batch_size, run.epochs, run.optimizer.weight_decay, run.objective.smoothing) == (2048, 800, 0.05, 0.0)
    assert run.objective.loss != "softmax" and run.views.three and run.views.rand_layers == run.views.erase == 0
    assert (run.views.jitter, run.views.mixup, run.views.cutmix, run.preprocess.share) == (
        (0.3, 0.3, 0.3),
        0.8,
        1.0,
        1.0,
    )
    assert run.model.norm.layer_scale == 1e-4


def test_deit3_finish_trains_at_224_pixels():
    run = build_example_run("deit3-finish")
    assert (run.model.image, run.epochs, run.batch_size, run.data.repeats) == ((224, 224), 20, 512, 1)
    assert (run.optimizer.name, run.optimizer.lr, run.optimizer.weight_decay, run.objective.loss) == (
        "adamw",
        1e-5,
        0.1,
        "softmax",
    )


@pytest.mark.parametrize(
    "model, lr, epochs, drop_path, pixels",
    [("ViT-5-S/16", 4e-3, 800, 0.05, 224), ("ViT-5-B/16", 3e-3, 800, 0.2, 192), ("ViT-5-L/16", 3e-3, 400, 0.35, 192)],
)
def test_vit5_changes_the_hyperparameters_of_deit3(model, lr, epochs, drop_path, pixels):
    run = build_example_run("vit5", model)
    assert (run.optimizer.name, run.optimizer.lr, run.epochs, run.model.image[0]) == ("lamb", lr, epochs, pixels)
    regularization = run.model.regularization
    assert (regularization.drop_path, regularization.drop_path_rises) == (drop_path, False)
    assert run.schedule.end * lr == pytest.approx(1e-5)


def test_vit5_has_whole_rotary_positions_at_every_image_size():
    pretraining, finish = build_example_run("vit5", "ViT-5-B/16"), build_example_run("vit5-finish", "ViT-5-B/16")
    for run, grid in ((pretraining, 12), (finish, 14)):
        assert (run.model.grid, run.model.rotary.reference) == ((grid, grid), grid)
    plain = build_example_run("vit5", "ViT-S/16").model
    assert plain.name() == "ViT-S/16" and plain.regularization.drop_path == 0.05


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_every_recipe_names_its_source_and_command(name):
    recipe = RECIPES[name]
    assert recipe.name == name and recipe.about and recipe.source
    assert "vitreous train" in recipe.text and "NAME" not in recipe.text
    assert name in recipe.text or name in ("digits", "finetune")
    assert ("--init" in recipe.text) >= recipe.from_weights
    for model in recipe.models:
        assert build_example_run(name, model).model.name() == model


def make_synthetic_split(images=48, size=32, frames=()):
    """Images, or clips of `frames` frames, of three tints with noise, and their labels."""
    generator = np.random.default_rng(0)
    labels = np.arange(images) % 3
    pixels = generator.integers(0, 128, (images, *frames, size, size, 3), dtype=np.uint8)
    for row, label in enumerate(labels):
        pixels[row, ..., label] += 100
    return ArraySplit(pixels, labels.astype(np.int64))


class ClassMapSplit(ArraySplit):
    """Images whose pixels all have the class of the image."""

    def target(self, sample):
        return create_empty_target(
            self.pixels.shape[1:3], np.full(self.pixels.shape[1:3], self.labels[sample], np.int32)
        )


class BoxSplit(ArraySplit):
    """Images with an object of their class in the centre."""

    def target(self, sample):
        labels, box = self.labels[sample : sample + 1].astype(np.int64), np.array([[8, 8, 24, 24]], np.float32)
        return Target(self.pixels.shape[1:3], labels, box, np.zeros(1, bool))


def with_small_head(objective):
    """An objective with few prototypes: those of ImageNet-22k take 1 GB."""
    if isinstance(objective, DetectionConfig):
        return replace(objective, width=16, hidden=16, proposals=20)
    many = {name: 64 for name in ("prototypes", "patch_prototypes") if (getattr(objective, name, None) or 0) > 65536}
    return replace(objective, **many)


def build_reduced_run(name, steps):
    """A recipe's run reduced to a small model of the same family, batch size 8, one warm-up step and few prototypes."""
    recipe = RECIPES[name]
    if recipe.models and recipe.models[0].startswith("BiT"):
        model = BiTConfig(image=(32, 32), classes=3, blocks=(1, 1), width=32)
    elif recipe.for_models == "swin":
        classes = 3 if recipe.objective.labelled else 0
        model = SwinConfig(
            image=(32, 32),
            patch_size=(4, 4),
            classes=classes,
            width=16,
            blocks=(1, 1),
            heads=(1, 2),
            attention=SwinAttentionConfig(window=4),
        )
    else:
        has_model = recipe.models and not recipe.objective.paired  # recipes of pairs add a text encoder to a ViT
        kind = config_from_name(recipe.models[0] if has_model else "ViT-32x2/8")
        classes = 3 if recipe.objective.labelled or recipe.objective.generates else 0
        shape = {"channels": 3, "classes": classes, "width": 32, "depth": 2, "heads": 2}
        shape |= {"hidden": 64} if kind.generates_images else {"mlp": {"hidden": 64}}
        if name.startswith("adapter"):
            shape["depth"] = 4
        if name.startswith("vitdet"):
            shape |= {"attention": {"global_blocks": (1,), "window": 2}, "position_grid": (4, 4)}
        frames = (2,) if recipe.is_for_clips else ()
        model = kind.with_options(image=(*frames, 32, 32), patch=(*frames, 8, 8), **shape)
    template = (ClipPreprocess if recipe.is_for_clips else ImagePreprocess)(model.image)
    run = recipe.make(model, DatasetInfo(48, model.image, 3, template), TrainOptions("synthetic"))
    data = replace(run.data, source="synthetic", classes=("a", "b", "c"))
    return replace(
        run,
        recipe=name,
        data=data,
        objective=with_small_head(run.objective),
        batch_size=8,
        epochs=steps / 6,
        schedule=replace(run.schedule, warmup_steps=1),
        log_every=1,
    )


def train_and_collect_losses(run: Run, folder: Path):
    """The loss of every step, and whether the weights changed."""
    split, losses = make_synthetic_split(frames=run.model.image[:-2]), []
    if run.objective.annotated:
        kind = {"classes": ClassMapSplit, "objects": BoxSplit}[run.objective.annotated]
        split = kind(split.pixels, split.labels)
    if run.objective.of_values:
        split = ArraySplit(split.pixels, np.stack([split.labels, split.labels**2, -split.labels], 1).astype(np.float64))
        run = replace(run, objective=run.objective.fitted(split.labels))
    if run.objective.paired:
        tokens = np.random.default_rng(0).integers(1, 99, (len(split), run.model.text.length)).astype(np.int32)
        images = ArraySplit(split.pixels, np.zeros((len(split), 0), np.float32))
        table = PairTable(images, np.arange(len(split)), Captions(["x"] * len(split)), tokens=tokens)
        split = PairSplit(table, np.arange(len(split)))
    if run.preprocess.is_animated:
        paths = [write_clip(folder / "clips" / f"{row}.gif", pixels) for row, pixels in enumerate(split.pixels)]
        split = ClipFiles(paths, split.labels)

    def tick(state):
        losses.append(state.losses)
        state.losses = 0.0

    session = Session(run, RunInputs(split, None), RunFolder(folder))
    state = session.build()
    initial_weights = state.flat.master.clone()
    run_training_loop(state, session.batches(state), [(1, tick)])
    return losses, bool((initial_weights != state.flat.master).any())


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_every_recipe_trains_two_steps(name, tmp_path, monkeypatch):
    run = build_reduced_run(name, 2)
    if name in ("distil", "distil-features"):
        teacher = Bundle(
            build_model(replace(run.model, pool="class")), Classification(run.data.classes), run.preprocess, {}
        )
        for module in (teachers, feature_distillation):
            monkeypatch.setattr(module, "open_weights", lambda source: SimpleNamespace(build_bundle=lambda: teacher))
        run = replace(run, objective=replace(run.objective, teacher="runs/teacher"))
    curve, moved = train_and_collect_losses(run, tmp_path)
    assert len(curve) == 2 and all(map(math.isfinite, curve)) and moved
    dataset_info = DatasetInfo(48, run.model.image, 3, run.preprocess)
    default_run = RECIPES[name].make(run.model, dataset_info, TrainOptions("synthetic"))
    assert (run.optimizer, run.views, type(run.objective)) == (
        default_run.optimizer,
        default_run.views,
        type(default_run.objective),
    )
    assert name in ("distil", "distil-features") or run.objective == with_small_head(default_run.objective)


@pytest.mark.parametrize("name", CURVE_RECIPES)
def test_golden_curve(name, tmp_path):
    """The losses of ten steps must match the stored ones. `python -m tests.recipes.test_recipes` rewrites them."""
    golden = json.loads(GOLDEN_FILE.read_text())[name]
    curve, _ = train_and_collect_losses(build_reduced_run(name, 10), tmp_path)
    assert len(golden) == 10 and curve == pytest.approx(golden, abs=2e-2 if name == "small" else 1e-4)


def derive_run(recipe=None, images=100_000, size=(300, 400), start=None, notes=None, labels=(0, 1), **options):
    """The run derived from options for a dataset of `images` images."""
    data = Data(
        "synthetic", ("a", "b"), {"train": ArraySplit(np.zeros((len(labels), 4, 4, 3), np.uint8), np.array(labels))}
    )
    train_options = TrainOptions(
        "x", recipe=recipe, device="cpu", precision="fp32", init="weights" if start else None, **options
    )
    collected_notes = [] if notes is None else notes
    return derive_run_config(
        train_options, data, DatasetInfo(images, size, 3), WeightsInfo(start) if start else None, collected_notes.append
    )


@pytest.mark.parametrize(
    "options,shift",
    [
        ({}, 0.0625),
        ({"images": 20_000}, 0.125),  # 18 epochs
        ({"epochs": 10.0}, 0.0625),
        ({"epochs": 19.0}, 0.125),
        ({"steps": 1000, "batch_size": 100, "accumulate": 10}, 0.0625),
        ({"steps": 1000, "batch_size": 100, "accumulate": 11}, 0.125),
        ({"epochs": 19.0, "model": "ViT-96x4/4"}, 0.0625),
    ],
)
def test_shift_augmentation_grows_with_epochs(options, shift):
    assert derive_run("small", size=(32, 32), **options).views.shift == shift


@pytest.mark.parametrize(
    "recipe,before,options,after",
    [
        ("vit-imagenet", 4096, {"batch_size": 1024}, 0.00075),
        ("vit-imagenet", 4096, {"batch_size": 1024, "accumulate": 8}, 0.006),
        ("deit", 1024, {"batch_size": 512}, 5e-4),
        ("deit3", 2048, {"batch_size": 512}, 0.002),
        ("photos", 64, {"batch_size": 256}, 1e-3),
        ("photos", 64, {"batch_size": 16}, 2.5e-4),
        ("small", 128, {"batch_size": 512}, 2e-3),
    ],
)
def test_learning_rate_scales_with_batch_size_by_the_recipe_rule(recipe, before, options, after):
    notes = []
    default_run, run = derive_run(recipe), derive_run(recipe, notes=notes, **options)
    assert default_run.step_size == before and run.optimizer.lr == pytest.approx(after)
    if default_run.optimizer.lr != after:
        rule = RECIPES[recipe].lr_scaling
        note = (
            f"learning rate {default_run.optimizer.lr:g} -> {after:g}: batch {before} -> {run.step_size}, {rule} scaling "
            f"rule of {recipe}"
        )
        assert note in notes
    else:
        assert not notes


def test_explicit_learning_rate_is_not_scaled():
    notes = []
    option_sets: list[dict] = [{"lr": 0.01}, {"settings": {"optimizer.lr": ["0.01"]}}]
    for options in option_sets:
        assert derive_run("vit-imagenet", batch_size=1024, warmup_steps=5, notes=notes, **options).optimizer.lr == 0.01
    assert not notes


def test_recipe_is_adapted_to_a_small_dataset():
    notes = []
    run = derive_run("vit-imagenet", images=1000, notes=notes)
    assert (run.batch_size, run.steps, run.schedule.warmup_steps) == (1000, 300, 30)
    assert run.optimizer.lr == pytest.approx(3e-3 * 1000 / 4096)
    assert notes == [
        "batch 4096 -> 1000: the training set has 1000 images",
        "learning rate 0.003 -> 0.0007324: batch 4096 -> 1000, linear scaling rule of vit-imagenet",
        "warm-up 10000 -> 30 steps: a tenth of the run, which has fewer steps than vit-imagenet (93836)",
    ]
    assert derive_run("vit-imagenet", images=1000, warmup_steps=200).schedule.warmup_steps == 200


@pytest.mark.parametrize("recipe", ["dit", "sit", "deit", "distil", "deit3", "finetune-imagenet-512"])
def test_ema_decay_is_constant_except_in_short_runs(recipe):
    model = {"dit": "DiT-S/2", "sit": "DiT-S/2"}.get(recipe)
    start = config_from_name("ViT-L/16") if recipe.startswith("finetune") else None
    notes, options = [], {"images": IMAGENET_TRAIN_IMAGES, "start": start, "model": model}
    run = derive_run(recipe, notes=notes, **options)
    assert run.ema in (0.9999, 0.99996) and not run.ema_warmup and not any("EMA" in note for note in notes)
    assert derive_run(recipe, steps=1000, notes=notes, **options).ema_warmup and any("EMA" in note for note in notes)
    assert not derive_run(recipe, steps=1000, ema_warmup=False, **options).ema_warmup
    assert derive_run("small").ema_warmup


@pytest.mark.parametrize(
    ("recipe", "model", "rule", "linspace"),
    [
        ("mae", "ViT-B/16", "multi-axis", False),
        ("videomae", None, "matrices", True),
        ("dino", "ViT-S/16", "multi-axis", True),
        ("dinov2", "ViT-L/16", "multi-axis", True),
        ("dinov2-large", "DINOv2-L/14", "multi-axis", True),
        ("swin-upernet", "Swin-T/4", "mmdet", False),
        ("swin-mask-rcnn", "Swin-T/4", "mmdet", False),
        ("adapter-upernet", "ViT-B/16", "multi-axis", False),
        ("adapter-mask-rcnn", "ViT-B/16", "matrices", False),
        ("adapter-mask-rcnn", "ViT-L/16", "multi-axis", False),
        ("vitdet", "ViTDet-B/16", "vitdet", False),
        ("vitdet", "ViTDet-H/16", "all", False),
        ("vitdet-lvis", "ViTDet-H/16", "all", False),
        ("deit", "ViT-S/16", "matrices", False),
        ("vit-imagenet", "ViT-B/16", "all", False),
    ],
)
def test_weight_decay_and_warm_up_follow_the_authors_code(recipe, model, rule, linspace):
    config = replace(config_from_name(model or "VideoMAE-B/16x2"), classes=0)
    template = (ClipPreprocess if recipe == "videomae" else ImagePreprocess)(config.image)
    run = RECIPES[recipe].make(config, DatasetInfo(IMAGENET_TRAIN_IMAGES, (300, 400), 3, template), TrainOptions("x"))
    assert (run.optimizer.decay_on, run.schedule.warmup_includes_base) == (rule, linspace)


@pytest.mark.parametrize("recipe", ["masked-patches", "mae", "dino", "dinov2"])
def test_few_photographs_use_small_batches(recipe):
    """An epoch of the published batch size would have a single step."""
    notes = []
    run = derive_run(recipe, images=100, notes=notes)
    assert (run.batch_size, run.step_size) == (25, 25) and run.steps <= 6400 and run.schedule.warmup_steps > 0
    settings = f"{recipe} uses settings tuned for small datasets instead of the published ones: batch size 25, "
    # there is no other note on the batch size or warm-up
    assert [note.startswith(settings) for note in notes] == [True], notes
    assert run.model.image == (224, 224) and run.model.width <= 768 and run.recipe == recipe
    many = derive_run(recipe, images=10_000)
    assert many.batch_size >= 512 and derive_run(recipe, images=9_999).batch_size == 64
    if recipe.startswith("dino"):
        assert run.objective.prototypes < many.objective.prototypes / 10 and run.model.width == 384
        assert run.views == many.views and run.preprocess == many.preprocess  # photographs keep the crops of the recipe
        assert run.schedules["momentum"].start < many.schedules["momentum"].start
    named = derive_run(recipe, images=100, batch_size=8, model="ViT-Ti/16")
    assert named.batch_size == 8 and named.model.width == 192


def test_frozen_teacher_student_keeps_published_hyperparameters():
    run = derive_run("dinov2", images=100, settings={"objective.teacher": ["runs/teacher"]}, model="ViT-S/16")
    assert run.objective.prototypes == derive_run("dinov2", images=10_000).objective.prototypes


def test_recipes_keep_their_length_in_steps_or_epochs():
    run = derive_run("finetune-cifar", start=config_from_name("ViT-B/16"), batch_size=128)
    assert (run.steps, run.schedule.warmup_steps, run.optimizer.lr) == (10_000, 500, pytest.approx(0.0075))
    pets = derive_run("finetune-pets", start=config_from_name("ViT-B/16"), images=300)
    # a fifth of the run, as in the table
    assert (pets.batch_size, pets.steps, pets.schedule.warmup_steps) == (300, 500, 100)
    run = derive_run("deit", images=IMAGENET_TRAIN_IMAGES, batch_size=256)
    # still five epochs
    assert (run.epochs, run.schedule.warmup_steps) == (300, pytest.approx(5 * IMAGENET_TRAIN_IMAGES / 256, abs=4))
    assert derive_run("finetune-cifar", start=config_from_name("ViT-B/16"), steps=50).schedule.warmup_steps == 5


def test_options_override_the_recipe():
    run = derive_run("deit", mixup=0.0, drop_path=0.3, ema=0.0, settings={"views.flip": ["0.1"]})
    assert (run.views.mixup, run.views.cutmix, run.model.regularization.drop_path, run.ema, run.views.flip) == (
        0.0,
        1.0,
        0.3,
        None,
        0.1,
    )
    assert run.recipe == "deit"


ENCODER_CONFIG = ViTConfig(
    image=(32, 32),
    patch=(4, 4),
    classes=0,
    width=32,
    depth=2,
    heads=2,
    class_token=False,
    pool="mean",
    mlp=MlpConfig(hidden=64),
)


def test_default_recipe_depends_on_the_data():
    assert [
        derive_run(size=(32, 32)).recipe,
        derive_run().recipe,
        derive_run(start=config_from_name("ViT-B/32")).recipe,
    ] == ["small", "photos", "finetune"]
    assert derive_run(start=config_from_name("ViT-B/32")).optimizer.lr == pytest.approx(2.5e-5)


def test_headless_encoder_is_fine_tuned_with_layer_decay():
    data = Data("synthetic", ("a", "b"), {"train": ArraySplit(np.zeros((2, 4, 4, 3), np.uint8), np.array([0, 1]))})
    options = TrainOptions("x", device="cpu", init="weights")
    runs = {
        classifies: derive_run_config(
            options, data, DatasetInfo(1_000, (32, 32), 3), WeightsInfo(ENCODER_CONFIG, classifies=classifies)
        )
        for classifies in (True, False)
    }
    assert [runs[True].recipe, runs[False].recipe] == ["finetune", "finetune-encoder"]
    assert (runs[True].optimizer.layer_decay, runs[False].optimizer.layer_decay) == (1.0, 0.75)
    assert runs[False].optimizer.lr == pytest.approx(2e-3)


def test_mae_finetune_uses_mean_pooling_and_a_pooled_norm(tmp_path):
    save(build_model(replace(ENCODER_CONFIG, pool="class", class_token=True)), tmp_path / "encoder")
    run = derive_run("mae-finetune", images=100, start=replace(ENCODER_CONFIG, pool="class", class_token=True))
    assert (run.model.pool, run.model.norm.final, run.model.regularization.drop_path) == ("mean", "pooled", 0.1)
    assert run.optimizer.layer_decay == 0.65 and run.objective.smoothing == 0.1
    adoption = load_pretrained_weights(build_model(run.model), tmp_path / "encoder", ("a", "b"))
    assert {"pooled_norm.weight", "head.weight"} <= set(
        adoption.initialised
    ) and "encoder.norm.weight" in adoption.unused
    assert load_pretrained_weights(
        build_model(replace(run.model, patch=(8, 8), image=(32, 32))), tmp_path / "encoder"
    ).patches
    with pytest.raises(WeightsError, match=r"norm\.bias has shape"):
        load_pretrained_weights(build_model(replace(run.model, width=2 * run.model.width)), tmp_path / "encoder")


def test_fine_tuning_keeps_the_normalisation_of_the_weights():
    data = Data("synthetic", ("a", "b"), {"train": ArraySplit(np.zeros((2, 4, 4, 3), np.uint8), np.array([0, 1]))})
    start = WeightsInfo(config_from_name("ViT-B/16"), ImagePreprocess((224, 224), mean=NORM[0], std=NORM[1], share=0.9))
    options = TrainOptions("x", recipe="finetune-cifar", device="cpu", init="weights")
    preprocess = derive_run_config(options, data, DatasetInfo(50_000, (32, 32), 3), start).preprocess
    assert (preprocess.mean, preprocess.std, preprocess.fit, preprocess.image) == (*NORM, "squash", (384, 384))


def test_init_keeps_architecture_but_not_regularisation():
    start = config_from_name("ViT-B/16").with_options(
        mlp={"gelu": "quick"}, positions={"resize": "bicubic"}, regularization={"dropout": 0.2, "drop_path": 0.3}
    )
    model = derive_run("vit-imagenet", start=start).model
    assert (
        model.mlp.gelu,
        model.positions.resize,
        model.regularization.dropout,
        model.regularization.drop_path,
        model.head.representation,
    ) == ("quick", "bicubic", 0.1, 0.0, 768)
    model = derive_run("finetune-pets", start=start).model
    assert (
        model.mlp.gelu,
        model.regularization.dropout,
        model.regularization.drop_path,
        model.head.representation,
    ) == ("quick", 0.0, 0.0, None)
    assert (build_example_run("vit-imagenet").model.mlp.gelu, build_example_run("deit").model.mlp.gelu) == (
        "tanh",
        "none",
    )


def test_balanced_class_weights_average_one():
    labels = (0, 0, 0, 1)
    weights = derive_run("small", size=(32, 32), labels=labels, class_weights="balanced").objective.class_weights
    assert weights == pytest.approx((4 / (2 * 3), 4 / 2))
    assert np.mean([weights[label] for label in labels]) == pytest.approx(1)
    assert derive_run("small", size=(32, 32), class_weights="even").objective.class_weights == ()


def test_requested_options_are_stored_in_the_run():
    run = derive_run("small", size=(32, 32), micro_batch="16", reproducible=True, last_blocks=2, layer_decay=0.75)
    assert (run.micro_batch, run.reproducible, run.shards, run.tune.last_blocks, run.optimizer.layer_decay) == (
        16,
        True,
        4,
        2,
        0.75,
    )
    assert derive_run("small", size=(32, 32), reproducible=True, shards=2).shards == 2
    assert derive_run("small", size=(32, 32), micro_batch="auto").micro_batch is None


@pytest.mark.parametrize(
    "options,expected",
    [
        ({"recipe": "vit-imagnet"}, "unknown recipe vit-imagnet\n  did you mean vit-imagenet?"),
        ({"recipe": "finetune-cifar"}, "finetune-cifar needs initial weights\n  set them with init"),
        ({"recipe": "vit-imagenet", "model": "BiT-R50x1"}, "vit-imagenet is for Vision Transformers, not BiT-R50x1"),
        ({"recipe": "bit-imagenet", "model": "ViT-B/16"}, "use model='BiT-R50x1', or another recipe"),
        ({"micro_batch": "half"}, "invalid micro_batch half"),
        ({"micro_batch": "0"}, "invalid micro_batch=0"),
    ],
)
def test_invalid_options_are_rejected(options, expected):
    with pytest.raises(UsageError) as error:
        derive_run(**options)
    assert expected in str(error.value)


def run_and_capture(capsys, *words):
    """The output of a command: the JSON document, or the text."""
    assert run_command(list(words)) == 0
    printed = capsys.readouterr()
    return json.loads(printed.out) if "--json" in words else printed.out, printed.err


def test_recipes_command_lists_and_describes_recipes(capsys):
    listed, _ = run_and_capture(capsys, "recipes", "--json")
    assert [row["name"] for row in listed["recipes"]] == list(RECIPE_NAMES)
    assert all((row["epochs"] is None) != (row["steps"] is None) for row in listed["recipes"])
    document, _ = run_and_capture(capsys, "recipes", "vit-imagenet", "--json")
    assert (
        document["run"]["optimizer"]["lr"] == 3e-3
        and {"model": "ViT-B/32", "result": "73.38 %"}.items() <= document["published"][1].items()
    )
    text, _ = run_and_capture(capsys, "recipes", "finetune-pets")
    assert (
        "vitreous train DATA --recipe finetune-pets --init WEIGHTS" in text
        and "94.43 %" in text
        and "10% of the training images held out" in text
    )
    assert (
        len(run_and_capture(capsys, "recipes", "finetune-*")[0].splitlines()) == 12
    )  # title, header, seven recipes, a hint, and blank lines
    with pytest.raises(UsageError, match="did you mean finetune-pets"):
        run_command(["recipes", "finetune-pet"])


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_recipes_command_describes_every_recipe(capsys, name):
    text, _ = run_and_capture(capsys, "recipes", name)
    assert text.startswith(f"{name}: ") and (f"--recipe {name}" in text or name in ("digits", "finetune"))
    assert "of the training images held out" in text
    document, _ = run_and_capture(capsys, "recipes", name, "--json")
    assert (
        document["recipe"]["name"] == name
        and document["models"]
        and document["run"]["optimizer"]["lr"] == document["recipe"]["lr"]
    )


@pytest.mark.parametrize(
    "name,images", [("small", 1_800), ("small", 20_000), ("small", 500), ("photos", 4_000), ("finetune", 900)]
)
def test_listed_length_matches_the_planned_epochs(capsys, name, images):
    """The table has the range and `recipes NAME` the rule by which `train` chooses the epochs for other datasets."""
    listed = {row["name"]: row for row in run_and_capture(capsys, "recipes", "--json")[0]["recipes"]}
    text, _ = run_and_capture(capsys, "recipes", name)
    shown, least, most = re.search(
        r"epochs on other datasets .*?: ([\d,]+) / training images, (\d+) to (\d+) epochs", text
    ).groups()
    start = config_from_name("ViT-Ti/16") if name == "finetune" else None
    planned = derive_run(name, images=images, size=(32, 32) if name == "small" else (300, 400), start=start).epochs
    assert planned == pytest.approx(min(int(most), max(int(least), int(shown.replace(",", "")) / images)), abs=0.05)
    assert listed[name]["epochs_range"] == [int(least), int(most)]
    assert f"{least} to {most} epochs" in run_and_capture(capsys, "recipes", f"{name}*")[0]
    assert listed["digits"]["epochs_range"] is None and listed["digits"]["epochs"] == build_example_run("digits").epochs


def test_recipe_option_on_the_command_line(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [
        "--recipe",
        "vit-imagenet",
        "--model",
        "ViT-32x2/4",
        "--image-size",
        "8",
        "--batch-size",
        "256",
        "--device",
        "cpu",
    ]
    plan, notes = run_and_capture(capsys, "train", "digits", *words, "--dry-run", "--json")
    assert (plan["model"], plan["resolution"], plan["recipe"], plan["run"]["recipe"]) == (
        "ViT-32x2/4",
        "8",
        "vit-imagenet",
        "vit-imagenet",
    )
    assert plan["run"]["model"]["head"]["representation"] == 32 and plan["run"]["optimizer"]["decay_on"] == "all"
    assert "learning rate 0.003 -> 0.0001875: batch 4096 -> 256, linear scaling rule of vit-imagenet" in notes
    assert not list(tmp_path.iterdir())


def test_recipe_run_trains_and_resumes_with_its_hyperparameters(tmp_path):
    folder, out = make_folder(tmp_path / "photos", {"train": 6, "val": 2}), str(tmp_path / "run")
    words = {
        "recipe": "plain-vit",
        "model": "ViT-32x2/8",
        "image_size": 16,
        "batch_size": 9,
        "epochs": 2.0,
        "device": "cpu",
        "workers": 0,
    }
    train(str(folder), out=out, **words)
    stored = RunFolder(Path(out)).run()
    assert (stored.recipe, stored.model.pool, stored.schedule.warmup_steps) == ("plain-vit", "mean", 0)
    assert train(str(folder), out=out, resume=True, **words)["steps"] == stored.steps  # no setting has changed


if __name__ == "__main__":
    import tempfile

    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        GOLDEN_FILE.write_text(
            json.dumps(
                {
                    name: train_and_collect_losses(build_reduced_run(name, 10), Path(scratch))[0]
                    for name in CURVE_RECIPES
                },
                indent=1,
            )
            + "\n"
        )


@pytest.mark.parametrize("option", [{"drop_path": 0.1}, {"dropout": 0.1}])
def test_options_of_another_family_are_rejected(option):
    with pytest.raises(UsageError, match=f"model.regularization.{next(iter(option))} is not a setting of BiTConfig"):
        apply_train_options(build_example_run("bit-imagenet"), TrainOptions("x", **option))
