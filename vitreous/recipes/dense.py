"""Recipes for semantic segmentation."""

from __future__ import annotations

from dataclasses import replace

from vitreous.data.annotations.map_statistics import MapSymmetry
from vitreous.data.augmentation.scenes import SceneViews
from vitreous.data.augmentation.volumes import VolumeViews
from vitreous.data.modalities.base import HALF_MOMENTS, IMAGENET_MOMENTS
from vitreous.models.config import ModelConfig, replace_known_fields
from vitreous.models.names import ANNOTATED_IMAGE_SIZES
from vitreous.objectives.segmentation import SegmentationConfig
from vitreous.recipes.options import TrainOptions
from vitreous.recipes.recipe import (
    DatasetInfo,
    Recipe,
    TrainingLength,
    base_run_fields,
    fixed_image_side,
    make_muon_optimizer,
)
from vitreous.training.run import FineTuneConfig, OptimizerConfig, Run, ScheduleConfig

ADE20K_BATCH_SIZE, ADE20K_WARMUP_STEPS = 16, 1500  # batch size and warm-up steps on ADE20K
SEGMENT_LENGTH = TrainingLength(2e4, 5, 200)
MAX_VOLUME_BATCH = 4  # maximum batch size of volumes
VOLUME_SEGMENT_LENGTH = TrainingLength(1e4, 5, 100)
#: width of a ViT with adapter -> learning rate, weight decay, stochastic depth; other widths use those of 768 or 1024
ADAPTER_HYPERPARAMETERS = {
    192: (1.2e-4, 0.01, 0.1),
    384: (6e-5, 0.01, 0.2),
    768: (6e-5, 0.01, 0.3),
    1024: (2e-5, 0.05, 0.4),
}


