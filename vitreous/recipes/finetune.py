"""Fine-tuning: the paper's Table 4, AugReg's Table 4, and BiT's rule, all from weights with SGD and a new head of
zeros."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace

from vitreous.models.config import ModelConfig, replace_fields
from vitreous.recipes.options import TrainOptions
from vitreous.recipes.recipe import INCEPTION, DatasetInfo, Make, Published, Recipe, fixed_side, google
from vitreous.training.run import Optimizer, Run, Schedule

BATCH = 512
BIG, RESIDUAL = (0.003, 0.01, 0.03, 0.06), (0.001, 0.003, 0.01, 0.03)  # Table 4's grids
#: models that the paper's code fine-tunes with dropout, and its rate (vit_jax/configs/models.py)
DROPOUT = {"ViT-L/16": 0.1, "ViT-H/14": 0.1, "R50+ViT-B/16": 0.1, "R50+ViT-L/32": 0.1}


@dataclass(frozen=True)
class Row:
    """A line of a fine-tuning table. `steps` of 512 images, `warmup` of them; `lr` where no grid is run; `hold_out`:
    the share of the training images on which the grid is judged."""

    data: str
    steps: int
    warmup: int
    lr: float
    _: KW_ONLY
    grid: tuple[float, ...]
    hold_out: float
    about: str


#: arXiv:2010.11929, Table 4; shares held out by B.1.1; warm-up and default rates of Google's code
TABLE4 = {
    "imagenet": Row(
        "ImageNet",
        20_000,
        warmup=500,
        lr=0.03,
        grid=BIG,
        hold_out=0.01,
        about="weights to ImageNet-sized data, 384 pixels",
    ),
    "cifar": Row(
        "CIFAR-10",
        10_000,
        warmup=500,
        lr=0.03,
        grid=RESIDUAL,
        hold_out=0.02,
        about="weights to CIFAR-10 or CIFAR-100, 384 pixels",
    ),
    "pets": Row(
        "Pets", 500, warmup=100, lr=0.03, grid=RESIDUAL, hold_out=0.1, about="weights to a few thousand photographs"
    ),
    "flowers": Row(
        "Flowers", 500, warmup=100, lr=0.03, grid=RESIDUAL, hold_out=0.1, about="weights to a thousand photographs"
    ),
    "vtab": Row(
        "VTAB",
        2_500,
        warmup=500,
        lr=0.01,
        grid=(0.01,),
        hold_out=0.2,
        about="weights to the 1000 images of a VTAB task",
    ),
}
SHORT, LONG = (0.001, 0.003, 0.01), (0.01, 0.03)
#: arXiv:2106.10270, Table 4; its warm-up for VTAB is not printed: that of rows as long
AUGREG = {
    "imagenet": Row(
        "ImageNet", 20_000, warmup=500, lr=0.03, grid=LONG, hold_out=0.01, about="AugReg weights to ImageNet-sized data"
    ),
    "pets": Row(
        "Pets",
        500,
        warmup=100,
        lr=0.01,
        grid=SHORT,
        hold_out=0.1,
        about="AugReg weights to Pets or KITTI, the short row",
    ),
    "pets-long": Row(
        "Pets",
        2_500,
        warmup=200,
        lr=0.01,
        grid=SHORT,
        hold_out=0.1,
        about="AugReg weights to Pets or KITTI, the long row",
    ),
    "cifar": Row(
        "CIFAR-10",
        2_500,
        warmup=200,
        lr=0.01,
        grid=SHORT,
        hold_out=0.02,
        about="AugReg weights to CIFAR-100 or RESISC45, short",
    ),
    "cifar-long": Row(
        "CIFAR-10",
        10_000,
        warmup=500,
        lr=0.01,
        grid=SHORT,
        hold_out=0.02,
        about="AugReg weights to CIFAR-100 or RESISC45, long",
    ),
    "vtab": Row(
        "VTAB",
        500,
        warmup=100,
        lr=0.01,
        grid=RESIDUAL,
        hold_out=0.2,
        about="AugReg weights to a VTAB task, the short row",
    ),
    "vtab-long": Row(
        "VTAB",
        2_500,
        warmup=200,
        lr=0.01,
        grid=RESIDUAL,
        hold_out=0.2,
        about="AugReg weights to a VTAB task, the long row",
    ),
}


def published(data: str, *figures: tuple[str, str, str]) -> tuple[Published, ...]:
    """(model, what it was pre-trained on, accuracy on `data`)."""
    return tuple((model, f"{before}, fine-tuned on {data}", figure) for model, before, figure in figures)


def vits(data: str, base: str, large: str) -> tuple[Published, ...]:
    """Table 5: ViT-B/16 from ImageNet-21k and ViT-L/16 from JFT-300M."""
    return published(data, ("ViT-B/16", "ImageNet-21k", base), ("ViT-L/16", "JFT-300M", large))


#: arXiv:2010.11929, Tables 2 (VTAB) and 5; arXiv:2106.10270
FIGURES = {
    "finetune-imagenet": vits("ImageNet", "83.97 %", "87.12 %"),
    "finetune-cifar": vits("CIFAR-10", "98.95 %", "99.38 %") + vits("CIFAR-100", "91.67 %", "94.04 %"),
    "finetune-pets": vits("Pets", "94.43 %", "97.11 %"),
    "finetune-flowers": vits("Flowers", "99.38 %", "99.56 %"),
    "finetune-vtab": published(
        "VTAB (19 tasks)", ("ViT-L/16", "ImageNet-21k", "72.72 %"), ("ViT-H/14", "JFT-300M", "77.63 %")
    ),
    "augreg-finetune-imagenet": published(
        "ImageNet", ("ViT-L/16", "ImageNet-21k", "85.59 %"), ("ViT-B/16", "ImageNet-21k", "85.49 %")
    ),
}


def sgd(lr: float, clip: float | None = 1.0) -> Optimizer:
    """SGD with momentum 0.9 and no decay."""
    return Optimizer("sgd", lr=lr, momentum=0.9, weight_decay=0.0, clip=clip)


def dropped(model: ModelConfig, dropout: float) -> ModelConfig:
    """A ViT with dropout and no stochastic depth, whatever the run that made the weights had. A ResNet stays."""
    return replace_fields(model, {"regularization.dropout": dropout, "regularization.drop_path": 0.0})


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
        ema_warmup=False,
    )


def paper(row: Row, ema: float | None = None) -> Make:
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
        return tuned(row, dropped(model, DROPOUT.get(model.name(), 0.0)), facts, ema)

    return make


def augreg(row: Row) -> Make:
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
    tenth after 30, 60 and 90 % of the steps, of 500 steps after 40, 60 and 80 %. Pictures of less than 96 x 96 pixels
    are shown at 128, others at 480 (448 for ResNets smaller than R152x4: 384). BiT squashes them to 160, or 512, and
    cuts that out; here a crop takes at least as large a share of the area.
    """
    steps, warmup = (500, 100) if facts.images < 20_000 else (10_000, 500) if facts.images < 500_000 else (20_000, 500)
    drops = (0.4, 0.6, 0.8) if steps == 500 else (0.3, 0.6, 0.9)
    whole, cut = sides(model.name(), facts)
    return Run(
        **google(model, facts, squash=True),
        views=replace(INCEPTION, crop=((cut / whole) ** 2, 1.0), mixup=0.0 if facts.images < 20_000 else 0.1),
        optimizer=sgd(0.003, clip=None),
        schedule=Schedule(warmup, "steps", milestones=drops),
        batch_size=BATCH,
        epochs=steps * BATCH / facts.images,
    )


