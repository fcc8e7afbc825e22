"""Recipes that fine-tune supervised weights with SGD and a zero-initialised head: the ViT paper's Table 4, AugReg's
Table 4, and BiT's rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace

from vitreous.models.config import ModelConfig, replace_known_fields
from vitreous.recipes.options import TrainOptions
from vitreous.recipes.recipe import (
    INCEPTION_VIEWS,
    DatasetInfo,
    PublishedResult,
    Recipe,
    RunBuilder,
    fixed_image_side,
    google_run_fields,
)
from vitreous.training.run import OptimizerConfig, Run, ScheduleConfig

FINETUNE_BATCH_SIZE = 512
IMAGENET_LR_GRID, TRANSFER_LR_GRID = (0.003, 0.01, 0.03, 0.06), (0.001, 0.003, 0.01, 0.03)  # Table 4's grids
#: model -> dropout rate with which the ViT paper's code fine-tunes it (vit_jax/configs/models.py); 0 for others
MODEL_DROPOUT = {"ViT-L/16": 0.1, "ViT-H/14": 0.1, "R50+ViT-B/16": 0.1, "R50+ViT-L/32": 0.1}


@dataclass(frozen=True)
class FinetuneSettings:
    """A row of a fine-tuning table.

    - `data`: the dataset.
    - `steps`, `warmup`: optimiser steps of batch size 512, and warm-up steps.
    - `lr`: the learning rate without a grid search; `grid`: the learning rates of the grid search.
    - `hold_out`: the share of the training images that the grid search uses for validation.
    - `about`: the description of the recipe.
    """

    data: str
    steps: int
    warmup: int
    lr: float
    _: KW_ONLY
    grid: tuple[float, ...]
    hold_out: float
    about: str


#: arXiv:2010.11929, Table 4; validation shares of B.1.1; warm-up and default learning rates of Google's code
VIT_TABLE4 = {
    "imagenet": FinetuneSettings(
        "ImageNet",
        20_000,
        warmup=500,
        lr=0.03,
        grid=IMAGENET_LR_GRID,
        hold_out=0.01,
        about="weights to ImageNet-sized data, 384 pixels",
    ),
    "cifar": FinetuneSettings(
        "CIFAR-10",
        10_000,
        warmup=500,
        lr=0.03,
        grid=TRANSFER_LR_GRID,
        hold_out=0.02,
        about="weights to CIFAR-10 or CIFAR-100, 384 pixels",
    ),
    "pets": FinetuneSettings(
        "Pets",
        500,
        warmup=100,
        lr=0.03,
        grid=TRANSFER_LR_GRID,
        hold_out=0.1,
        about="weights to a few thousand photographs",
    ),
    "flowers": FinetuneSettings(
        "Flowers",
        500,
        warmup=100,
        lr=0.03,
        grid=TRANSFER_LR_GRID,
        hold_out=0.1,
        about="weights to a thousand photographs",
    ),
    "vtab": FinetuneSettings(
        "VTAB",
        2_500,
        warmup=500,
        lr=0.01,
        grid=(0.01,),
        hold_out=0.2,
        about="weights to the 1000 images of a VTAB task",
    ),
}
AUGREG_TRANSFER_LR_GRID, AUGREG_IMAGENET_LR_GRID = (0.001, 0.003, 0.01), (0.01, 0.03)
#: arXiv:2106.10270, Table 4, which lacks the warm-up for VTAB; here it is that of the other rows of the same length
AUGREG_TABLE4 = {
    "imagenet": FinetuneSettings(
        "ImageNet",
        20_000,
        warmup=500,
        lr=0.03,
        grid=AUGREG_IMAGENET_LR_GRID,
        hold_out=0.01,
        about="AugReg weights to ImageNet-sized data",
    ),
    "pets": FinetuneSettings(
        "Pets",
        500,
        warmup=100,
        lr=0.01,
        grid=AUGREG_TRANSFER_LR_GRID,
        hold_out=0.1,
        about="AugReg weights to Pets or KITTI, the short row",
    ),
    "pets-long": FinetuneSettings(
        "Pets",
        2_500,
        warmup=200,
        lr=0.01,
        grid=AUGREG_TRANSFER_LR_GRID,
        hold_out=0.1,
        about="AugReg weights to Pets or KITTI, the long row",
    ),
    "cifar": FinetuneSettings(
        "CIFAR-10",
        2_500,
        warmup=200,
        lr=0.01,
        grid=AUGREG_TRANSFER_LR_GRID,
        hold_out=0.02,
        about="AugReg weights to CIFAR-100 or RESISC45, short",
    ),
    "cifar-long": FinetuneSettings(
        "CIFAR-10",
        10_000,
        warmup=500,
        lr=0.01,
        grid=AUGREG_TRANSFER_LR_GRID,
        hold_out=0.02,
        about="AugReg weights to CIFAR-100 or RESISC45, long",
    ),
    "vtab": FinetuneSettings(
        "VTAB",
        500,
        warmup=100,
        lr=0.01,
        grid=TRANSFER_LR_GRID,
        hold_out=0.2,
        about="AugReg weights to a VTAB task, the short row",
    ),
    "vtab-long": FinetuneSettings(
        "VTAB",
        2_500,
        warmup=200,
        lr=0.01,
        grid=TRANSFER_LR_GRID,
        hold_out=0.2,
        about="AugReg weights to a VTAB task, the long row",
    ),
}


def list_finetune_results(data: str, *results: tuple[str, str, str]) -> tuple[PublishedResult, ...]:
    """List published results on `data` as (model, pre-training and fine-tuning data, accuracy), from (model,
    pre-training data, accuracy)."""
    return tuple((model, f"{pretraining}, fine-tuned on {data}", accuracy) for model, pretraining, accuracy in results)


def list_vit_results(data: str, base: str, large: str) -> tuple[PublishedResult, ...]:
    """List the results of the ViT paper's Table 5 on `data`: ViT-B/16 from ImageNet-21k and ViT-L/16 from JFT-300M."""
    return list_finetune_results(data, ("ViT-B/16", "ImageNet-21k", base), ("ViT-L/16", "JFT-300M", large))


