"""Recipes of Swin Transformers (arXiv:2103.14030, appendix A2): ImageNet-1k, ImageNet-22k, and fine-tuning at larger
sizes."""

from __future__ import annotations

from dataclasses import replace

from vitreous.models.config import ModelConfig, replace_known_fields
from vitreous.objectives.supervised import SupervisedConfig
from vitreous.recipes.deit import DEIT_RANDAUGMENT, imagenet_run_fields
from vitreous.recipes.options import TrainOptions
from vitreous.recipes.recipe import CENTER_CROP_SHARE, DatasetInfo, Recipe, build_pretraining_recipe
from vitreous.training.run import OptimizerConfig, Run, ScheduleConfig

FINAL_LR_SHARE = 0.01  # final learning rate relative to the peak
#: model size -> stochastic depth on ImageNet-1k
DROP_PATH_1K = {"T": 0.2, "S": 0.3, "B": 0.5}
DEFAULT_DROP_PATH = 0.2  # stochastic depth of other model sizes
#: model size -> stochastic depth on ImageNet-22k, and in fine-tuning of its weights on ImageNet-1k
DROP_PATH_22K = {"T": 0.1}


def make_swin_run(model: ModelConfig, dataset_info: DatasetInfo, options: TrainOptions) -> Run:
    """Swin from scratch on ImageNet-1k: arXiv:2103.14030, A2.1, and microsoft/Swin-Transformer's config.py.

    vitreous train DATA --recipe NAME --model Swin-T/4

    lr 5e-4 x batch / 512, AdamW, 20 epochs of warm-up, gradients clipped at 5, RandAugment m9 with std 0.5, MixUp 0.8
    or CutMix 1, erasing, smoothing 0.1; no EMA and no repeated augmentation. Stochastic depth depends on the model
    size. Relative position tables, and the networks that predict them, have no weight decay. The learning rate warms up
    from 0, not 5e-7; the head starts at 0. The original colour jitter is omitted, because it has no effect with
    RandAugment in timm.
    """
    return Run(
        **imagenet_run_fields(
            set_swin_drop_path(model, DROP_PATH_1K.get(get_size_letter(model), DEFAULT_DROP_PATH)),
            dataset_info,
            CENTER_CROP_SHARE,
            repeats=1,
        ),
        views=replace(DEIT_RANDAUGMENT, erase=0.25, erase_noise=True),
        optimizer=OptimizerConfig("adamw", lr=1e-3, betas=(0.9, 0.999), weight_decay=0.05, clip=5.0),
        schedule=swin_schedule(dataset_info, 1024, 20),
        objective=SupervisedConfig(smoothing=0.1),
        batch_size=1024,
        epochs=300,
    )


def make_swin_imagenet21k_run(model: ModelConfig, dataset_info: DatasetInfo, options: TrainOptions) -> Run:
    """Swin from scratch on ImageNet-22k: arXiv:2103.14030, A2.1.

    vitreous train DATA --recipe NAME --model Swin-B/4

    lr 1.25e-4 x batch / 512, batch size 4096, 90 epochs including 5 of warm-up; stochastic depth 0.2 (T: 0.1); all
    other settings as in `swin`. To get a head of the 1,000 classes of ImageNet-1k: `vitreous convert --class-map`.
    """
    run, model = (
        make_swin_run(model, dataset_info, options),
        set_swin_drop_path(model, DROP_PATH_22K.get(get_size_letter(model), DEFAULT_DROP_PATH)),
    )
    return replace(run, model=model, schedule=swin_schedule(dataset_info, 4096, 5), batch_size=4096, epochs=90)


def make_swin_finetune_run(model: ModelConfig, dataset_info: DatasetInfo, options: TrainOptions) -> Run:
    """Fine-tuning of Swin's ImageNet-22k weights on ImageNet-1k: arXiv:2103.14030, A2.1.

    vitreous train DATA --recipe NAME --init WEIGHTS

    lr 2e-5 x batch / 512, batch size 1024, 30 epochs including 5 of warm-up, weight decay 1e-8, stochastic depth 0.2
    (T: 0.1).
    """
    run = make_swin_run(model, dataset_info, options)
    return replace(
        run,
        model=set_swin_drop_path(model, DROP_PATH_22K.get(get_size_letter(model), DEFAULT_DROP_PATH)),
        optimizer=replace(run.optimizer, lr=4e-5, weight_decay=1e-8),
        schedule=swin_schedule(dataset_info, 1024, 5),
        epochs=30,
    )


