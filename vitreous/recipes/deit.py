"""Recipes of DeiT (arXiv:2012.12877) and DeiT III (arXiv:2204.07118): ViTs on ImageNet-1k only, with strong
augmentation."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from vitreous.data.augmentation.augment import Augment
from vitreous.data.modalities.base import IMAGENET_MOMENTS
from vitreous.models.config import ModelConfig, replace_known_fields
from vitreous.models.names import MAX_SMALL_IMAGE_SIDE
from vitreous.objectives.distillation import DistillationConfig
from vitreous.objectives.supervised import SupervisedConfig
from vitreous.recipes.options import TrainOptions
from vitreous.recipes.ours import make_small_run
from vitreous.recipes.recipe import DatasetInfo, Recipe, base_run_fields, build_pretraining_recipe
from vitreous.training.run import OptimizerConfig, Run, ScheduleConfig

DEIT_CROP = Augment(crop=(0.08, 1.0), crop_filter="bicubic", flip=0.5, mixup=0.8, cutmix=1.0)
DEIT_RANDAUGMENT = replace(DEIT_CROP, rand_style="timm", rand_layers=2, rand_magnitude=9, rand_spread=0.5)
EMA_DECAY = 0.99996
WARMUP_EPOCHS, FINAL_LR = 5, 1e-5  # warm-up in epochs, final learning rate
#: DeiT III model -> learning rate, stochastic depth of `deit3` and of `deit3-finish`, image size of `deit3`
DEIT3_HYPERPARAMETERS = {
    "DeiT-III-S/16": (4e-3, 0.05, 0.05, 224),
    "DeiT-III-B/16": (3e-3, 0.2, 0.2, 192),
    "DeiT-III-L/16": (3e-3, 0.45, 0.45, 192),
    "DeiT-III-H/14": (3e-3, 0.6, 0.55, 160),
}


def imagenet_run_fields(
    model: ModelConfig, dataset_info: DatasetInfo, share: float, repeats: int = 3
) -> dict[str, Any]:
    """Return the common fields of DeiT's runs: ImageNet's mean and standard deviation, a centre crop of `share` of the
    short side for evaluation, and repeated augmentation. With three repeats, an epoch has a third of the images."""
    run_fields, (mean, std) = base_run_fields(model, dataset_info), IMAGENET_MOMENTS
    preprocess = replace(run_fields["preprocess"], mean=mean[: model.channels], std=std[: model.channels], share=share)
    return run_fields | {"preprocess": preprocess, "data": replace(run_fields["data"], repeats=repeats)}


def deit_schedule(dataset_info: DatasetInfo, batch: int, lr: float, final_lr: float = FINAL_LR) -> ScheduleConfig:
    """Return a cosine schedule to `final_lr` after five epochs of warm-up."""
    return ScheduleConfig(round(WARMUP_EPOCHS * dataset_info.images / batch), "cosine", end=final_lr / lr)


def set_drop_path(model: ModelConfig, drop_path: float, rises: bool = False) -> ModelConfig:
    """Return a ViT with stochastic depth and without dropout. `rises`: whether the rate rises from block to block."""
    return replace_known_fields(
        model,
        {"regularization.drop_path": drop_path, "regularization.drop_path_rises": rises, "regularization.dropout": 0.0},
    )


def make_deit_run(model: ModelConfig, dataset_info: DatasetInfo, options: TrainOptions) -> Run:
    """DeiT without a teacher: arXiv:2012.12877, Table 9, and facebookresearch/deit's main.py.

    vitreous train DATA --recipe NAME --model ViT-S/16

    lr 5e-4 x batch / 512, AdamW, no clipping, repeated augmentation, RandAugment m9 with std 0.5, MixUp 0.8 or CutMix
    1, erasing with noise. The EMA weights (0.99996) are evaluated and saved; the authors report the raw weights: --ema
    0. The learning rate changes per step, not per epoch, and warms up from 0, not 1e-6. DeiT's option of a colour
    jitter of 0.3 is omitted, because it has no effect with RandAugment in timm. Weights are initialised as in Google's
    code.
    """
    return Run(
        **imagenet_run_fields(set_drop_path(model, 0.1, rises=True), dataset_info, 0.875),
        views=replace(DEIT_RANDAUGMENT, erase=0.25, erase_noise=True),
        optimizer=OptimizerConfig("adamw", lr=1e-3, betas=(0.9, 0.999), weight_decay=0.05, clip=None),
        schedule=deit_schedule(dataset_info, 1024, 1e-3),
        objective=SupervisedConfig(smoothing=0.1),
        batch_size=1024,
        epochs=300,
        ema=EMA_DECAY,
        ema_warmup=False,
    )


def make_distil_run(model: ModelConfig, dataset_info: DatasetInfo, options: TrainOptions) -> Run:
    """DeiT with a teacher: arXiv:2012.12877, section 3.2 and Table 9. Images up to 64 pixels: as `small`, with a
    teacher.

    vitreous train DATA --recipe NAME --objective.teacher runs/teacher --model DeiT-S/16-distilled

    Hard distillation with half of the loss weight. The teacher is a run, or weights with the same classes (original: a
    RegNetY-16GF); its input is identical to the student's, mixing included. A model without the distillation token
    learns labels and teacher with the same head.
    """
    run = (
        make_small_run(model, dataset_info, options)
        if max(model.image) <= MAX_SMALL_IMAGE_SIDE
        else make_deit_run(model, dataset_info, options)
    )
    objective_fields = {
        field.name: getattr(run.objective, field.name) for field in fields(run.objective) if field.name != "name"
    }
    return replace(run, objective=DistillationConfig(**objective_fields))


def make_deit_384_run(model: ModelConfig, dataset_info: DatasetInfo, options: TrainOptions) -> Run:
    """DeiT at 384 pixels, from its weights at 224: facebookresearch/deit's README_deit.md.

    vitreous train DATA --recipe NAME --init WEIGHTS

    Constant lr 5e-6, decay 1e-8, batch size 512, 30 epochs; everything else as in `deit`.
    """
    run = make_deit_run(model, dataset_info, options)
    return replace(
        run,
        optimizer=replace(run.optimizer, lr=5e-6, weight_decay=1e-8),
        schedule=deit_schedule(dataset_info, 512, 5e-6, final_lr=5e-6),
        batch_size=512,
        epochs=30,
    )


def make_deit3_run(model: ModelConfig, dataset_info: DatasetInfo, options: TrainOptions) -> Run:
    """DeiT III on ImageNet-1k: arXiv:2204.07118, and facebookresearch/deit's README_revenge.md.

    vitreous train DATA --recipe NAME --model DeiT-III-B/16

    LAMB, which clips the gradient norm at 1 by default in apex and timm, batch size 2048, 800 epochs, 3-Augment and
    colour jitter, MixUp 0.8 or CutMix 1, binary loss. Learning rate, stochastic depth and image size depend on the
    model size; other models use those of S. ViT-B, L and H are trained on smaller images, and finished with
    `deit3-finish`. Stochastic depth is the same in every block. H has images of 154 pixels, because 160 is not
    divisible by patches of 14. Weights are initialised as in Google's code. The learning rate scales with the square
    root of the batch size, as usual for LAMB (original: constant).
    """
    lr, drop_path, _, _ = DEIT3_HYPERPARAMETERS.get(model.name(), DEIT3_HYPERPARAMETERS["DeiT-III-S/16"])
    return build_deit3_run(model, dataset_info, lr, drop_path)


def build_deit3_run(
    model: ModelConfig, dataset_info: DatasetInfo, lr: float, drop_path: float, epochs: int = 800
) -> Run:
    """Build a run with DeiT III's hyperparameters and these values, which depend on the model."""
    return Run(
        **imagenet_run_fields(set_drop_path(model, drop_path), dataset_info, 1.0),
        views=replace(DEIT_CROP, three=True, jitter=(0.3, 0.3, 0.3)),
        optimizer=OptimizerConfig("lamb", lr=lr, betas=(0.9, 0.999), weight_decay=0.05, clip=1.0),
        schedule=deit_schedule(dataset_info, 2048, lr),
        objective=SupervisedConfig(loss="binary"),
        batch_size=2048,
        epochs=epochs,
        ema=EMA_DECAY,
        ema_warmup=False,
    )