#: recipe -> published results: arXiv:2010.11929, Tables 2 (VTAB) and 5; arXiv:2106.10270
PUBLISHED_RESULTS = {
    "finetune-imagenet": list_vit_results("ImageNet", "83.97 %", "87.12 %"),
    "finetune-cifar": list_vit_results("CIFAR-10", "98.95 %", "99.38 %")
    + list_vit_results("CIFAR-100", "91.67 %", "94.04 %"),
    "finetune-pets": list_vit_results("Pets", "94.43 %", "97.11 %"),
    "finetune-flowers": list_vit_results("Flowers", "99.38 %", "99.56 %"),
    "finetune-vtab": list_finetune_results(
        "VTAB (19 tasks)", ("ViT-L/16", "ImageNet-21k", "72.72 %"), ("ViT-H/14", "JFT-300M", "77.63 %")
    ),
    "augreg-finetune-imagenet": list_finetune_results(
        "ImageNet", ("ViT-L/16", "ImageNet-21k", "85.59 %"), ("ViT-B/16", "ImageNet-21k", "85.49 %")
    ),
}


def make_sgd_optimizer(lr: float, clip: float | None = 1.0) -> OptimizerConfig:
    """Return SGD with momentum 0.9 and no weight decay."""
    return OptimizerConfig("sgd", lr=lr, momentum=0.9, weight_decay=0.0, clip=clip)


def set_dropout(model: ModelConfig, dropout: float) -> ModelConfig:
    """Return a ViT with a dropout rate and without stochastic depth, regardless of the run that trained its weights. A
    ResNet is returned unchanged."""
    return replace_known_fields(model, {"regularization.dropout": dropout, "regularization.drop_path": 0.0})


