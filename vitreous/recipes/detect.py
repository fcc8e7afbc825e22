"""Recipes for object detection and instance segmentation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vitreous.data.augmentation.scenes import SceneViews
from vitreous.data.modalities.base import HALF_MOMENTS, IMAGENET_MOMENTS
from vitreous.models.config import ModelConfig, replace_known_fields
from vitreous.models.names import ANNOTATED_IMAGE_SIZES
from vitreous.objectives.detection import DetectionConfig
from vitreous.recipes.options import TrainOptions
from vitreous.recipes.recipe import (
    DatasetInfo,
    Recipe,
    RunBuilder,
    TrainingLength,
    base_run_fields,
    fixed_image_side,
    make_muon_optimizer,
)
from vitreous.training.run import DecayRule, OptimizerConfig, Run, ScheduleConfig

DETECT_LENGTH = TrainingLength(2e4, 5, 200)


def make_detect_run(model: ModelConfig, dataset_info: DatasetInfo, options: TrainOptions) -> Run:
    """Object detection, with masks if the data have them, for a few hundred images.

    vitreous train DATA --recipe NAME

    Images are scaled to fit into 320 pixels, then by 0.8 to 1.25, cropped, flipped and colour-jittered. --init accepts
    any weights; layer decay then gives their blocks a lower learning rate than the heads.
    """
    batch = max(1, min(8, dataset_info.images // 2))
    epochs = DETECT_LENGTH.epochs(dataset_info.images)
    steps = max(1, round(epochs * dataset_info.images / batch))
    run_fields = base_run_fields(
        replace_known_fields(model, {"regularization.dropout": 0.0, "regularization.drop_path": 0.0}), dataset_info
    )
    return Run(
        **run_fields | {"preprocess": replace(run_fields["preprocess"], filter="bilinear")},
        views=SceneViews(scale=(0.8, 1.25), fit="whole", flip=0.5, jitter=(0.2, 0.2, 0.2), fill="mean", visible=0.25),
        optimizer=make_muon_optimizer(options, lr=2e-3, beta2=0.95),
        schedule=ScheduleConfig(round(0.05 * steps)),
        objective=DetectionConfig(
            masks=dataset_info.masks, heads="light", width=128, hidden=256, finest=8, anchor=4.0, proposals=300
        ),
        batch_size=batch,
        epochs=epochs,
        ema=0.998 if steps > 1000 else None,
    )


def make_vitdet_run(model: ModelConfig, dataset_info: DatasetInfo, options: TrainOptions) -> Run:
    """ViTDet with Mask R-CNN on COCO: arXiv:2203.16527, appendix A.2.

    vitreous train DATA --recipe NAME --init WEIGHTS

    WEIGHTS are a ViT pre-trained with MAE. 184,375 steps of 64 images (H: 138,281); AdamW at 1e-4 with weight decay 0.1
    and layer decay 0.7 (L: 0.8, H: 0.9), a tenth of the learning rate after 8/9 and again after 26/27 of the steps, 250
    steps of warm-up; stochastic depth 0.1 (L: 0.4, H: 0.5); large-scale jittering by 0.1 to 2 at 1024 pixels. The box
    loss is smooth L1, as in torchvision.
    """
    return make_vitdet_base_run(model, dataset_info, lr=1e-4, steps=138_281 if model.depth == 32 else 184_375)


def make_vitdet_lvis_run(model: ModelConfig, dataset_info: DatasetInfo, options: TrainOptions) -> Run:
    """ViTDet with Mask R-CNN on LVIS: arXiv:2203.16527, appendix A.2.

    vitreous train DATA --recipe NAME --init WEIGHTS

    As `vitdet`, at 2e-4 for 156,250 steps (H: 1e-4, with stochastic depth 0.4), with 300 detections per image of scores
    above 0.02. Images of rare classes are repeated by repeat factors of threshold 0.001 (LVIS, arXiv:1908.03195,
    appendix B.2). The federated loss of a region uses 50 classes (arXiv:2103.07461), drawn per image (original: per
    GPU, with background among the 50).
    """
    run = make_vitdet_base_run(model, dataset_info, lr=1e-4 if model.depth == 32 else 2e-4, steps=156_250)
    if model.depth == 32:
        run = replace(run, model=replace_known_fields(run.model, {"regularization.drop_path": 0.4}))
    objective = replace(run.objective, detections=300, threshold=0.02, scores="sigmoid", federated=50)
    return replace(run, objective=objective, data=replace(run.data, sampling="repeat-factor"))


def make_vitdet_base_run(model: ModelConfig, dataset_info: DatasetInfo, lr: float, steps: int) -> Run:
    """Build a run with the common settings of ViTDet's recipes at a learning rate, for a number of steps."""
    layer_decay, drop_path = {24: (0.8, 0.4), 32: (0.9, 0.5)}.get(model.depth, (0.7, 0.1))
    decay_on = "all" if model.depth == 32 else "vitdet"
    return make_mask_rcnn_run(
        replace_known_fields(model, {"regularization.dropout": 0.0, "regularization.drop_path": drop_path}),
        dataset_info,
        batch=64,
        epochs=64 * steps / dataset_info.images,
        optimizer=OptimizerConfig(
            "adamw", lr, weight_decay=0.1, decay_on=decay_on, layer_decay=layer_decay, clip=None, betas=(0.9, 0.999)
        ),
        schedule=ScheduleConfig(250, "steps", milestones=(8 / 9, 26 / 27)),
        views=SceneViews(scale=(0.1, 2.0), scale_spacing="linear", fit="whole", fill="mean", visible=0.0),
    )