def make_deit3_finish_run(model: ModelConfig, dataset_info: DatasetInfo, options: TrainOptions) -> Run:
    """DeiT III's last 20 epochs at 224 pixels: facebookresearch/deit's README_revenge.md.

    vitreous train DATA --recipe NAME --init runs/deit3

    AdamW, lr 1e-5 for any batch size, weight decay 0.1, batch size 512. RandAugment and label smoothing replace
    3-Augment and the binary loss; no repeated augmentation.
    """
    drop_path = DEIT3_HYPERPARAMETERS.get(model.name(), DEIT3_HYPERPARAMETERS["DeiT-III-B/16"])[2]
    return build_deit3_finish_run(model, dataset_info, drop_path)


def build_deit3_finish_run(model: ModelConfig, dataset_info: DatasetInfo, drop_path: float) -> Run:
    """Build a run with the hyperparameters of DeiT III's last epochs and this stochastic depth."""
    return Run(
        **imagenet_run_fields(set_drop_path(model, drop_path), dataset_info, 1.0, repeats=1),
        views=DEIT_RANDAUGMENT,
        optimizer=OptimizerConfig("adamw", lr=1e-5, betas=(0.9, 0.999), weight_decay=0.1, clip=None),
        schedule=deit_schedule(dataset_info, 512, 1e-5),
        objective=SupervisedConfig(smoothing=0.1),
        batch_size=512,
        epochs=20,
        ema=EMA_DECAY,
        ema_warmup=False,
    )


