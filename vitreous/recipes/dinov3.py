"""Recipes of DINOv3: pre-training, Gram anchoring and high resolution as published, with settings for small datasets;
and distillation of a frozen teacher's features."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vitreous.data.augmentation.augment import Augment
from vitreous.data.augmentation.views import DINOV2_VIEWS, MultiCrop
from vitreous.models.config import ModelConfig, replace_known_fields
from vitreous.nn.sizes import nearest_divisible_size
from vitreous.objectives.dinov3 import DINOv3Config
from vitreous.objectives.feature_distillation import FeatureDistillationConfig
from vitreous.recipes.options import TrainOptions
from vitreous.recipes.recipe import MIN_SCRATCH_IMAGES, DatasetInfo, Recipe, TrainingLength
from vitreous.recipes.unlabelled import (
    CONTINUED_OPTIMIZER,
    SMALL_HEAD,
    SMALL_IMAGE_MODEL,
    UNLABELLED_CROP,
    disable_dropout,
    has_small_input,
    has_small_settings,
    length_run_fields,
    make_small_or_few_run,
    normalised_run_fields,
)
from vitreous.training.run import OptimizerConfig, RampConfig, Run, ScheduleConfig

DINOV3_EPOCH_STEPS = 1000  # steps of an epoch in DINOv3's configs
PRETRAINING_SIDE, HIGH_RESOLUTION_SIDE = 256, 512  # pixels of global crops
LOCAL_SIDE = 112  # pixels of local crops
DINOV3_HEADS: dict[str, Any] = {
    "prototypes": 262_144,
    "head_width": 8192,
    "bottleneck": 512,
    "patch_prototypes": 98_304,
    "patch_head_width": 4096,
    "patch_bottleneck": 384,
    "centring": "sinkhorn",
}
#: schedules of the stages that continue from weights
CONTINUED_SCHEDULES: dict[str, Any] = {
    "schedule": ScheduleConfig(10 * DINOV3_EPOCH_STEPS, "constant"),
    "schedules": {"momentum": RampConfig(0.999, 0.999), "teacher_temperature": RampConfig(0.07, 0.07)},
}
SMALL_MOMENTUM = 0.994  # EMA momentum of the teacher on small datasets: that of the published pre-training
DISTILLATION_LENGTH = TrainingLength(1e6, 10, 300)


def make_dinov3_run(model: ModelConfig, dataset_info: DatasetInfo, options: TrainOptions) -> Run:
    """DINOv3: arXiv:2508.10104, and facebookresearch/dinov3's dinov3_vit7b16_pretrain.yaml. With --init, the settings
    of dinov3-gram. Images up to 64 pixels and fewer than 10,000 photographs: the settings of dinov2 with constant
    schedules.

    vitreous train DATA --recipe NAME

    A million steps of 4096 images at 256 pixels, lr 5e-5 x sqrt(batch / 1024), constant after 100,000 steps of warm-up;
    weight decay and momentum of the teacher are constant, so a run can be extended. Images are not mirrored. Separate
    heads for images and patches, Sinkhorn-Knopp, layer decay 0.98. There is no Gram anchoring in this stage.
    """
    if options.init:
        return make_dinov3_gram_run(model, dataset_info, options)
    if has_small_settings(model, dataset_info, options):
        return make_small_dinov3_run(model, dataset_info, options, DINOv3Config(**SMALL_HEAD))
    model = replace_known_fields(set_crop_side(model, options, PRETRAINING_SIDE), {"norm.layer_scale": 1e-5})
    objective = DINOv3Config(**DINOV3_HEADS, frozen=5 / 1000)
    return make_dinov3_paper_run(model, dataset_info, objective, 5e-5, momentum=0.994, steps=1_000_000)


def make_dinov3_gram_run(model: ModelConfig, dataset_info: DatasetInfo, options: TrainOptions) -> Run:
    """Gram anchoring of DINOv3, from weights: arXiv:2508.10104, section 4, and facebookresearch/dinov3's
    dinov3_vit7b16_gram_anchor.yaml. On small
    datasets, the settings of dinov2, not tuned.

    vitreous train DATA --recipe NAME --init WEIGHTS

    200,000 steps of 4096 images, lr 3e-5 x sqrt(batch / 1024), momentum of the teacher 0.999, weight 0.5 for local
    views. The patch similarities of the initial weights are kept by the Gram loss with weight 2; the Gram teacher sees
    the crops at twice their size. The EMA teacher replaces it after every 5 % of the run, at most three times. The
    publication continues the run of the pre-training with its heads, without a new warm-up; here it is 10,000 steps.
    """
    model = set_crop_side(model, options, PRETRAINING_SIDE)
    gram: dict[str, Any] = {"gram_weight": 2.0, "gram_refresh": 0.05, "local_weight": 0.5}
    if has_small_settings(model, dataset_info, options):
        return make_small_dinov3_run(model, dataset_info, options, DINOv3Config(**SMALL_HEAD | gram))
    objective = DINOv3Config(**DINOV3_HEADS, **gram, frozen=0.0)
    run = make_dinov3_paper_run(model, dataset_info, objective, 3e-5, momentum=0.999, steps=200_000)
    return replace(with_anchor_scale(run, 2.0), **CONTINUED_SCHEDULES)


def make_dinov3_highres_run(model: ModelConfig, dataset_info: DatasetInfo, options: TrainOptions) -> Run:
    """High-resolution phase of DINOv3, from weights: arXiv:2508.10104, section 5.1, and facebookresearch/dinov3's
    dinov3_vit7b16_high_res_adapt.yaml. On small
    datasets, the settings of dinov2, not tuned.

    vitreous train DATA --recipe NAME --init WEIGHTS

    30,000 steps of 2048 images, lr 1.25e-5 x sqrt(batch / 1024) after 10,000 steps of warm-up, Gram loss with weight
    1.5 to the fixed initial weights, which see the crops at 1.5 times their size. The publication mixes crops of
    512/112 pixels with 768 and 112 to 336 pixels; here a run has one size. Its warm-up is half a cosine, here linear.
    """
    model = set_crop_side(model, options, HIGH_RESOLUTION_SIDE)
    gram: dict[str, Any] = {"gram_weight": 1.5, "local_weight": 0.5}
    if has_small_settings(model, dataset_info, options):
        run = make_small_dinov3_run(model, dataset_info, options, DINOv3Config(**SMALL_HEAD | gram))
        return with_anchor_scale(run, 1.5)
    objective = DINOv3Config(**DINOV3_HEADS, **gram, frozen=0.0)
    run = make_dinov3_paper_run(model, dataset_info, objective, 1.25e-5, batch=2048, momentum=0.999, steps=30_000)
    return replace(with_anchor_scale(run, 1.5), **CONTINUED_SCHEDULES)


def set_crop_side(model: ModelConfig, options: TrainOptions, side: int) -> ModelConfig:
    """Return the model for global crops of about `side` pixels, divisible by its patch. A size that the user set, and
    that of a model for images up to 64 pixels, is kept."""
    if options.image_size or has_small_input(model):
        return model
    return replace_known_fields(model, {"image": nearest_divisible_size((side, side), model.patch)})


def with_anchor_scale(run: Run, scale: float) -> Run:
    """Return the run with anchor views of about `scale` times the size of its global crops, divisible by the patch of
    its model."""
    assert isinstance(run.views, MultiCrop)
    size = tuple(round(scale * length) for length in run.model.image)
    fitted_scale = nearest_divisible_size(size, run.model.patch)[0] / run.model.image[0]
    return replace(run, views=replace(run.views, anchor_scale=fitted_scale))


def make_dinov3_paper_run(
    model: ModelConfig,
    dataset_info: DatasetInfo,
    objective: DINOv3Config,
    base: float,
    *,
    batch: int = 4096,
    momentum: float,
    steps: int,
) -> Run:
    """Build a run with the common settings of DINOv3's configs. `base` is the learning rate for batch size 1024."""
    lr = base * (batch / 1024) ** 0.5
    changes = {"regularization.drop_path_rises": False}
    views = replace(DINOV2_VIEWS, flip=0.0)
    return Run(
        **normalised_run_fields(disable_dropout(model, 0.4, changes), dataset_info),
        views=fit_local_size(views, model),
        optimizer=OptimizerConfig(
            "adamw",
            lr=lr,
            betas=(0.9, 0.99),
            weight_decay=0.04,
            decay_on="multi-axis",
            clip=30.0,
            clip_by="part",
            layer_decay=0.98,
            rates=(("model.projection.", 0.2),),
        ),
        schedule=ScheduleConfig(100 * DINOV3_EPOCH_STEPS, "constant"),
        objective=objective,
        schedules={
            "momentum": RampConfig(momentum, momentum),
            "teacher_temperature": RampConfig(0.04, 0.07, "linear", 100 * DINOV3_EPOCH_STEPS),
        },
        batch_size=batch,
        epochs=steps * batch / dataset_info.images,
    )


