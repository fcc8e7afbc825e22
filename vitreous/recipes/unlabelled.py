"""Recipes of self-supervised learning on images: masked patches, MAE, DINO and DINOv2 as published, and settings for
small datasets tuned here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vitreous.data.augmentation.augment import Augment
from vitreous.data.augmentation.views import DINO_VIEWS, DINOV2_VIEWS, MultiCrop
from vitreous.data.modalities.base import IMAGENET_MOMENTS
from vitreous.models.config import ModelConfig, replace_known_fields
from vitreous.models.names import MAX_SMALL_IMAGE_SIDE
from vitreous.objectives.dino import DINOConfig
from vitreous.objectives.dinov2 import DINOv2Config
from vitreous.objectives.mae import MAEConfig
from vitreous.objectives.masked import MaskedPatchesConfig
from vitreous.recipes.options import TrainOptions
from vitreous.recipes.recipe import (
    MIN_SCRATCH_IMAGES,
    DatasetInfo,
    Recipe,
    TrainingLength,
    apply_google_settings,
    base_run_fields,
    google_run_fields,
)
from vitreous.training.run import OptimizerConfig, RampConfig, Run, ScheduleConfig

BENCHMARKS_PAGE = "benchmarks/README.md"
DINOV2_EPOCH_STEPS = 1250  # steps of an epoch in DINOv2's configs
SMALL_UNLABELLED_LENGTH = TrainingLength(2e6, 20, 1600)  # of runs on small images
UNLABELLED_CROP = Augment(crop=(0.2, 1.0), crop_filter="bicubic", flip=0.5)


def has_small_input(model: ModelConfig) -> bool:
    """Return whether the model's images are so small that recipes use hyperparameters tuned here."""
    return max(model.image[-2:]) <= MAX_SMALL_IMAGE_SIDE


def has_small_settings(model: ModelConfig, dataset_info: DatasetInfo, options: TrainOptions) -> bool:
    """Return whether a recipe uses the settings tuned here for small images and few photographs instead of the
    published settings. A student of a frozen teacher uses the published settings for photographs."""
    return has_small_input(model) or (dataset_info.images < MIN_SCRATCH_IMAGES and not options.sets_teacher)


def normalised_run_fields(model: ModelConfig, dataset_info: DatasetInfo) -> dict[str, Any]:
    """Return the common fields of runs, with ImageNet's mean and standard deviation for colour images."""
    run_fields, (mean, std) = base_run_fields(model, dataset_info), IMAGENET_MOMENTS
    if model.channels != len(mean):
        return run_fields
    return run_fields | {"preprocess": replace(run_fields["preprocess"], mean=mean, std=std)}


def disable_dropout(model: ModelConfig, drop_path: float = 0.0, changes: Mapping[str, Any] = {}) -> ModelConfig:
    """Return a copy with dropout 0, stochastic depth `drop_path`, and `changes`: config values by their dotted
    paths."""
    return replace_known_fields(
        model, {"regularization.dropout": 0.0, "regularization.drop_path": drop_path, **changes}
    )


def length_run_fields(
    dataset_info: DatasetInfo, batch: int, epochs: TrainingLength = SMALL_UNLABELLED_LENGTH
) -> dict[str, Any]:
    """Return the run fields of the length: batch size, epochs, and a schedule with a warm-up of 5 % of the steps."""
    count = epochs.epochs(dataset_info.images)
    steps = max(1, round(count * dataset_info.images / batch))
    return {"batch_size": batch, "epochs": count, "schedule": ScheduleConfig(round(0.05 * steps))}


