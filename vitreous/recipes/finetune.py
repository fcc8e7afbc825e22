"""Fine-tuning: the paper's Table 4, AugReg's Table 4, and BiT's rule, all from weights with SGD and a new head of
zeros."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from vitreous.models.config import ModelConfig, replace_fields
from vitreous.models.names import name_of
from vitreous.recipes.options import TrainOptions
from vitreous.recipes.recipe import INCEPTION, DatasetInfo, Published, Recipe, fixed_side, google
from vitreous.training.run import Optimizer, Run, Schedule

BATCH = 512
BIG, RESIDUAL = (0.003, 0.01, 0.03, 0.06), (0.001, 0.003, 0.01, 0.03)  # Table 4's grids
#: models that the paper's code fine-tunes with dropout, and its rate (vit_jax/configs/models.py)
DROPOUT = {"ViT-L/16": 0.1, "ViT-H/14": 0.1, "R50+ViT-B/16": 0.1, "R50+ViT-L/32": 0.1}


@dataclass(frozen=True)
class Row:
    """A line of a fine-tuning table. `steps` of 512 images, `warmup` of them; `lr` where no grid is run."""

    name: str
    about: str
    data: str
    steps: int
    warmup: int
    lr: float
    grid: tuple[float, ...]
    hold_out: float
    published: tuple[Published, ...] = ()


def published(data: str, *figures: tuple[str, str, str]) -> tuple[Published, ...]:
    """(model, what it was pre-trained on, accuracy on `data`)."""
    return tuple((model, f"{before}, fine-tuned on {data}", figure) for model, before, figure in figures)


#: arXiv:2010.11929, Table 4; shares held out by B.1.1; figures of Tables 2 (VTAB) and 5; warm-up and default rates of
#: Google's code
TABLE4 = (
    Row(
        "finetune-imagenet",
        "weights to ImageNet-sized data, 384 pixels",
        "ImageNet",
        20_000,
        500,
        0.03,
        BIG,
        0.01,
        published("ImageNet", ("ViT-B/16", "ImageNet-21k", "83.97 %"), ("ViT-L/16", "JFT-300M", "87.12 %")),
    ),
    Row(
        "finetune-cifar",
        "weights to CIFAR-10 or CIFAR-100, 384 pixels",
        "CIFAR-10",
        10_000,
        500,
        0.03,
        RESIDUAL,
        0.02,
        published("CIFAR-10", ("ViT-B/16", "ImageNet-21k", "98.95 %"), ("ViT-L/16", "JFT-300M", "99.38 %"))
        + published("CIFAR-100", ("ViT-B/16", "ImageNet-21k", "91.67 %"), ("ViT-L/16", "JFT-300M", "94.04 %")),
    ),
    Row(
        "finetune-pets",
        "weights to a few thousand photographs",
        "Pets",
        500,
        100,
        0.03,
        RESIDUAL,
        0.1,
        published("Pets", ("ViT-B/16", "ImageNet-21k", "94.43 %"), ("ViT-L/16", "JFT-300M", "97.11 %")),
    ),
    Row(
        "finetune-flowers",
        "weights to a thousand photographs",
        "Flowers",
        500,
        100,
        0.03,
        RESIDUAL,
        0.1,
        published("Flowers", ("ViT-B/16", "ImageNet-21k", "99.38 %"), ("ViT-L/16", "JFT-300M", "99.56 %")),
    ),
    Row(
        "finetune-vtab",
        "weights to the 1000 images of a VTAB task",
        "VTAB",
        2_500,
        500,
        0.01,
        (0.01,),
        0.2,
        published("VTAB (19 tasks)", ("ViT-L/16", "ImageNet-21k", "72.72 %"), ("ViT-H/14", "JFT-300M", "77.63 %")),
    ),
)
SHORT, LONG = (0.001, 0.003, 0.01), (0.01, 0.03)
#: arXiv:2106.10270, Table 4; its warm-up for VTAB is not printed: that of rows as long
AUGREG = (
    Row(
        "augreg-finetune-imagenet",
        "AugReg weights to ImageNet-sized data",
        "ImageNet",
        20_000,
        500,
        0.03,
        LONG,
        0.01,
        published("ImageNet", ("ViT-L/16", "ImageNet-21k", "85.59 %"), ("ViT-B/16", "ImageNet-21k", "85.49 %")),
    ),
    Row("augreg-finetune-pets", "AugReg weights to Pets or KITTI, the short row", "Pets", 500, 100, 0.01, SHORT, 0.1),
    Row(
        "augreg-finetune-pets-long",
        "AugReg weights to Pets or KITTI, the long row",
        "Pets",
        2_500,
        200,
        0.01,
        SHORT,
        0.1,
    ),
    Row(
        "augreg-finetune-cifar",
        "AugReg weights to CIFAR-100 or RESISC45, short",
        "CIFAR-10",
        2_500,
        200,
        0.01,
        SHORT,
        0.02,
    ),
    Row(
        "augreg-finetune-cifar-long",
        "AugReg weights to CIFAR-100 or RESISC45, long",
        "CIFAR-10",
        10_000,
        500,
        0.01,
        SHORT,
        0.02,
    ),
    Row("augreg-finetune-vtab", "AugReg weights to a VTAB task, the short row", "VTAB", 500, 100, 0.01, RESIDUAL, 0.2),
    Row(
        "augreg-finetune-vtab-long",
        "AugReg weights to a VTAB task, the long row",
        "VTAB",
        2_500,
        200,
        0.01,
        RESIDUAL,
        0.2,
    ),
)


def sgd(lr: float, clip: float | None = 1.0) -> Optimizer:
    """SGD with momentum 0.9 and no decay."""
    return Optimizer("sgd", lr=lr, momentum=0.9, weight_decay=0.0, clip=clip)


def dropped(model: ModelConfig, dropout: float) -> ModelConfig:
    """A ViT with dropout and no stochastic depth, whatever the run that made the weights had. A ResNet stays."""
    return replace_fields(model, {"dropout": dropout, "drop_path": 0.0})


def tuned(row: Row, model: ModelConfig, facts: DatasetInfo, ema: float | None = None) -> Run:
    """The run of a row."""
    return Run(
        **google(model, facts, squash=True),
        views=INCEPTION,
        optimizer=sgd(row.lr),
        schedule=Schedule(row.warmup, "cosine"),
        batch_size=BATCH,
        epochs=row.steps * BATCH / facts.images,
        ema=ema,
    )


def paper(row: Row, ema: float | None = None) -> Callable[[ModelConfig, DatasetInfo, TrainOptions], Run]:
    """A row of the paper's table, with the decay of Polyak's average if there is one."""

    def make(model: ModelConfig, facts: DatasetInfo, options: TrainOptions) -> Run:
        """From weights, at a higher resolution: arXiv:2010.11929, Table 4.

        vitreous train DATA --recipe NAME --init WEIGHTS --lr-grid

        SGD with momentum 0.9, 512 images a step, cosine, gradients clipped at norm 1, no decay; the learning rate is
        that of Google's code until --lr-grid chooses one. 384 pixels, or the multiple of the patch nearest;
        finetune-imagenet-512 takes 512 (518 for patches of 14) and Polyak's average with 0.9999, as Table 2's ImageNet
        rows do. Dropout as in Google's code: 0.1 for ViT-L/16, ViT-H/14 and two hybrids. Its momentum is kept in
        bfloat16, here in float32. Where a VTAB task asks how things lie, the paper leaves out the flip (--augment.flip
        0) and, where it asks for places, the crop (--augment.crop 1 1).
        """
        return tuned(row, dropped(model, DROPOUT.get(name_of(model), 0.0)), facts, ema)

    return make


def augreg(row: Row) -> Callable[[ModelConfig, DatasetInfo, TrainOptions], Run]:
    """A row of AugReg's table."""

    def make(model: ModelConfig, facts: DatasetInfo, options: TrainOptions) -> Run:
        """From AugReg's weights: "How to train your ViT?", arXiv:2106.10270, Table 4.

        vitreous train DATA --recipe NAME --init WEIGHTS --lr-grid

        SGD with momentum 0.9, 512 images a step, cosine, gradients clipped at norm 1, no decay, no dropout, 384 pixels.
        """
        return tuned(row, dropped(model, 0.0), facts)

    return make