def make_swin_384_run(model: ModelConfig, dataset_info: DatasetInfo, options: TrainOptions) -> Run:
    """Swin at 384 pixels, from its weights at 224: arXiv:2103.14030, A2.1.

    vitreous train DATA --recipe NAME --init WEIGHTS

    As `swin-finetune`, with windows of 12 instead of 7. Relative position tables are resized by bicubic interpolation,
    and evaluation resizes the full image to a square. Stochastic depth depends on the model size, as on ImageNet-1k;
    for ImageNet-22k weights: --drop-path 0.2.
    """
    scratch_run = make_swin_run(model, dataset_info, options)
    run, wide_window_model = (
        make_swin_finetune_run(model, dataset_info, options),
        replace_known_fields(scratch_run.model, {"attention.window": get_window_side(model)}),
    )
    return replace(run, model=wide_window_model, preprocess=replace(run.preprocess, fit="squash", share=1.0))


def get_window_side(model: ModelConfig) -> int:
    """Return the window size of a published model: its last grid is a single window."""
    return max(model.grid)


def get_size_letter(model: ModelConfig) -> str:
    """Return the size of a Swin from its name: T, S, B or L, or the corresponding text of another name."""
    return model.name().partition("-")[2].partition("/")[0]


def set_swin_drop_path(model: ModelConfig, drop_path: float) -> ModelConfig:
    """Return a Swin with stochastic depth that rises to `drop_path` in the last block, and without dropout."""
    return replace_known_fields(model, {"regularization.drop_path": drop_path, "regularization.dropout": 0.0})


def swin_schedule(dataset_info: DatasetInfo, batch: int, epochs: int) -> ScheduleConfig:
    """Return a cosine schedule to 1 % of the learning rate, with a warm-up of this number of epochs."""
    return ScheduleConfig(round(epochs * dataset_info.images / batch), "cosine", end=FINAL_LR_SHARE)


SWIN_PAPER = "arXiv:2103.14030"
SWIN_MODELS = ("Swin-T/4", "Swin-S/4", "Swin-B/4")
SWIN_RECIPES: tuple[Recipe, ...] = (
    build_pretraining_recipe(
        "swin",
        make_swin_run,
        "Swin from scratch on ImageNet",
        SWIN_PAPER,
        tuple(
            (name, "ImageNet", accuracy)
            for name, accuracy in zip(SWIN_MODELS, ("81.2 %", "83.2 %", "83.5 %"), strict=True)
        ),
        models=SWIN_MODELS,
        for_models="swin",
        warmup_in_epochs=True,
    ),
    build_pretraining_recipe(
        "swin-imagenet21k",
        make_swin_imagenet21k_run,
        "Swin from scratch on ImageNet-22k",
        SWIN_PAPER,
        (
            ("Swin-B/4", "ImageNet-22k, fine-tuned on ImageNet", "85.2 %"),
            ("Swin-L/4", "ImageNet-22k, fine-tuned on ImageNet", "86.3 %"),
        ),
        models=("Swin-B/4", "Swin-L/4"),
        for_models="swin",
        data="ImageNet-21k",
        warmup_in_epochs=True,
    ),
    build_pretraining_recipe(
        "swin-finetune",
        make_swin_finetune_run,
        "Swin's ImageNet-22k weights to ImageNet",
        SWIN_PAPER,
        (("Swin-B/4", "ImageNet, from ImageNet-22k", "85.2 %"), ("Swin-L/4", "ImageNet, from ImageNet-22k", "86.3 %")),
        models=("Swin-B/4", "Swin-L/4"),
        for_models="swin",
        from_weights=True,
        warmup_in_epochs=True,
    ),
    build_pretraining_recipe(
        "swin-384",
        make_swin_384_run,
        about="Swin's weights at 384 pixels, windows of 12",
        source=SWIN_PAPER,
        published=(
            ("Swin-B/4-window12", "ImageNet at 384 pixels", "84.5 %"),
            ("Swin-L/4-window12", "ImageNet at 384 pixels, from ImageNet-22k", "87.3 %"),
        ),
        side=384,
        models=("Swin-B/4-window12", "Swin-L/4-window12"),
        for_models="swin",
        from_weights=True,
        warmup_in_epochs=True,
    ),
)