DEIT_PAPER, DEIT3_PAPER = "arXiv:2012.12877", "arXiv:2204.07118"
DEIT3_FINISH_RESULTS = {"DeiT-III-B/16": "83.8 %", "DeiT-III-L/16": "84.9 %", "DeiT-III-H/14": "85.2 %"}
DEIT_RECIPES = (
    build_pretraining_recipe(
        "deit",
        make_deit_run,
        "ViT from scratch on ImageNet, strongly augmented",
        DEIT_PAPER,
        (("ViT-Ti/16", "ImageNet", "72.2 %"), ("ViT-S/16", "ImageNet", "79.9 %"), ("ViT-B/16", "ImageNet", "81.8 %")),
        models=("ViT-S/16", "ViT-Ti/16", "ViT-B/16"),
        warmup_in_epochs=True,
    ),
    Recipe(
        "distil",
        make_distil_run,
        about="ViT from labels and a teacher (distillation)",
        source=DEIT_PAPER,
        lr_scaling="linear",
        published=(
            ("DeiT-Ti/16-distilled", "ImageNet", "74.5 %"),
            ("DeiT-S/16-distilled", "ImageNet", "81.2 %"),
            ("DeiT-B/16-distilled", "ImageNet", "83.4 %"),
        ),
        models=("DeiT-S/16-distilled", "DeiT-Ti/16-distilled", "DeiT-B/16-distilled"),
        small="Conv+ViT-128x4/8",
        objective=DistillationConfig,
        warmup_in_epochs=True,
        hold_out=0.01,
    ),
    build_pretraining_recipe(
        "deit-384",
        make_deit_384_run,
        about="DeiT's weights at 384 pixels",
        source=DEIT_PAPER,
        published=(("ViT-B/16", "ImageNet at 384 pixels", "82.9 %"),),
        side=384,
        models=("ViT-B/16",),
        from_weights=True,
        warmup_in_epochs=True,
    ),
    build_pretraining_recipe(
        "deit3",
        make_deit3_run,
        about="ViT from scratch on ImageNet, 800 epochs, LAMB",
        source=DEIT3_PAPER,
        published=(
            ("DeiT-III-S/16", "ImageNet", "81.4 %"),
            *(
                (model, "ImageNet, finished at 224 pixels", accuracy)
                for model, accuracy in DEIT3_FINISH_RESULTS.items()
            ),
        ),
        side=lambda name, dataset_info: DEIT3_HYPERPARAMETERS.get(name, DEIT3_HYPERPARAMETERS["DeiT-III-S/16"])[3],
        lr_scaling="sqrt",
        models=tuple(DEIT3_HYPERPARAMETERS),
        warmup_in_epochs=True,
    ),
    build_pretraining_recipe(
        "deit3-finish",
        make_deit3_finish_run,
        "deit3's weights at 224 pixels",
        DEIT3_PAPER,
        tuple((model, "ImageNet", accuracy) for model, accuracy in DEIT3_FINISH_RESULTS.items()),
        lr_scaling="fixed",
        models=tuple(DEIT3_FINISH_RESULTS),
        from_weights=True,
        warmup_in_epochs=True,
    ),
)