def hyperrule(model: ModelConfig, facts: DatasetInfo, options: TrainOptions) -> Run:
    """BiT-HyperRule: everything from the number of images and their size (arXiv:1912.11370, section 3.3).

    vitreous train DATA --recipe NAME --init WEIGHTS

    Below 20,000 images 500 steps, below 500,000 10,000, else 20,000; MixUp 0.1 but for the smallest; SGD, lr 0.003, a
    tenth after 30, 60 and 90 % of the steps. Pictures of less than 96 x 96 pixels are shown at 128, others at 480 (448
    for ResNets smaller than R152x4: 384). BiT squashes them to 160, or 512, and cuts that out; here a crop takes at
    least as large a share of the area.
    """
    steps, warmup = (500, 100) if facts.images < 20_000 else (10_000, 500) if facts.images < 500_000 else (20_000, 500)
    whole, cut = sides(name_of(model), facts)
    return Run(
        **google(model, facts, squash=True),
        views=replace(INCEPTION, crop=((cut / whole) ** 2, 1.0), mixup=0.0 if facts.images < 20_000 else 0.1),
        optimizer=sgd(0.003, clip=None),
        schedule=Schedule(warmup, "steps", milestones=(0.3, 0.6, 0.9)),
        batch_size=BATCH,
        epochs=steps * BATCH / facts.images,
    )