def make_small_dinov3_run(
    model: ModelConfig, dataset_info: DatasetInfo, options: TrainOptions, objective: DINOv3Config
) -> Run:
    """Build a run on few or small images: the settings of `dinov2`, with constant schedules, and anchor views of twice
    the size with Gram anchoring."""
    run = make_small_or_few_run(model, dataset_info, DINOV2_VIEWS)
    return replace(
        with_anchor_scale(run, 2.0) if objective.gram_weight else run,
        objective=objective,
        optimizer=CONTINUED_OPTIMIZER if options.init else replace(run.optimizer, clip_by="part"),
        schedule=replace(run.schedule, decay="constant"),
        schedules={
            "momentum": RampConfig(SMALL_MOMENTUM, SMALL_MOMENTUM),
            "teacher_temperature": RampConfig(0.04, 0.04),
        },
    )


def fit_local_size(views: MultiCrop, model: ModelConfig) -> MultiCrop:
    """Return the views with local crops of the multiple of the patch size that is nearest to 112 pixels."""
    height, width = nearest_divisible_size((LOCAL_SIDE, LOCAL_SIDE), model.patch)
    return replace(views, local_image=(height, width))


def make_feature_distillation_run(model: ModelConfig, dataset_info: DatasetInfo, options: TrainOptions) -> Run:
    """Distillation of a frozen teacher's features into a smaller model of any family, without labels, with the losses
    of AM-RADIO (arXiv:2312.06709). Settings of this project.

    vitreous train DATA --recipe NAME --teacher dinov2-s14 --model ViT-Ti/16

    Teacher and student see the same crop, mirrored and with changes of colour; the teacher's input has its own
    normalisation and size. AdamW with lr 1e-3 and a cosine schedule, batch size 256.
    """
    views = UNLABELLED_CROP if has_small_input(model) else Augment(crop=(0.2, 1.0), crop_filter="bicubic", flip=0.5)
    batch = max(1, min(256 if dataset_info.images >= MIN_SCRATCH_IMAGES else 64, dataset_info.images // 4))
    return Run(
        **normalised_run_fields(disable_dropout(model), dataset_info),
        views=views,
        optimizer=OptimizerConfig("adamw", lr=1e-3, weight_decay=0.05),
        objective=FeatureDistillationConfig(),
        **length_run_fields(dataset_info, batch, DISTILLATION_LENGTH),
    )


DINOV3_PAPER = "arXiv:2508.10104"
DINOV3_RECIPES = (
    Recipe(
        "dinov3",
        make_dinov3_run,
        "self-distillation with constant schedules",
        DINOV3_PAPER,
        lr_scaling="sqrt",
        models=("DINOv3-L/16",),
        small=SMALL_IMAGE_MODEL,
        few="DINOv3-S/16",
        objective=DINOv3Config,
        by_steps=True,
    ),
    Recipe(
        "dinov3-gram",
        make_dinov3_gram_run,
        "DINOv3's Gram anchoring, from weights",
        DINOV3_PAPER,
        lr_scaling="sqrt",
        models=("DINOv3-L/16",),
        objective=DINOv3Config,
        from_weights=True,
        by_steps=True,
    ),
    Recipe(
        "dinov3-highres",
        make_dinov3_highres_run,
        "DINOv3's high-resolution phase, from weights",
        DINOV3_PAPER,
        lr_scaling="sqrt",
        models=("DINOv3-L/16",),
        objective=DINOv3Config,
        from_weights=True,
        by_steps=True,
    ),
    Recipe(
        "distil-features",
        make_feature_distillation_run,
        "a frozen teacher's features, without labels",
        "settings of this project",
        lr_scaling="sqrt",
        models=("ViT-Ti/16",),
        small=SMALL_IMAGE_MODEL,
        objective=FeatureDistillationConfig,
        lengths=(("any model", DISTILLATION_LENGTH),),
    ),
)