def make_table4_run(
    settings: FinetuneSettings, model: ModelConfig, dataset_info: DatasetInfo, ema: float | None = None
) -> Run:
    """Build the fine-tuning run of a table row. `ema` is the decay of Polyak averaging, None for no averaging."""
    return Run(
        **google_run_fields(model, dataset_info, squash=True),
        views=INCEPTION_VIEWS,
        optimizer=make_sgd_optimizer(settings.lr),
        schedule=ScheduleConfig(settings.warmup, "cosine"),
        batch_size=FINETUNE_BATCH_SIZE,
        epochs=settings.steps * FINETUNE_BATCH_SIZE / dataset_info.images,
        ema=ema,
        ema_warmup=False,
    )


def vit_finetune_run_builder(settings: FinetuneSettings, ema: float | None = None) -> RunBuilder:
    """Return a function that builds the fine-tuning runs of a row of the ViT paper's table. `ema` is the decay of
    Polyak averaging, None for no averaging."""

    def build_run(model: ModelConfig, dataset_info: DatasetInfo, options: TrainOptions) -> Run:
        """Fine-tuning of weights at a higher resolution: arXiv:2010.11929, Table 4.

        vitreous train DATA --recipe NAME --init WEIGHTS --lr-grid

        SGD with momentum 0.9, batch size 512, cosine decay, gradients clipped at norm 1, no weight decay. The learning
        rate is that of Google's code unless --lr-grid selects one. Images have 384 pixels, or the nearest multiple of
        the patch size. finetune-imagenet-512 uses 512 pixels (518 for patches of 14) and Polyak averaging with 0.9999,
        as the ImageNet rows of Table 2. Dropout as in Google's code: 0.1 for ViT-L/16, ViT-H/14 and two hybrids. The
        original momentum is bfloat16; here it is float32. For VTAB tasks that depend on orientation, the paper omits
        the flip (--augment.flip 0), and for those that depend on position, the crop (--augment.crop 1 1).
        """
        return make_table4_run(settings, set_dropout(model, MODEL_DROPOUT.get(model.name(), 0.0)), dataset_info, ema)

    return build_run


def augreg_finetune_run_builder(settings: FinetuneSettings) -> RunBuilder:
    """Return a function that builds the fine-tuning runs of a row of AugReg's table."""

    def build_run(model: ModelConfig, dataset_info: DatasetInfo, options: TrainOptions) -> Run:
        """Fine-tuning of AugReg's weights: "How to train your ViT?", arXiv:2106.10270, Table 4.

        vitreous train DATA --recipe NAME --init WEIGHTS --lr-grid

        SGD with momentum 0.9, batch size 512, cosine decay, gradients clipped at norm 1, no weight decay, no dropout,
        384 pixels.
        """
        return make_table4_run(settings, set_dropout(model, 0.0), dataset_info)

    return build_run


def make_bit_hyperrule_run(model: ModelConfig, dataset_info: DatasetInfo, options: TrainOptions) -> Run:
    """BiT-HyperRule: all settings derived from the number of images and their size (arXiv:1912.11370, section 3.3).

    vitreous train DATA --recipe NAME --init WEIGHTS

    500 steps below 20,000 images, 10,000 steps below 500,000 images, otherwise 20,000 steps. MixUp 0.1, except below
    20,000 images. SGD at lr 0.003, divided by ten after 30, 60 and 90 % of the steps; of 500 steps, after 40, 60 and 80
    %. Images of less than 96 x 96 pixels are used at 128 pixels, others at 480 (ResNets smaller than R152x4: 384). BiT
    squashes them to 160 and 512 (448) pixels before a random crop; here a crop covers at least the same share of the
    area.
    """
    steps, warmup = (
        (500, 100)
        if dataset_info.images < 20_000
        else (10_000, 500)
        if dataset_info.images < 500_000
        else (20_000, 500)
    )
    drops = (0.4, 0.6, 0.8) if steps == 500 else (0.3, 0.6, 0.9)
    resize_size, crop_size = get_bit_resize_and_crop_sizes(model.name(), dataset_info)
    return Run(
        **google_run_fields(model, dataset_info, squash=True),
        views=replace(
            INCEPTION_VIEWS,
            crop=((crop_size / resize_size) ** 2, 1.0),
            mixup=0.0 if dataset_info.images < 20_000 else 0.1,
        ),
        optimizer=make_sgd_optimizer(0.003, clip=None),
        schedule=ScheduleConfig(warmup, "steps", milestones=drops),
        batch_size=FINETUNE_BATCH_SIZE,
        epochs=steps * FINETUNE_BATCH_SIZE / dataset_info.images,
    )