def photo_batch_size(dataset_info: DatasetInfo) -> int:
    """Return the batch size for few photographs: at most 64, and at least four steps per epoch."""
    return max(1, min(64, dataset_info.images // 4))


def make_masked_patches_run(model: ModelConfig, dataset_info: DatasetInfo, options: TrainOptions) -> Run:
    """Masked patch prediction: arXiv:2010.11929, section 4.6 and B.1.2. Images up to 64 pixels: tuned here; fewer than
    10,000 photographs: the settings for small images.

    vitreous train DATA --recipe NAME

    A million steps of 4096 images on JFT-300M, Adam at 2e-4 with 10,000 steps of warm-up and cosine decay. The weight
    decay is not published; here it is 0.1, as in Table 3's rows for JFT-300M. The target is the mean colour of a patch;
    other targets: --objective.target small-colours, or pixels.
    """
    if has_small_input(model):
        batch = max(1, min(256, dataset_info.images // 4))
        optimizer = OptimizerConfig("adamw", lr=1e-3, betas=(0.9, 0.95), weight_decay=0.05)
        return Run(
            **base_run_fields(disable_dropout(model), dataset_info),
            views=replace(UNLABELLED_CROP, crop=(0.4, 1.0)),
            optimizer=optimizer,
            objective=MaskedPatchesConfig(),
            **length_run_fields(dataset_info, batch),
        )
    if dataset_info.images < MIN_SCRATCH_IMAGES:
        return Run(
            **google_run_fields(apply_google_settings(model, options, representation=False), dataset_info),
            views=UNLABELLED_CROP,
            optimizer=OptimizerConfig("adamw", lr=1e-3, betas=(0.9, 0.95), weight_decay=0.05),
            objective=MaskedPatchesConfig(),
            **length_run_fields(dataset_info, photo_batch_size(dataset_info)),
        )
    return Run(
        **google_run_fields(apply_google_settings(model, options, representation=False), dataset_info),
        views=UNLABELLED_CROP,
        optimizer=OptimizerConfig("adamw", lr=2e-4, weight_decay=0.1, decay_on="all", clip=None),
        schedule=ScheduleConfig(10_000, "cosine"),
        objective=MaskedPatchesConfig(),
        batch_size=4096,
        epochs=1e6 * 4096 / dataset_info.images,
    )


def make_mae_run(model: ModelConfig, dataset_info: DatasetInfo, options: TrainOptions) -> Run:
    """Masked autoencoding: arXiv:2111.06377, Table 8, and facebookresearch/mae. Images up to 64 pixels, and fewer than
    10,000 photographs: tuned here.

    vitreous train DATA --recipe NAME --model ViT-B/16

    800 epochs of ImageNet, batch size 4096, lr 1.5e-4 x batch / 256, 40 epochs of warm-up; crop and flip are the only
    augmentation. The published models were trained with --epochs 1600.
    """
    # initial weights keep their positions
    model_changes: dict[str, Any] = {} if options.init else {"positions.kind": "sincos"}
    if has_small_input(model):
        batch = max(1, min(256, dataset_info.images // 4))
        return Run(
            **base_run_fields(disable_dropout(model, changes=model_changes), dataset_info),
            views=replace(UNLABELLED_CROP, crop=(0.4, 1.0)),
            optimizer=OptimizerConfig("adamw", lr=1.5e-3, betas=(0.9, 0.95), weight_decay=0.05, clip=None),
            objective=MAEConfig(decoder_width=96, decoder_depth=2, decoder_heads=3),
            **length_run_fields(dataset_info, batch),
        )
    if dataset_info.images < MIN_SCRATCH_IMAGES:
        heads = max(3, model.width // 64)
        return Run(
            **normalised_run_fields(disable_dropout(model, changes=model_changes), dataset_info),
            views=UNLABELLED_CROP,
            optimizer=OptimizerConfig("adamw", lr=1e-3, betas=(0.9, 0.95), weight_decay=0.05, clip=1.0),
            objective=MAEConfig(decoder_width=32 * heads, decoder_depth=2, decoder_heads=heads),
            **length_run_fields(dataset_info, photo_batch_size(dataset_info)),
        )
    return Run(
        **normalised_run_fields(disable_dropout(model, changes=model_changes), dataset_info),
        views=UNLABELLED_CROP,
        optimizer=OptimizerConfig(
            "adamw", lr=2.4e-3, betas=(0.9, 0.95), weight_decay=0.05, decay_on="multi-axis", clip=None
        ),
        schedule=ScheduleConfig(round(40 * dataset_info.images / 4096)),
        objective=MAEConfig(),
        batch_size=4096,
        epochs=800,
    )


def make_dino_run(model: ModelConfig, dataset_info: DatasetInfo, options: TrainOptions) -> Run:
    """DINO: arXiv:2104.14294, and facebookresearch/dino's main_dino.py. Images up to 64 pixels: tuned here; fewer than
    10,000 photographs: the settings for small images with the published crops.

    vitreous train DATA --recipe NAME --model ViT-S/16

    100 epochs with batch size 512 (64 on each of 8 GPUs), lr 5e-4 x batch / 256 with 10 epochs of warm-up, weight decay
    from 0.04 to 0.4. The teacher's momentum rises from 0.996 to 1 (for small batches: --schedules.momentum.start
    0.9995); its temperature is 0.04. Gradients are clipped per tensor.
    """
    if has_small_input(model):
        model_changes: dict[str, Any] = {} if options.init else {"pool": "mean", "class_token": False}
        return make_small_dino_run(disable_dropout(model, changes=model_changes), dataset_info)
    if dataset_info.images < MIN_SCRATCH_IMAGES:
        return make_few_photos_run(model, dataset_info, DINO_VIEWS)
    return Run(
        **normalised_run_fields(disable_dropout(model, 0.1), dataset_info),
        views=fit_local_crops(DINO_VIEWS, model),
        optimizer=OptimizerConfig(
            "adamw", lr=1e-3, weight_decay=0.04, decay_on="multi-axis", clip=3.0, clip_by="tensor"
        ),
        schedule=ScheduleConfig(round(10 * dataset_info.images / 512), end=1e-6 / 1e-3, warmup_includes_base=True),
        objective=DINOConfig(frozen=0.01),
        schedules={
            "weight_decay": RampConfig(0.04, 0.4),
            "momentum": RampConfig(0.996, 1.0),
            "teacher_temperature": RampConfig(0.04, 0.04),
        },
        batch_size=512,
        epochs=100,
    )


def make_dinov2_run(model: ModelConfig, dataset_info: DatasetInfo, options: TrainOptions) -> Run:
    """DINOv2 on ImageNet: arXiv:2304.07193, and facebookresearch/dinov2's vitl16_short.yaml. Images up to 64 pixels:
    tuned here. Fewer than 10,000 photographs, except for a student of a frozen teacher: the settings for small images
    with the published crops, and a ViT-S/16.

    vitreous train DATA --recipe NAME --model ViT-L/16

    125,000 steps of 2048 images, lr 4e-3 x sqrt(batch / 1024) with layer decay 0.9 and a fifth of the learning rate for
    the patch embedding. Images and patches share a head. Gradients are clipped separately for the backbone and the
    heads. Stochastic depth drops samples independently; the original drops the same number in every step.
    """
    if has_small_settings(model, dataset_info, options):
        run = make_small_or_few_run(model, dataset_info, DINOV2_VIEWS)
        objective = DINOv2Config(**SMALL_HEAD)
        optimizer = CONTINUED_OPTIMIZER if options.init else replace(run.optimizer, clip_by="part")
        return replace(run, objective=objective, optimizer=optimizer)
    drop = get_student_drop_path(0.3, options)
    return make_dinov2_paper_run(
        model, dataset_info, 4e-3, drop_path=drop, layer_decay=0.9, momentum=0.992, decay=0.4, warmup=10, epochs=100
    )


def make_dinov2_large_run(model: ModelConfig, dataset_info: DatasetInfo, options: TrainOptions) -> Run:
    """DINOv2 on a large dataset: facebookresearch/dinov2's vitl14.yaml.

    vitreous train DATA --recipe NAME --model DINOv2-L/14-swiglu

    625,000 steps of 3072 images (32 on each of 96 GPUs) of ImageNet-22k, lr 2e-4 x sqrt(batch / 1024), separate heads
    for images and patches, Sinkhorn-Knopp in place of centring, no layer decay. Feed-forward layers are SwiGLU; the
    published DINOv2-L/14, distilled from ViT-g on LVD-142M, has GELU. The last phase at 518 pixels is omitted, because
    its code was not published.
    """
    drop = get_student_drop_path(0.4, options)
    run = make_dinov2_paper_run(
        model,
        dataset_info,
        2e-4,
        batch=3072,
        drop_path=drop,
        layer_decay=1.0,
        momentum=0.994,
        decay=0.2,
        warmup=80,
        epochs=500,
    )
    objective = DINOv2Config(
        prototypes=131_072,
        bottleneck=384,
        patch_prototypes=131_072,
        patch_bottleneck=256,
        centring="sinkhorn",
        frozen=1 / 500,
    )
    return replace(run, objective=objective)


def get_student_drop_path(drop_path: float, options: TrainOptions) -> float:
    """Return the stochastic depth rate of a student: 0 for a student of a frozen teacher, else `drop_path`."""
    return 0.0 if options.sets_teacher else drop_path


SMALL_HEAD = {"prototypes": 1024, "head_width": 512, "bottleneck": 128, "frozen": 0.01, "batch_norm": True}


def make_small_dino_run(model: ModelConfig, dataset_info: DatasetInfo) -> Run:
    """Build a DINO run with the settings tuned here for images up to 64 pixels and for few photographs."""
    local_side = model.image[0] // 2
    local_side -= local_side % model.patch[0]
    disabled = (0.0, 0.0, 0.0)
    return Run(
        **base_run_fields(model, dataset_info),
        views=replace(
            DINO_VIEWS,
            locals=4 if local_side else 0,
            local_image=(local_side or 1,) * 2,
            blur=disabled,
            solarise=disabled,
        ),
        optimizer=OptimizerConfig("muon", lr=2e-3, matrix_lr=0.02, weight_decay=0.04, clip=3.0, clip_by="tensor"),
        objective=DINOConfig(**SMALL_HEAD, koleo=0.1),
        schedules={"momentum": RampConfig(0.99, 1.0), "teacher_temperature": RampConfig(0.04, 0.04)},
        **length_run_fields(dataset_info, max(2, min(64, dataset_info.images // 4)), TrainingLength(1e6, 10, 800)),
    )


def make_small_or_few_run(model: ModelConfig, dataset_info: DatasetInfo, views: MultiCrop) -> Run:
    """Build a DINO run with the settings tuned here for small images, or with those for few photographs, whose crops
    are the published `views`."""
    if has_small_input(model):
        return make_small_dino_run(disable_dropout(model), dataset_info)
    return make_few_photos_run(model, dataset_info, views)


#: of runs on few or small images that continue from weights: a small learning rate for the encoder, the largest for the
#: new heads (settings of this project, not tuned)
CONTINUED_OPTIMIZER = OptimizerConfig(
    "adamw",
    lr=3e-5,
    weight_decay=0.04,
    decay_on="multi-axis",
    clip=3.0,
    clip_by="part",
    layer_decay=0.9,
    rates=(("model.projection.", 0.2), ("head.", 10.0)),
)


def make_few_photos_run(model: ModelConfig, dataset_info: DatasetInfo, views: MultiCrop) -> Run:
    """Build a DINO run on few photographs: the settings for small images, with the published crops `views`."""
    run = make_small_dino_run(disable_dropout(model), dataset_info)
    return replace(
        run, views=fit_local_crops(views, model), preprocess=normalised_run_fields(model, dataset_info)["preprocess"]
    )


def make_dinov2_paper_run(
    model: ModelConfig,
    dataset_info: DatasetInfo,
    base: float,
    *,
    batch: int = 2048,
    drop_path: float,
    layer_decay: float,
    momentum: float,
    decay: float,
    warmup: int,
    epochs: int,
) -> Run:
    """Build a run with the common settings of DINOv2's configs. `base` is the learning rate for batch size 1024;
    `warmup` and `epochs` are in DINOv2's epochs of 1250 steps."""
    lr = base * (batch / 1024) ** 0.5
    return Run(
        **normalised_run_fields(
            disable_dropout(model, drop_path, {"regularization.drop_path_rises": False, "norm.layer_scale": 1e-5}),
            dataset_info,
        ),
        views=fit_local_crops(DINOV2_VIEWS, model),
        optimizer=OptimizerConfig(
            "adamw",
            lr=lr,
            weight_decay=0.04,
            decay_on="multi-axis",
            clip=3.0,
            clip_by="part",
            layer_decay=layer_decay,
            rates=(("model.projection.", 0.2),),
        ),
        schedule=ScheduleConfig(warmup * DINOV2_EPOCH_STEPS, end=1e-6 / lr, warmup_includes_base=True),
        objective=DINOv2Config(frozen=1 / epochs),
        schedules={
            "weight_decay": RampConfig(0.04, decay),
            "momentum": RampConfig(momentum, 1.0),
            "teacher_temperature": RampConfig(0.04, 0.07, "linear", 30 * DINOV2_EPOCH_STEPS, includes_end=True),
        },
        batch_size=batch,
        epochs=epochs * DINOV2_EPOCH_STEPS * batch / dataset_info.images,
    )


def fit_local_crops(views: MultiCrop, model: ModelConfig) -> MultiCrop:
    """Return the views with local crops whose size is a multiple of the patch size: 96 pixels, or 98 for patches of
    14."""
    return replace(views, local_image=tuple(round(96 / patch_length) * patch_length for patch_length in model.patch))


#: model for images up to 64 pixels; its tokens are patches, so masked patches can be left out of the computation
SMALL_IMAGE_MODEL = "ViT-192x9/4"
UNLABELLED_LENGTHS = (("images up to 64 pixels", SMALL_UNLABELLED_LENGTH),)
UNLABELLED_RECIPES = (
    Recipe(
        "masked-patches",
        make_masked_patches_run,
        "masked patch prediction",
        "arXiv:2010.11929, B.1.2",
        lr_scaling="fixed",
        published=(("ViT-B/16", "ImageNet, from JFT-300M", "79.9 %"),),
        data="JFT-300M",
        models=("ViT-B/16",),
        small=SMALL_IMAGE_MODEL,
        objective=MaskedPatchesConfig,
        by_steps=True,
    ),
    Recipe(
        "mae",
        make_mae_run,
        "masked autoencoding",
        "arXiv:2111.06377, Table 8",
        lr_scaling="linear",
        published=(
            ("ViT-B/16", "ImageNet, fine-tuned", "83.6 %"),
            ("ViT-L/16", "ImageNet, fine-tuned", "85.9 %"),
            ("ViT-H/14", "ImageNet, fine-tuned", "86.9 %"),
        ),
        models=("ViT-B/16", "ViT-L/16", "ViT-H/14"),
        small=SMALL_IMAGE_MODEL,
        objective=MAEConfig,
        warmup_in_epochs=True,
    ),
    Recipe(
        "dino",
        make_dino_run,
        "self-distillation",
        "arXiv:2104.14294",
        lr_scaling="linear",
        published=(("ViT-S/16", "ImageNet, k-NN after 100 epochs of batch size 512", "69.3 %"),),
        models=("ViT-S/16", "ViT-B/16"),
        small="Conv+ViT-128x4/8",
        objective=DINOConfig,
        warmup_in_epochs=True,
    ),
    Recipe(
        "dinov2",
        make_dinov2_run,
        "self-distillation of images and patches",
        "arXiv:2304.07193",
        lr_scaling="sqrt",
        published=(("ViT-L/16", "ImageNet, k-NN", "81.6 %"),),
        models=("ViT-L/16",),
        small=SMALL_IMAGE_MODEL,
        few="ViT-S/16",
        objective=DINOv2Config,
        by_steps=True,
    ),
    Recipe(
        "dinov2-large",
        make_dinov2_large_run,
        "DINOv2 on a large dataset",
        "arXiv:2304.07193",
        lr_scaling="sqrt",
        published=(("DINOv2-L/14-swiglu", "ImageNet, k-NN", "82.0 %"),),
        data="ImageNet-21k",
        models=("DINOv2-L/14-swiglu",),
        objective=DINOv2Config,
        by_steps=True,
    ),
)
