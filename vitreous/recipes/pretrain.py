"""The paper's pre-training: Table 3 for ViTs and hybrids, Table 7 and BiT's own numbers for ResNets."""

from __future__ import annotations

from vitreous.models.config import ModelConfig
from vitreous.objectives.supervised import SupervisedConfig
from vitreous.recipes.options import TrainOptions
from vitreous.recipes.recipe import INCEPTION, DatasetInfo, Make, Published, as_paper, google, pretraining, sigmoid_bias
from vitreous.training.run import Optimizer, Run, Schedule

BATCH, WARMUP = 4096, 10_000
VITS = ("ViT-B/16", "ViT-B/32", "ViT-L/16", "ViT-L/32")

#: model -> epochs, learning rate on JFT-300M; the longer run where Table 3 has two
JFT = {
    "ViT-B/16": (7, 8e-4),
    "ViT-B/32": (7, 8e-4),
    "ViT-L/32": (7, 6e-4),
    "ViT-L/16": (14, 4e-4),
    "ViT-H/14": (14, 3e-4),
    "R50+ViT-B/16": (7, 8e-4),
    "R50+ViT-B/32": (7, 8e-4),
    "R50+ViT-L/32": (7, 2e-4),
    "R50+ViT-L/16": (14, 4e-4),
}
#: the same for ResNets
JFT_RESNETS = {
    "BiT-R50x1": (7, 1e-3),
    "BiT-R50x2": (7, 1e-3),
    "BiT-R101x1": (7, 8e-4),
    "BiT-R152x1": (7, 6e-4),
    "BiT-R152x2": (7, 6e-4),
}
#: data set -> epochs, and after how many of them BiT divides the learning rate by ten
STAIRS = {"JFT-300M": (40, (10, 23, 30, 37)), "ImageNet": (90, (30, 60, 80)), "ImageNet-21k": (90, (30, 60, 80))}


def adam(lr: float, decay: float, clip: float | None = None) -> Optimizer:
    """Adam with decoupled decay on every parameter, norms and biases too (B.1)."""
    return Optimizer("adamw", lr=lr, betas=(0.9, 0.999), weight_decay=decay, decay_on="all", clip=clip)


def imagenet(model: ModelConfig, facts: DatasetInfo, options: TrainOptions) -> Run:
    """ViT-* on ImageNet from scratch: arXiv:2010.11929, Table 3, last row.

    vitreous train DATA --recipe NAME --model ViT-B/16

    Batch 4096, 224 pixels, gradients clipped at norm 1 as for ImageNet alone; decay on every parameter. The paper does
    not name the loss: softmax cross-entropy here. It tuned label smoothing too and does not print the value: none here.
    """
    return Run(
        **google(as_paper(model, options, 0.1), facts),
        views=INCEPTION,
        optimizer=adam(3e-3, 0.3, clip=1.0),
        schedule=Schedule(WARMUP, "cosine"),
        batch_size=BATCH,
        epochs=300,
    )


def imagenet21k(model: ModelConfig, facts: DatasetInfo, options: TrainOptions) -> Run:
    """ViT-B and ViT-L on ImageNet-21k: arXiv:2010.11929, Table 3.

    vitreous train DATA --recipe NAME --model ViT-L/16

    Sigmoid loss, as BiT and "Scaling Vision Transformers" say of the paper, with the head's biases at -ln K. For ViT-L
    the table has 30 epochs too: --epochs 30. ViT-H/14 was trained on it (Table 5) with numbers that are not printed.
    """
    return Run(
        **google(as_paper(model, options, 0.1), facts),
        views=INCEPTION,
        optimizer=adam(1e-3, 0.03),
        schedule=Schedule(WARMUP, "linear"),
        objective=SupervisedConfig(loss="sigmoid", head_bias=sigmoid_bias(model.classes)),
        batch_size=BATCH,
        epochs=90,
    )


def jft(model: ModelConfig, facts: DatasetInfo, options: TrainOptions) -> Run:
    """ViTs and hybrids on JFT-300M, images with several labels: arXiv:2010.11929, Table 3.

    vitreous train DATA --recipe NAME --model ViT-H/14

    Epochs and learning rate are those of the model's row; a model without a row takes ViT-B's. For ViT-L/16 and
    R50+ViT-L/16 the table has 7 epochs too: --epochs 7.
    """
    return by_row(JFT.get(model.name(), JFT["ViT-B/16"]), as_paper(model, options), facts)


def jft_resnet(model: ModelConfig, facts: DatasetInfo, options: TrainOptions) -> Run:
    """The ResNets that the paper compares with, on JFT-300M with Adam: arXiv:2010.11929, Tables 3 and 7.

    vitreous train DATA --recipe NAME --model BiT-R152x2

    A ResNet without a row takes that of R50x1.
    """
    return by_row(JFT_RESNETS.get(model.name(), JFT_RESNETS["BiT-R50x1"]), model, facts)