def get_bit_resize_and_crop_sizes(model_name: str, dataset_info: DatasetInfo) -> tuple[int, int]:
    """Return BiT's resize and crop sizes in pixels for a model and an image size. For models below BiT-R152x4, see
    arXiv:2010.11929."""
    if dataset_info.size[0] * dataset_info.size[1] < 96 * 96:
        return 160, 128
    return (512, 480) if model_name == "BiT-R152x4" else (448, 384)


def build_table4_recipes(
    prefix: str,
    table: dict[str, FinetuneSettings],
    make: Callable[[FinetuneSettings], RunBuilder],
    source: str,
    models: tuple[str, ...],
) -> tuple[Recipe, ...]:
    """Build a recipe for each row of a fine-tuning table, named `prefix`-ROW."""
    return tuple(
        Recipe(
            name=f"{prefix}-{name}",
            make=make(settings),
            about=settings.about,
            source=f"{source}, Table 4",
            published=PUBLISHED_RESULTS.get(f"{prefix}-{name}", ()),
            data=settings.data,
            models=models,
            image=fixed_image_side(384),
            from_weights=True,
            by_steps=True,
            grid=settings.grid,
            hold_out=settings.hold_out,
        )
        for name, settings in table.items()
    )


VIT_FINETUNE_MODELS = ("ViT-B/16", "ViT-B/32", "ViT-L/16", "ViT-L/32", "ViT-H/14", "R50+ViT-B/16", "R50+ViT-L/32")
VIT_TABLE4_RECIPES = build_table4_recipes(
    "finetune", VIT_TABLE4, vit_finetune_run_builder, "arXiv:2010.11929", VIT_FINETUNE_MODELS
)
FINETUNE_RECIPES = (
    VIT_TABLE4_RECIPES[0],
    replace(
        VIT_TABLE4_RECIPES[0],
        name="finetune-imagenet-512",
        make=vit_finetune_run_builder(VIT_TABLE4["imagenet"], ema=0.9999),
        about="weights to ImageNet-sized data, 512 pixels, averaged",
        source="arXiv:2010.11929, Tables 2 and 4",
        published=list_finetune_results(
            "ImageNet", ("ViT-H/14", "JFT-300M", "88.55 ± 0.04 %"), ("ViT-L/16", "JFT-300M", "87.76 ± 0.03 %")
        ),
        models=("ViT-L/16", "ViT-H/14"),
        image=fixed_image_side(512),
    ),
    *VIT_TABLE4_RECIPES[1:],
    Recipe(
        "bit-hyperrule",
        make_bit_hyperrule_run,
        "weights to any dataset, by its size (BiT)",
        "arXiv:1912.11370, section 3.3",
        published=list_finetune_results(
            "ImageNet", ("BiT-R152x4", "ImageNet-21k", "85.39 %"), ("BiT-R152x4", "JFT-300M", "87.54 %")
        ),
        data="Pets",
        models=("BiT-R50x1", "BiT-R152x4"),
        image=lambda name, dataset_info: get_bit_resize_and_crop_sizes(name, dataset_info)[1],
        from_weights=True,
        by_steps=True,
    ),
)
AUGREG_FINETUNE_MODELS = ("ViT-B/16", "ViT-S/16", "ViT-L/16", "R26+ViT-S/32")
AUGREG_FINETUNE_RECIPES = build_table4_recipes(
    "augreg-finetune", AUGREG_TABLE4, augreg_finetune_run_builder, "arXiv:2106.10270", AUGREG_FINETUNE_MODELS
)