def make_segment_run(model: ModelConfig, dataset_info: DatasetInfo, options: TrainOptions) -> Run:
    """Semantic segmentation for a few hundred images.

    vitreous train DATA --recipe NAME

    DATA has masks for its images. Crops of 256 pixels are taken from images scaled by 1/2 to 2. Flips and quarter
    turns are chosen from the class maps of the training images (docs/guides/segmentation.md). The loss is cross-entropy
    plus Dice; Muon optimises matrices and filters. --init accepts any weights; layer decay then gives their blocks a
    lower learning rate than the head. Crops of volumes have the size of the first volume, at most 64 voxels along each
    axis. Volumes are augmented by random scaling per axis, rotation, intensity changes and noise.
    """
    batch = max(1, min(8, dataset_info.images // 2))
    epochs = SEGMENT_LENGTH.epochs(dataset_info.images)
    run_fields = base_run_fields(
        replace_known_fields(model, {"regularization.dropout": 0.0, "regularization.drop_path": 0.0}), dataset_info
    )
    symmetry = dataset_info.map_statistics.symmetry if dataset_info.map_statistics else MapSymmetry()
    flips = {"flip": 0.5 * symmetry.flip, "flip_vertical": 0.5 * symmetry.flip_vertical, "turn": symmetry.turn}
    views = SceneViews(**flips, jitter=(0.2, 0.2, 0.2))
    if len(model.image) == 3:
        views = VolumeViews()
        batch, epochs = min(batch, MAX_VOLUME_BATCH), VOLUME_SEGMENT_LENGTH.epochs(dataset_info.images)
    steps = max(1, round(epochs * dataset_info.images / batch))
    return Run(
        **run_fields | {"preprocess": run_fields["preprocess"].adjust(filter="bilinear")},
        views=views,
        optimizer=make_muon_optimizer(options, lr=4e-3),
        schedule=ScheduleConfig(round(0.05 * steps)),
        objective=SegmentationConfig(),
        batch_size=batch,
        epochs=epochs,
    )


def make_swin_upernet_run(model: ModelConfig, dataset_info: DatasetInfo, options: TrainOptions) -> Run:
    """Swin with UPerNet's head on ADE20K: arXiv:2103.14030, A2.3.

    vitreous train DATA --recipe NAME --init WEIGHTS

    160,000 steps of 16 images; AdamW at 6e-5 with weight decay 0.01, 1,500 steps of warm-up, then linear decay to 0;
    stochastic depth 0.3, head dropout 0.1. Crops have 512 pixels, from images whose short side is scaled to 0.5 to 2
    times 512. A crop with 75 % of one class is redrawn; colours are distorted as in mmsegmentation. Windows attend to
    the zeros that pad a grid. The authors' auxiliary head on the third stage is omitted, and GroupNorm replaces the
    head's batch norm. B and L at 640 pixels: --image-size 640.
    """
    return make_ade20k_run(
        replace_known_fields(
            model, {"regularization.dropout": 0.0, "regularization.drop_path": 0.3, "attention.pad": "zeros"}
        ),
        dataset_info,
        steps=160_000,
        optimizer=OptimizerConfig("adamw", lr=6e-5, betas=(0.9, 0.999), weight_decay=0.01, decay_on="mmdet", clip=None),
        objective=SegmentationConfig(head="upernet", head_width=32, head_dropout=0.1, dice=0.0),
    )


def make_adapter_upernet_run(model: ModelConfig, dataset_info: DatasetInfo, options: TrainOptions) -> Run:
    """ViT-Adapter with UPerNet's head on ADE20K: arXiv:2205.08534, section 4.3.

    vitreous train DATA --recipe NAME --init WEIGHTS

    160,000 steps of 16 images of 512 pixels; views, warm-up and head dropout as in `swin-upernet`; AdamW, layer decay
    0.95. Each feature map of the adapter receives the tokens of its interaction block. The adapter has batch norm over
    all processes; GroupNorm replaces the head's batch norm, and the authors' auxiliary head is omitted. The class token
    stays in the ViT (original: dropped). L starts from AugReg's weights, with images normalised to [-1, 1].

    | size | learning rate | weight decay | stochastic depth |
    |---|---|---|---|
    | Ti | 1.2e-4 | 0.01 | 0.1 |
    | S | 6e-5 | 0.01 | 0.2 |
    | B | 6e-5 | 0.01 | 0.3 |
    | L | 2e-5 | 0.05 | 0.4 |
    """
    lr, decay, drop_path = ADAPTER_HYPERPARAMETERS.get(
        model.width, ADAPTER_HYPERPARAMETERS[1024 if model.width > 768 else 768]
    )
    run = make_ade20k_run(
        replace_known_fields(model, {"regularization.dropout": 0.0, "regularization.drop_path": drop_path}),
        dataset_info,
        steps=160_000,
        optimizer=OptimizerConfig(
            "adamw", lr, betas=(0.9, 0.999), weight_decay=decay, decay_on="multi-axis", layer_decay=0.95, clip=None
        ),
        objective=SegmentationConfig(
            head="upernet", head_width=32, head_dropout=0.1, dice=0.0, adapter="batch", adapter_tokens="interaction"
        ),
    )
    if model.width < 1024 or model.channels != 3:
        return run
    return replace(run, preprocess=replace(run.preprocess, mean=HALF_MOMENTS[0], std=HALF_MOMENTS[1]))


def make_dinov2_segment_run(model: ModelConfig, dataset_info: DatasetInfo, options: TrainOptions) -> Run:
    """Segmentation by a linear layer on frozen DINOv2 patch tokens: arXiv:2304.07193, section 7.4 and B.5.

    vitreous train DATA --recipe NAME --init WEIGHTS

    40,000 steps of 16 images; AdamW at 1e-3 with weight decay 1e-4, 1,500 steps of warm-up, then linear decay to 0;
    crops of 518 pixels (original: 512, padded to full patches), views as in `swin-upernet`. The backbone is frozen. The
    original batch norm before the layer is omitted, because the tokens are normalised. Tokens of four depths, as in the
    `+ms` results: --objective.head multiscale; the authors' averaging over image scales is omitted.
    """
    run = make_ade20k_run(
        replace_known_fields(model, {"regularization.dropout": 0.0, "regularization.drop_path": 0.0}),
        dataset_info,
        steps=40_000,
        optimizer=OptimizerConfig("adamw", lr=1e-3, betas=(0.9, 0.999), weight_decay=1e-4, clip=None),
        objective=SegmentationConfig(head="linear", dice=0.0),
    )
    return replace(run, tune=FineTuneConfig(last_blocks=0))


def make_ade20k_run(
    model: ModelConfig, dataset_info: DatasetInfo, steps: int, optimizer: OptimizerConfig, objective: SegmentationConfig
) -> Run:
    """Build a run with the common settings of the ADE20K recipes: views, warm-up, linear decay, batch size 16."""
    run_fields = base_run_fields(model, dataset_info)
    mean, std = (
        IMAGENET_MOMENTS if model.channels == 3 else (run_fields["preprocess"].mean, run_fields["preprocess"].std)
    )
    return Run(
        **run_fields | {"preprocess": replace(run_fields["preprocess"], filter="bilinear", mean=mean, std=std)},
        views=SceneViews(
            scale_spacing="linear",
            fit="short",
            max_class_share=0.75,
            flip=0.5,
            jitter=(32 / 255, 0.5, 0.5),
            hue=0.1,
            jitter_probability=0.5,
            jitter_style="mmsegmentation",
            fill="mean",
        ),
        optimizer=optimizer,
        schedule=ScheduleConfig(ADE20K_WARMUP_STEPS, "linear"),
        objective=objective,
        batch_size=ADE20K_BATCH_SIZE,
        epochs=steps * ADE20K_BATCH_SIZE / dataset_info.images,
    )


SEGMENTATION_RECIPES = (
    Recipe(
        "swin-upernet",
        make_swin_upernet_run,
        "Swin with UPerNet's head on ADE20K",
        "arXiv:2103.14030",
        published=tuple(
            (name, "ADE20K", miou)
            for name, miou in zip(("Swin-T/4", "Swin-S/4", "Swin-B/4"), ("44.5 %", "47.6 %", "48.1 %"), strict=True)
        ),
        models=("Swin-T/4", "Swin-S/4", "Swin-B/4"),
        image=fixed_image_side(512),
        objective=SegmentationConfig,
        for_models="swin",
        from_weights=True,
        by_steps=True,
        data="ADE20K",
    ),
    Recipe(
        "adapter-upernet",
        make_adapter_upernet_run,
        "ViT-Adapter with UPerNet's head on ADE20K",
        "arXiv:2205.08534",
        published=tuple(
            (f"ViT-{size}", "ADE20K", miou)
            for size, miou in zip(
                ("Ti/16", "S/16", "B/16", "L/16"), ("42.6 %", "46.2 %", "48.8 %", "53.4 %"), strict=True
            )
        ),
        models=("ViT-Ti/16", "ViT-S/16", "ViT-B/16", "ViT-L/16"),
        image=fixed_image_side(512),
        objective=SegmentationConfig,
        for_models="vit",
        from_weights=True,
        by_steps=True,
        data="ADE20K",
    ),
    Recipe(
        "dinov2-segment",
        make_dinov2_segment_run,
        "segmentation by a linear layer on frozen DINOv2, ADE20K",
        "arXiv:2304.07193",
        published=tuple(
            (f"DINOv2-{size}/14", "ADE20K, four depths and scales", miou)
            for size, miou in zip("SBLg", ("47.2 %", "51.3 %", "53.1 %", "53.0 %"), strict=True)
        ),
        models=tuple(f"DINOv2-{size}/14" for size in "SBLg"),
        image=fixed_image_side(518),
        objective=SegmentationConfig,
        for_models="vit",
        from_weights=True,
        by_steps=True,
        data="ADE20K",
    ),
    Recipe(
        "segment",
        make_segment_run,
        "semantic segmentation, a few hundred images",
        "tuned here",
        models=("ViT-192x6/16",),
        solid="ViT-192x6/8x8x8",
        image=fixed_image_side(ANNOTATED_IMAGE_SIZES["classes"][0]),
        objective=SegmentationConfig,
        lengths=(("images", SEGMENT_LENGTH), ("volumes", VOLUME_SEGMENT_LENGTH)),
        data="photographs",
        floor=8,
        by_maps=True,
    ),
)