def sides(name: str, facts: DatasetInfo) -> tuple[int, int]:
    """Pixels that BiT scales a picture to, and that it cuts out; for smaller ResNets as arXiv:2010.11929 has it."""
    if facts.size[0] * facts.size[1] < 96 * 96:
        return 160, 128
    return (512, 480) if name == "BiT-R152x4" else (448, 384)


def recipes(
    prefix: str, table: dict[str, Row], make: Callable[[Row], Make], source: str, models: tuple[str, ...]
) -> tuple[Recipe, ...]:
    """The rows of a table as recipes, their names after `prefix`."""
    return tuple(
        Recipe(
            name=f"{prefix}-{name}",
            make=make(row),
            about=row.about,
            source=f"{source}, Table 4",
            published=FIGURES.get(f"{prefix}-{name}", ()),
            data=row.data,
            models=models,
            image=fixed_side(384),
            from_weights=True,
            by_steps=True,
            grid=row.grid,
            hold_out=row.hold_out,
        )
        for name, row in table.items()
    )


MODELS = ("ViT-B/16", "ViT-B/32", "ViT-L/16", "ViT-L/32", "ViT-H/14", "R50+ViT-B/16", "R50+ViT-L/32")
ROWS = recipes("finetune", TABLE4, paper, "arXiv:2010.11929", MODELS)
FINETUNING = (
    ROWS[0],
    replace(
        ROWS[0],
        name="finetune-imagenet-512",
        make=paper(TABLE4["imagenet"], ema=0.9999),
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
        published=published(
            "ImageNet", ("BiT-R152x4", "ImageNet-21k", "85.39 %"), ("BiT-R152x4", "JFT-300M", "87.54 %")
        ),
        data="Pets",
        models=("BiT-R50x1", "BiT-R152x4"),
        image=lambda name, facts: sides(name, facts)[1],
        from_weights=True,
        by_steps=True,
    ),
)
AUGREG_MODELS = ("ViT-B/16", "ViT-S/16", "ViT-L/16", "R26+ViT-S/32")
AUGREG_FINETUNING = recipes("augreg-finetune", AUGREG, augreg, "arXiv:2106.10270", AUGREG_MODELS)