def make_swin_mask_rcnn_run(model: ModelConfig, dataset_info: DatasetInfo, options: TrainOptions) -> Run:
    """Swin with Mask R-CNN on COCO, 36 epochs: arXiv:2103.14030, section 4.2 and A2.2.

    vitreous train DATA --recipe NAME --init WEIGHTS

    AdamW at 1e-4 with weight decay 0.05, batch size 16, a tenth of the learning rate after epoch 27 and again after 33.
    Images have 0.6 to 1 times the size that fits into 1024 x 1024 (original: short side 480 to 800 pixels). Windows
    attend to the zeros that pad a grid. Heads have ViTDet's convolutions and norms.
    """
    return make_3x_schedule_run(
        replace_known_fields(
            model, {"regularization.dropout": 0.0, "regularization.drop_path": 0.2, "attention.pad": "zeros"}
        ),
        dataset_info,
        "mmdet",
    )


def make_adapter_mask_rcnn_run(model: ModelConfig, dataset_info: DatasetInfo, options: TrainOptions) -> Run:
    """ViT-Adapter with Mask R-CNN on COCO, 36 epochs: arXiv:2205.08534, section 4.1.

    vitreous train DATA --recipe NAME --init WEIGHTS

    As `swin-mask-rcnn`, with the adapter's batch norm over all processes; stochastic depth 0.1 for Ti, 0.2 for S, 0.3
    for B, 0.4 for L; layer decay 0.8 for L. Attention uses windows of 14 x 14 tokens, except in the last block of each
    quarter of the ViT. Windows at the border of the grid are smaller; the authors pad queries, keys and values with
    zeros. L starts from AugReg's weights, with images normalised to [-1, 1].
    """
    drop_path = {192: 0.1, 384: 0.2, 768: 0.3}.get(model.width, 0.4)
    decay_on, layer_decay = ("multi-axis", 0.8) if model.width >= 1024 else ("matrices", 1.0)
    windows = {"attention.window": 14, "attention.global_blocks": global_attention_blocks(model.depth)}
    adapted = replace_known_fields(
        model, {"regularization.dropout": 0.0, "regularization.drop_path": drop_path, **windows}
    )
    run = make_3x_schedule_run(adapted, dataset_info, decay_on, layer_decay)
    run = replace(run, objective=replace(run.objective, adapter="batch"))
    if model.width < 1024 or model.channels != 3:
        return run
    return replace(run, preprocess=replace(run.preprocess, mean=HALF_MOMENTS[0], std=HALF_MOMENTS[1]))


