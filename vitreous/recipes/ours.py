"""Default recipes, which were tuned for this package."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vitreous.data.augmentation.augment import Augment
from vitreous.models.config import ModelConfig
from vitreous.objectives.supervised import SupervisedConfig
from vitreous.recipes.options import TrainOptions
from vitreous.recipes.recipe import DatasetInfo, Recipe, TrainingLength, base_run_fields
from vitreous.training.run import OptimizerConfig, Run, ScheduleConfig

BENCHMARKS_PAGE = "benchmarks/README.md"
# lengths on small images: of models with a convolutional stem, and of others
CONV_STEM_LENGTH, PATCH_STEM_LENGTH = TrainingLength(3.6e5, 8, 300), TrainingLength(4.5e5, 10, 300)
WIDE_SHIFT_EPOCHS = 10  # number of epochs above which larger shifts of images improve accuracy
# lengths on photographs: from scratch, and from weights
PHOTO_SCRATCH_LENGTH, PHOTO_FINETUNE_LENGTH = TrainingLength(1e5, 5, 100), TrainingLength(2e4, 5, 100)


def make_digits_run(model: ModelConfig, dataset_info: DatasetInfo, options: TrainOptions) -> Run:
    """The included handwritten digits, about a minute on two CPU cores. Results: benchmarks/README.md.

    vitreous train digits
    """
    return Run(
        **base_run_fields(model, dataset_info),
        views=Augment(shift=0.125, rotate=12, zoom=0.12, border="zeros"),
        optimizer=OptimizerConfig("muon", lr=3e-3, matrix_lr=0.02, betas=(0.9, 0.95), weight_decay=0.05),
        schedule=ScheduleConfig(warmup_steps=50),
        objective=SupervisedConfig(mimetic=model.drops_patches, smoothing=0.1),
        batch_size=128,
        epochs=100,
        ema=0.99,
    )


def make_small_run(model: ModelConfig, dataset_info: DatasetInfo, options: TrainOptions) -> Run:
    """Images up to 64 pixels from scratch, such as CIFAR. Results: benchmarks/README.md.

    vitreous train DATA --recipe NAME

    Half of the patches are dropped in the first part of the run. Models with a convolutional stem and few tokens
    (`Conv+ViT-128x4/8`) keep all patches, train for fewer epochs, and use a higher learning rate for filters. In runs
    of more than ten epochs, they shift images by up to an eighth of their size instead of a sixteenth.
    """
    has_conv_stem = model.front == "conv"
    batch = max(1, min(128, dataset_info.images // 4))
    epochs = (CONV_STEM_LENGTH if has_conv_stem else PATCH_STEM_LENGTH).epochs(dataset_info.images)
    steps = max(1, round(epochs * dataset_info.images / batch))
    step_size = (options.batch_size or batch) * (options.accumulate or 1)
    effective_epochs = (options.steps or 0) * step_size / dataset_info.images or options.epochs or epochs
    muon = OptimizerConfig("muon", lr=2e-3, matrix_lr=0.007, betas=(0.9, 0.95), weight_decay=0.05)
    return Run(
        **base_run_fields(model, dataset_info),
        views=Augment(shift=0.125 if has_conv_stem and effective_epochs > WIDE_SHIFT_EPOCHS else 0.0625, flip=0.5),
        optimizer=replace(muon, matrix_lr=0.012, rates=((".conv.weight", 3.3),), clip=None) if has_conv_stem else muon,
        schedule=ScheduleConfig(warmup_steps=round(0.05 * steps)),
        objective=SupervisedConfig(
            mimetic=model.drops_patches, smoothing=0.05, patch_dropout=0.5 * (model.drops_patches and not has_conv_stem)
        ),
        batch_size=batch,
        epochs=epochs,
        ema=0.998,
    )


def make_photos_run(model: ModelConfig, dataset_info: DatasetInfo, options: TrainOptions) -> Run:
    """Photographs from scratch: lr = 1e-3 x max(batch, 64) / 256, DeiT's linear rule (arXiv:2012.12877).

    vitreous train DATA --recipe NAME
    """
    return make_adamw_photo_run(model, dataset_info, is_finetuned=options.init is not None)


def make_finetune_run(model: ModelConfig, dataset_info: DatasetInfo, options: TrainOptions) -> Run:
    """Images of any size from weights: as `photos`, with a tenth of the learning rate, a fifth of the epochs, and no
    RandAugment.

    vitreous train DATA --init WEIGHTS
    """
    return make_adamw_photo_run(model, dataset_info, is_finetuned=True)


def make_adamw_photo_run(model: ModelConfig, dataset_info: DatasetInfo, is_finetuned: bool) -> Run:
    """Build a run on photographs with AdamW, from scratch or from weights."""
    batch = max(1, min(64, dataset_info.images // 4))
    epochs = (PHOTO_FINETUNE_LENGTH if is_finetuned else PHOTO_SCRATCH_LENGTH).epochs(dataset_info.images)
    steps = max(1, round(epochs * dataset_info.images / batch))
    return Run(
        **base_run_fields(model, dataset_info),
        views=Augment(crop=(0.3 if is_finetuned else 0.2, 1.0), flip=0.5, rand_layers=0 if is_finetuned else 2),
        optimizer=OptimizerConfig("adamw", lr=(1e-4 if is_finetuned else 1e-3) * 64 / 256, weight_decay=0.05),
        schedule=ScheduleConfig(warmup_steps=round(0.05 * steps)),
        objective=SupervisedConfig(mimetic=not is_finetuned and model.drops_patches, smoothing=0.1),
        batch_size=batch,
        epochs=epochs,
        ema=0.998 if steps > 1000 else None,
    )


SMALL_RECIPE_LENGTHS = (("convolutional stem", CONV_STEM_LENGTH), ("other models", PATCH_STEM_LENGTH))
PHOTO_RECIPE_FIELDS: dict[str, Any] = {"data": "photographs", "floor": 64}
SCRATCH_LENGTHS, FINETUNE_LENGTHS = (
    (("any model", length),) for length in (PHOTO_SCRATCH_LENGTH, PHOTO_FINETUNE_LENGTH)
)
DEFAULT_RECIPES = (
    Recipe("digits", make_digits_run, "the included digits", BENCHMARKS_PAGE, lr_scaling="fixed", data="digits"),
    Recipe(
        "small",
        make_small_run,
        "images up to 64 pixels, from scratch",
        BENCHMARKS_PAGE,
        lr_scaling="fixed",
        data="CIFAR-10",
        lengths=SMALL_RECIPE_LENGTHS,
    ),
    Recipe(
        "photos",
        make_photos_run,
        "photographs, from scratch",
        "tuned here",
        lengths=SCRATCH_LENGTHS,
        **PHOTO_RECIPE_FIELDS,
    ),
    Recipe(
        "finetune",
        make_finetune_run,
        "images, from weights",
        "tuned here",
        from_weights=True,
        lengths=FINETUNE_LENGTHS,
        **PHOTO_RECIPE_FIELDS,
    ),
)