def sides(name: str, facts: DatasetInfo) -> tuple[int, int]:
    """Pixels that BiT scales a picture to, and that it cuts out; for smaller ResNets as arXiv:2010.11929 has it."""
    if facts.size[0] * facts.size[1] < 96 * 96:
        return 160, 128
    return (512, 480) if name == "BiT-R152x4" else (448, 384)


def recipe(
    row: Row, make: Callable[[ModelConfig, DatasetInfo, TrainOptions], Run], source: str, models: tuple[str, ...]
) -> Recipe:
    """A row as a recipe."""
    return Recipe(
        row.name,
        make,
        row.about,
        source,
        "linear",
        row.published,
        data=row.data,
        models=models,
        image=fixed_side(384),
        from_weights=True,
        by_steps=True,
        grid=row.grid,
        hold_out=row.hold_out,
    )


PAPER, AUGREG_TABLE = "arXiv:2010.11929, Table 4", "arXiv:2106.10270, Table 4"
MODELS = ("ViT-B/16", "ViT-B/32", "ViT-L/16", "ViT-L/32", "ViT-H/14", "R50+ViT-B/16", "R50+ViT-L/32")
ROWS = [recipe(row, paper(row), PAPER, MODELS) for row in TABLE4]
FINETUNING = (
    ROWS[0],
    replace(
        ROWS[0],
        name="finetune-imagenet-512",
        make=paper(TABLE4[0], ema=0.9999),
        about="weights to ImageNet-sized data, 512 pixels, averaged",
        source="arXiv:2010.11929, Tables 2 and 4",
        published=published(
            "ImageNet", ("ViT-H/14", "JFT-300M", "88.55 ± 0.04 %"), ("ViT-L/16", "JFT-300M", "87.76 ± 0.03 %")
        ),
        models=("ViT-L/16", "ViT-H/14"),
        image=fixed_side(512),
    ),
    *ROWS[1:],
    Recipe(
        "bit-hyperrule",
        hyperrule,
        "weights to anything, by its size (BiT)",
        "arXiv:1912.11370, section 3.3",
        "linear",
        published("ImageNet", ("BiT-R152x4", "ImageNet-21k", "85.39 %"), ("BiT-R152x4", "JFT-300M", "87.54 %")),
        data="Pets",
        models=("BiT-R50x1", "BiT-R152x4"),
        image=lambda name, facts: sides(name, facts)[1],
        from_weights=True,
        by_steps=True,
    ),
)
AUGREG_FINETUNING = tuple(
    recipe(row, augreg(row), AUGREG_TABLE, ("ViT-B/16", "ViT-S/16", "ViT-L/16", "R26+ViT-S/32")) for row in AUGREG
)