def by_row(row: tuple[int, float], model: ModelConfig, facts: DatasetInfo) -> Run:
    """Table 3's run on JFT-300M for (epochs, learning rate)."""
    return Run(
        **google(model, facts),
        views=INCEPTION,
        optimizer=adam(row[1], 0.1),
        schedule=Schedule(WARMUP, "linear"),
        objective=SupervisedConfig(loss="sigmoid", head_bias=sigmoid_bias(model.classes)),
        batch_size=BATCH,
        epochs=row[0],
    )


def sgd(data: str, epochs: int | None = None) -> Make:
    """BiT's pre-training on a data set, or as many epochs of it on the same stairs."""
    whole, drops = STAIRS[data]
    multilabel = data != "ImageNet"

    def make(model: ModelConfig, facts: DatasetInfo, options: TrainOptions) -> Run:
        """BiT's ResNets with SGD: lr 0.03 x batch / 256, divided by ten three or four times (arXiv:1912.11370).

        vitreous train DATA --recipe NAME --model BiT-R50x1

        On JFT-300M, 7 epochs for Table 7 of arXiv:2010.11929; BiT itself took --epochs 40, the stairs at the same
        shares. Sigmoid loss but for ImageNet. Decay is beside the gradient here; where it is part of it, momentum 0.9
        makes ten times as much of it.
        """
        return Run(
            **google(model, facts),
            views=INCEPTION,
            optimizer=Optimizer(
                "sgd", lr=0.03 * BATCH / 256, momentum=0.9, weight_decay=1e-4, decay_on="all", clip=None
            ),
            schedule=Schedule(5_000, "steps", milestones=tuple(drop / whole for drop in drops)),
            objective=SupervisedConfig(
                loss="sigmoid" if multilabel else "softmax",
                head_bias=sigmoid_bias(model.classes) if multilabel else 0.0,
            ),
            batch_size=BATCH,
            epochs=epochs or whole,
        )

    return make


def table5(data: str, **figures: float) -> tuple[Published, ...]:
    """ImageNet top-1 after fine-tuning at 384 pixels, by model: B16=77.91."""
    after = f"{data}, fine-tuned on ImageNet at 384 pixels"
    return tuple((f"ViT-{key[0]}/{key[1:]}", after, f"{value:.2f} %") for key, value in figures.items())


def table6(**figures: float) -> tuple[Published, ...]:
    """The same from JFT-300M, for hybrids of R50."""
    return tuple((f"R50+{model}", after, figure) for model, after, figure in table5("JFT-300M", **figures))


def table7(r50: float, r152: float) -> tuple[Published, ...]:
    """ImageNet top-1 of the two ResNets of Table 7."""
    after = "JFT-300M for 7 epochs, fine-tuned on ImageNet"
    return (("BiT-R50x1", after, f"{r50} %"), ("BiT-R152x2", after, f"{r152} %"))


VIT, RESNET = "arXiv:2010.11929, Table 3", "arXiv:1912.11370"
BITS = ("BiT-R50x1", "BiT-R152x4")
PRETRAINING = (
    pretraining(
        "vit-imagenet",
        imagenet,
        "ViT from scratch on ImageNet",
        VIT,
        table5("ImageNet", B16=77.91, B32=73.38, L16=76.53, L32=71.16),
        models=VITS,
    ),
    pretraining(
        "vit-imagenet21k",
        imagenet21k,
        "ViT on ImageNet-21k",
        VIT,
        table5("ImageNet-21k", B16=83.97, B32=81.28, L16=85.15, L32=80.99),
        data="ImageNet-21k",
        models=VITS,
    ),
    pretraining(
        "vit-jft",
        jft,
        "ViT and hybrids, several labels an image",
        VIT,
        table5("JFT-300M", B16=84.15, B32=80.73, L16=87.12, L32=84.37, H14=88.04)
        + table6(B16=85.58, B32=84.90, L16=87.12, L32=85.68),
        data="JFT-300M",
        models=tuple(JFT),
    ),
    pretraining(
        "bit-jft-adam",
        jft_resnet,
        "ResNet, several labels an image, Adam",
        "arXiv:2010.11929, Tables 3 and 7",
        table7(77.54, 84.97),
        data="JFT-300M",
        models=tuple(JFT_RESNETS),
    ),
    pretraining(
        "bit-jft-sgd",
        sgd("JFT-300M", 7),
        "ResNet, several labels an image, SGD",
        "arXiv:2010.11929, Table 7",
        table7(78.24, 84.37),
        data="JFT-300M",
        models=("BiT-R50x1", "BiT-R152x2"),
    ),
    pretraining(
        "bit-imagenet",
        sgd("ImageNet"),
        "ResNet from scratch on ImageNet (BiT-S)",
        RESNET,
        (("BiT-R152x4", "ImageNet, fine-tuned on it", "81.30 %"),),
        models=BITS,
    ),
    pretraining(
        "bit-imagenet21k",
        sgd("ImageNet-21k"),
        "ResNet on ImageNet-21k (BiT-M)",
        RESNET,
        (("BiT-R152x4", "ImageNet-21k, fine-tuned on ImageNet", "85.39 %"),),
        data="ImageNet-21k",
        models=BITS,
    ),
)
