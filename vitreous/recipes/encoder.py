"""Recipes that fine-tune self-supervised encoders: as published for MAE and DINO, and a default recipe tuned here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from vitreous.data.augmentation.augment import Augment
from vitreous.models.config import ModelConfig, replace_known_fields
from vitreous.models.names import MAX_SMALL_IMAGE_SIDE
from vitreous.objectives.supervised import SupervisedConfig
from vitreous.recipes.deit import DEIT_RANDAUGMENT, imagenet_run_fields
from vitreous.recipes.options import TrainOptions
from vitreous.recipes.recipe import DatasetInfo, Recipe, TrainingLength, base_run_fields, fixed_image_side
from vitreous.training.run import OptimizerConfig, Run, ScheduleConfig

PHOTO_LENGTH, SMALL_IMAGE_LENGTH = TrainingLength(1e5, 10, 100), TrainingLength(1e5, 10, 100)
ENCODER_LENGTHS = (("photographs", PHOTO_LENGTH), ("images up to 64 pixels", SMALL_IMAGE_LENGTH))


class MAEFinetuneSettings(NamedTuple):
    """MAE's fine-tuning settings for a size of ViT: epochs, learning rate for a batch of 256 images, layer decay,
    stochastic depth."""

    epochs: int
    base_lr: float
    layer_decay: float
    drop_path: float


#: depth of the model -> its settings in arXiv:2111.06377, Table 9, and facebookresearch/mae's FINETUNE.md
MAE_FINETUNE_SETTINGS = {
    12: MAEFinetuneSettings(100, 5e-4, 0.65, 0.1),
    24: MAEFinetuneSettings(50, 1e-3, 0.75, 0.2),
    32: MAEFinetuneSettings(50, 1e-3, 0.75, 0.3),
}


def use_mean_pooling(model: ModelConfig, drop_path: float) -> ModelConfig:
    """Return a ViT that pools patch tokens by their mean and applies the last LayerNorm after pooling instead of
    before."""
    pooled = {"pool": "mean", "norm.final": "pooled"} if model.pool == "class" else {}
    return replace_known_fields(
        model,
        pooled
        | {
            "regularization.dropout": 0.0,
            "regularization.drop_path": drop_path,
            "regularization.drop_path_rises": True,
        },
    )


def make_mae_finetune_run(model: ModelConfig, dataset_info: DatasetInfo, options: TrainOptions) -> Run:
    """Fine-tuning of MAE's encoders: arXiv:2111.06377, Table 9, and facebookresearch/mae's FINETUNE.md.

    vitreous train DATA --recipe NAME --init runs/mae

    AdamW, batch size 1024, lr 5e-4 x batch / 256 and 100 epochs for ViT-B, 1e-3 x batch / 256 and 50 epochs for L and
    H; layer decay 0.65 (0.75 for L and H), stochastic depth 0.1, 0.2 and 0.3, RandAugment m9 with std 0.5, MixUp 0.8 or
    CutMix 1, erasing with noise, smoothing 0.1. The head uses the mean of the patch tokens, normalised by a separate
    LayerNorm in place of the last one. It starts at zero (original: random with std 2e-5). Models of another depth use
    the settings of the next larger one.
    """
    size = MAE_FINETUNE_SETTINGS[next((depth for depth in MAE_FINETUNE_SETTINGS if model.depth <= depth), 32)]
    lr = size.base_lr * 1024 / 256
    return Run(
        **imagenet_run_fields(use_mean_pooling(model, size.drop_path), dataset_info, 0.875, repeats=1),
        views=replace(DEIT_RANDAUGMENT, erase=0.25, erase_noise=True),
        optimizer=OptimizerConfig(
            "adamw", lr=lr, betas=(0.9, 0.999), weight_decay=0.05, clip=None, layer_decay=size.layer_decay
        ),
        schedule=ScheduleConfig(round(5 * dataset_info.images / 1024), "cosine", end=1e-6 / lr),
        objective=SupervisedConfig(smoothing=0.1),
        batch_size=1024,
        epochs=size.epochs,
    )


def make_dino_finetune_run(model: ModelConfig, dataset_info: DatasetInfo, options: TrainOptions) -> Run:
    """Fine-tuning of DINO's encoders on CIFAR: arXiv:2104.14294, Table 6, with the authors' settings for ViT-B
    (facebookresearch/dino, issues 81 and 144).

    vitreous train DATA --recipe NAME --init runs/dino

    DeiT's augmentation with repeated augmentation, AdamW, batch size 768 at 224 pixels, lr 7.5e-6 for any batch size
    (5e-6 for CIFAR-100), 1000 epochs of which 5 warm up, weight decay 0.05, stochastic depth 0.1, no layer decay. The
    issues do not list random erasing; its probability is DeiT's. The learning rate ends at 1e-6; DeiT's script ends at
    1e-5, which is above the peak here.
    """
    lr = 7.5e-6
    return Run(
        **imagenet_run_fields(
            replace_known_fields(model, {"regularization.dropout": 0.0, "regularization.drop_path": 0.1}),
            dataset_info,
            0.875,
            repeats=3,
        ),
        views=replace(DEIT_RANDAUGMENT, erase=0.25, erase_noise=True),
        optimizer=OptimizerConfig("adamw", lr=lr, betas=(0.9, 0.999), weight_decay=0.05, clip=None),
        schedule=ScheduleConfig(round(5 * dataset_info.images / 768), "cosine", end=1e-6 / lr),
        objective=SupervisedConfig(smoothing=0.1),
        batch_size=768,
        epochs=1000,
    )


def make_finetune_encoder_run(model: ModelConfig, dataset_info: DatasetInfo, options: TrainOptions) -> Run:
    """Images of any size from a self-supervised encoder.

    vitreous train DATA --recipe NAME --init runs/mae

    The default recipe if the weights have no head. Layer decay preserves the first blocks, while the last blocks, which
    are least specific to classes, train almost like new ones. lr 1e-3 x batch / 256 with layer decay 0.75, as in MAE's
    fine-tuning; for images up to 64 pixels, 2e-3 for batch size 64.
    """
    is_small = max(model.image) <= MAX_SMALL_IMAGE_SIDE
    batch = max(1, min(64, dataset_info.images // 4))
    epochs = (SMALL_IMAGE_LENGTH if is_small else PHOTO_LENGTH).epochs(dataset_info.images)
    steps = max(1, round(epochs * dataset_info.images / batch))
    crop = Augment(shift=0.125, flip=0.5) if is_small else Augment(crop=(0.2, 1.0), flip=0.5, rand_layers=2)
    return Run(
        **base_run_fields(
            replace_known_fields(model, {"regularization.dropout": 0.0, "regularization.drop_path": 0.1}), dataset_info
        ),
        views=crop,
        optimizer=OptimizerConfig(
            "adamw", lr=2e-3 if is_small else 1e-3 * 64 / 256, weight_decay=0.05, layer_decay=0.75
        ),
        schedule=ScheduleConfig(round(0.05 * steps)),
        objective=SupervisedConfig(smoothing=0.1),
        batch_size=batch,
        epochs=epochs,
        ema=0.998 if steps > 1000 else None,
    )


FINETUNE_ENCODER_RECIPE = Recipe(
    "finetune-encoder",
    make_finetune_encoder_run,
    "images, from a self-supervised encoder",
    "tuned here",
    from_weights=True,
    lengths=ENCODER_LENGTHS,
    data="photographs",
    floor=64,
)
ENCODER_RECIPE_FIELDS: dict[str, Any] = {"from_weights": True, "warmup_in_epochs": True, "image": fixed_image_side(224)}
ENCODER_RECIPES = (
    FINETUNE_ENCODER_RECIPE,
    Recipe(
        "mae-finetune",
        make_mae_finetune_run,
        "MAE's encoder to ImageNet-sized data",
        "arXiv:2111.06377, Table 9",
        lr_scaling="linear",
        published=(
            ("ViT-B/16", "ImageNet", "83.6 %"),
            ("ViT-L/16", "ImageNet", "85.9 %"),
            ("ViT-H/14", "ImageNet", "86.9 %"),
        ),
        models=("ViT-B/16", "ViT-L/16", "ViT-H/14"),
        hold_out=0.01,
        **ENCODER_RECIPE_FIELDS,
    ),
    Recipe(
        "dino-finetune",
        make_dino_finetune_run,
        "DINO's encoder to CIFAR-10 or CIFAR-100, 224 pixels",
        "arXiv:2104.14294, Table 6",
        lr_scaling="fixed",
        published=(("ViT-B/16", "CIFAR-10", "99.1 %"), ("ViT-B/16", "CIFAR-100", "91.7 %")),
        data="CIFAR-10",
        models=("ViT-B/16", "ViT-S/16"),
        hold_out=0.02,
        **ENCODER_RECIPE_FIELDS,
    ),
)