def global_attention_blocks(depth: int) -> tuple[int, ...]:
    """Return the index of the last block of each quarter of a ViT, such as 2, 5, 8 and 11 of 12 blocks."""
    return tuple(sorted({-(-depth * quarter // 4) - 1 for quarter in (1, 2, 3, 4)}))


def make_3x_schedule_run(
    model: ModelConfig, dataset_info: DatasetInfo, decay_on: DecayRule, layer_decay: float = 1.0
) -> Run:
    """Build a run with the common settings of the 36-epoch recipes (detectron2's 3x schedule)."""
    return make_mask_rcnn_run(
        model,
        dataset_info,
        batch=16,
        epochs=36.0,
        optimizer=OptimizerConfig(
            "adamw", 1e-4, betas=(0.9, 0.999), decay_on=decay_on, layer_decay=layer_decay, clip=None
        ),
        schedule=ScheduleConfig(500, "steps", milestones=(27 / 36, 33 / 36)),
        views=SceneViews(scale=(0.6, 1.0), scale_spacing="linear", fit="whole", fill="mean", visible=0.0),
    )


def make_mask_rcnn_run(
    model: ModelConfig,
    dataset_info: DatasetInfo,
    batch: int,
    epochs: float,
    optimizer: OptimizerConfig,
    schedule: ScheduleConfig,
    views: SceneViews,
) -> Run:
    """Build a run with the common settings of the COCO recipes: Mask R-CNN with ViTDet's heads, ImageNet's mean and
    standard deviation."""
    run_fields = base_run_fields(model, dataset_info)
    mean, std = (
        IMAGENET_MOMENTS if model.channels == 3 else (run_fields["preprocess"].mean, run_fields["preprocess"].std)
    )
    return Run(
        **run_fields | {"preprocess": replace(run_fields["preprocess"], filter="bilinear", mean=mean, std=std)},
        views=views,
        optimizer=optimizer,
        schedule=schedule,
        objective=DetectionConfig(masks=dataset_info.masks, heads="vitdet", round_anchors=False),
        batch_size=batch,
        epochs=epochs,
    )


def build_coco_recipe(name: str, make: RunBuilder, about: str, source: str, **changes: Any) -> Recipe:
    """Build a COCO recipe at 1024 pixels that requires initial weights. `changes` are further fields of `Recipe`."""
    recipe = Recipe(
        name,
        make,
        about,
        source,
        image=fixed_image_side(1024),
        objective=DetectionConfig,
        from_weights=True,
        data="COCO",
    )
    return replace(recipe, **changes)


def list_detection_results(
    prefix: str, sizes: Sequence[str], data: str, scores: Sequence[str]
) -> tuple[tuple[str, str, str], ...]:
    """List published results of models of several sizes: (model, dataset, score)."""
    return tuple((prefix + size, data, score) for size, score in zip(sizes, scores, strict=True))


VITDET_SIZES, SWIN_MASK_RCNN_SIZES, ADAPTER_SIZES = (
    ("B/16", "L/16", "H/16"),
    ("T/4", "S/4"),
    ("Ti/16", "S/16", "B/16", "L/16"),
)

DETECTION_RECIPES = (
    build_coco_recipe(
        "vitdet",
        make_vitdet_run,
        "ViTDet with Mask R-CNN on COCO",
        "arXiv:2203.16527",
        published=list_detection_results(
            "ViTDet-", VITDET_SIZES, "COCO, AP of boxes / masks", ("51.6 / 45.9", "55.5 / 49.2", "56.7 / 50.2")
        ),
        models=tuple(f"ViTDet-{size}" for size in VITDET_SIZES),
        for_models="vit",
        by_steps=True,
    ),
    build_coco_recipe(
        "vitdet-lvis",
        make_vitdet_lvis_run,
        "ViTDet with Mask R-CNN on LVIS",
        "arXiv:2203.16527",
        published=list_detection_results("ViTDet-", VITDET_SIZES, "LVIS, AP of boxes", ("40.2", "46.1", "49.1")),
        models=tuple(f"ViTDet-{size}" for size in VITDET_SIZES),
        for_models="vit",
        by_steps=True,
        data="LVIS",
    ),
    build_coco_recipe(
        "swin-mask-rcnn",
        make_swin_mask_rcnn_run,
        "Swin with Mask R-CNN on COCO, 36 epochs",
        "arXiv:2103.14030",
        published=list_detection_results(
            "Swin-", SWIN_MASK_RCNN_SIZES, "COCO, AP of boxes / masks", ("46.0 / 41.6", "48.5 / 43.3")
        ),
        models=tuple(f"Swin-{size}" for size in SWIN_MASK_RCNN_SIZES),
        for_models="swin",
    ),
    build_coco_recipe(
        "adapter-mask-rcnn",
        make_adapter_mask_rcnn_run,
        "ViT-Adapter with Mask R-CNN on COCO, 36 epochs",
        "arXiv:2205.08534",
        published=list_detection_results(
            "ViT-",
            ADAPTER_SIZES,
            "COCO, AP of boxes / masks",
            ("46.0 / 41.0", "48.2 / 42.8", "49.6 / 43.6", "52.1 / 46.0"),
        ),
        models=tuple(f"ViT-{size}" for size in ADAPTER_SIZES),
        for_models="vit",
    ),
    Recipe(
        "detect",
        make_detect_run,
        "object detection and instance segmentation, a few hundred images",
        "tuned here",
        models=("Conv16-32-64-128+ViT-192x4/16",),
        image=fixed_image_side(ANNOTATED_IMAGE_SIZES["objects"][0]),
        objective=DetectionConfig,
        lengths=(("images", DETECT_LENGTH),),
        data="photographs",
        floor=8,
    ),
)
