"""The recipe of self-supervised learning on clips: VideoMAE as published, and settings for small or few clips."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vitreous.models.config import ModelConfig
from vitreous.objectives.mae import MAEConfig
from vitreous.recipes.options import TrainOptions
from vitreous.recipes.recipe import MIN_SCRATCH_IMAGES, DatasetInfo, Recipe
from vitreous.recipes.unlabelled import (
    UNLABELLED_CROP,
    disable_dropout,
    has_small_input,
    length_run_fields,
    normalised_run_fields,
)
from vitreous.training.run import OptimizerConfig, Run, ScheduleConfig

KINETICS_STRIDE = 4  # stride in frames on Kinetics; the paper uses 2 on Something-Something V2
#: encoder width -> batch size, epochs, decoder blocks (scripts/kinetics); other widths use those of 768
VIDEOMAE_HYPERPARAMETERS = {384: (1024, 1600, 4), 768: (2048, 800, 4), 1024: (512, 1600, 12), 1280: (1024, 1600, 12)}


def make_videomae_run(model: ModelConfig, dataset_info: DatasetInfo, options: TrainOptions) -> Run:
    """VideoMAE: arXiv:2203.12602, and the scripts of MCG-NJU/VideoMAE. Clips of up to 64 pixels, and fewer than 10,000
    clips: settings similar to those of `mae` for small datasets.

    vitreous train CLIPS --recipe NAME --model VideoMAE-B/16x2

    Clips of 16 frames, 4 apart, of Kinetics-400, lr 1.5e-4 x batch / 256, 40 epochs of warm-up; 90 % of the positions
    are masked, the same in all frames. The decoder has half of the encoder's width. Something-Something V2: --stride 2.
    The crop covers a random share of the area; the original uses one of four scales per axis.

    | size | batch size | epochs | decoder blocks |
    |---|---|---|---|
    | S | 1024 | 1600 | 4 |
    | B | 2048 | 800, or 1600 (--epochs 1600) | 4 |
    | L | 512 | 1600 | 12 |
    | H | 1024 | 1600 | 12 |
    """
    assert model.has_time_axis, "the recipe videomae requires a model for clips"
    model_changes: dict[str, Any] = {} if options.init else {"norm.final": "tokens"}  # weights keep their final norm
    run_fields = normalised_run_fields(disable_dropout(model, changes=model_changes), dataset_info)
    if has_small_input(model) or dataset_info.images < MIN_SCRATCH_IMAGES:
        heads = max(3, model.width // 64)
        return Run(
            **run_fields,
            views=replace(UNLABELLED_CROP, crop=(0.4, 1.0), flip=0.0),
            optimizer=OptimizerConfig("adamw", lr=1.5e-3, betas=(0.9, 0.95), weight_decay=0.05, clip=1.0),
            objective=MAEConfig(
                mask=0.75,
                tubes=True,
                decoder_width=32 * heads,
                decoder_depth=2,
                decoder_heads=heads,
                normalise_channels=True,
            ),
            **length_run_fields(dataset_info, max(1, min(64, dataset_info.images // 4))),
        )
    run_fields["preprocess"] = run_fields["preprocess"].adjust(stride=KINETICS_STRIDE)
    batch, epochs, decoder_depth = VIDEOMAE_HYPERPARAMETERS.get(model.width, VIDEOMAE_HYPERPARAMETERS[768])
    return Run(
        **run_fields,
        views=replace(UNLABELLED_CROP, crop=(0.4, 1.0), flip=0.0),
        optimizer=OptimizerConfig("adamw", lr=1.5e-4 * batch / 256, betas=(0.9, 0.95), weight_decay=0.05, clip=None),
        schedule=ScheduleConfig(round(40 * dataset_info.images / batch), end=1e-5 / 1.5e-4, warmup_includes_base=True),
        objective=MAEConfig(
            mask=0.9,
            tubes=True,
            decoder_width=model.width // 2,
            decoder_depth=decoder_depth,
            decoder_heads=max(1, model.head_count_field()["heads"] // 2),
            normalise_channels=True,
        ),
        batch_size=batch,
        epochs=epochs,
    )


VIDEOMAE_RECIPE = Recipe(
    "videomae",
    make_videomae_run,
    "masked autoencoding of clips",
    "arXiv:2203.12602",
    lr_scaling="linear",
    published=(
        ("VideoMAE-S/16x2", "Kinetics-400, fine-tuned after 1600 epochs", "79.0 %"),
        ("VideoMAE-B/16x2", "Kinetics-400, fine-tuned after 800 epochs", "80.0 %"),
        ("VideoMAE-L/16x2", "Kinetics-400, fine-tuned after 1600 epochs", "85.2 %"),
        ("VideoMAE-H/16x2", "Kinetics-400, fine-tuned after 1600 epochs", "86.6 %"),
    ),
    data="Kinetics-400",
    models=("VideoMAE-B/16x2", "VideoMAE-S/16x2", "VideoMAE-L/16x2", "VideoMAE-H/16x2"),
    clips="VideoMAE-64x6/4x2",
    objective=MAEConfig,
    warmup_in_epochs=True,
)
