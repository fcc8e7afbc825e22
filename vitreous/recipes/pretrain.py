"""Pre-training recipes of the ViT paper (arXiv:2010.11929): Table 3 for ViTs and hybrids, Table 7 and BiT's
hyperparameters for ResNets."""

from __future__ import annotations

from vitreous.models.config import ModelConfig
from vitreous.objectives.supervised import SupervisedConfig
from vitreous.recipes.options import TrainOptions
from vitreous.recipes.recipe import (
    INCEPTION_VIEWS,
    DatasetInfo,
    PublishedResult,
    RunBuilder,
    apply_google_settings,
    build_pretraining_recipe,
    google_run_fields,
    sigmoid_head_bias,
)
from vitreous.training.run import OptimizerConfig, Run, ScheduleConfig

PRETRAIN_BATCH_SIZE, PRETRAIN_WARMUP_STEPS = 4096, 10_000
VIT_MODELS = ("ViT-B/16", "ViT-B/32", "ViT-L/16", "ViT-L/32")

#: ViT or hybrid -> epochs and learning rate on JFT-300M; if Table 3 has two runs, the longer one
JFT_HYPERPARAMETERS = {
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
#: ResNet -> epochs and learning rate on JFT-300M
JFT_RESNET_HYPERPARAMETERS = {
    "BiT-R50x1": (7, 1e-3),
    "BiT-R50x2": (7, 1e-3),
    "BiT-R101x1": (7, 8e-4),
    "BiT-R152x1": (7, 6e-4),
    "BiT-R152x2": (7, 6e-4),
}
#: dataset -> epochs, and the epochs after which BiT divides the learning rate by ten
BIT_SCHEDULES = {"JFT-300M": (40, (10, 23, 30, 37)), "ImageNet": (90, (30, 60, 80)), "ImageNet-21k": (90, (30, 60, 80))}


def make_adam_optimizer(lr: float, decay: float, clip: float | None = None) -> OptimizerConfig:
    """Return Adam with decoupled weight decay of every parameter, including norms and biases (arXiv:2010.11929,
    B.1)."""
    return OptimizerConfig("adamw", lr=lr, betas=(0.9, 0.999), weight_decay=decay, decay_on="all", clip=clip)


def make_vit_imagenet_run(model: ModelConfig, dataset_info: DatasetInfo, options: TrainOptions) -> Run:
    """ViTs on ImageNet from scratch: arXiv:2010.11929, Table 3, last row.

    vitreous train DATA --recipe NAME --model ViT-B/16

    Batch size 4096, 224 pixels, gradients clipped at norm 1 (only for ImageNet), weight decay on every parameter. The
    paper does not specify the loss; here it is softmax cross-entropy. It also tuned label smoothing, but does not
    specify the value; here there is none.
    """
    return Run(
        **google_run_fields(apply_google_settings(model, options, 0.1), dataset_info),
        views=INCEPTION_VIEWS,
        optimizer=make_adam_optimizer(3e-3, 0.3, clip=1.0),
        schedule=ScheduleConfig(PRETRAIN_WARMUP_STEPS, "cosine"),
        batch_size=PRETRAIN_BATCH_SIZE,
        epochs=300,
    )


def make_vit_imagenet21k_run(model: ModelConfig, dataset_info: DatasetInfo, options: TrainOptions) -> Run:
    """ViT-B and ViT-L on ImageNet-21k: arXiv:2010.11929, Table 3.

    vitreous train DATA --recipe NAME --model ViT-L/16

    Sigmoid loss, as in BiT and "Scaling Vision Transformers", with head biases at -ln K for K classes. The 30-epoch run
    of ViT-L: --epochs 30. ViT-H/14 was trained on it too (Table 5), with unpublished hyperparameters.
    """
    return Run(
        **google_run_fields(apply_google_settings(model, options, 0.1), dataset_info),
        views=INCEPTION_VIEWS,
        optimizer=make_adam_optimizer(1e-3, 0.03),
        schedule=ScheduleConfig(PRETRAIN_WARMUP_STEPS, "linear"),
        objective=SupervisedConfig(loss="sigmoid", head_bias=sigmoid_head_bias(model.classes)),
        batch_size=PRETRAIN_BATCH_SIZE,
        epochs=90,
    )


def make_vit_jft_run(model: ModelConfig, dataset_info: DatasetInfo, options: TrainOptions) -> Run:
    """ViTs and hybrids on JFT-300M, whose images are multi-label: arXiv:2010.11929, Table 3.

    vitreous train DATA --recipe NAME --model ViT-H/14

    Epochs and learning rate are those of the model's row of the table. A model without a row uses those of ViT-B/16.
    The 7-epoch run of ViT-L/16 and R50+ViT-L/16: --epochs 7.
    """
    return make_jft_run(
        JFT_HYPERPARAMETERS.get(model.name(), JFT_HYPERPARAMETERS["ViT-B/16"]),
        apply_google_settings(model, options),
        dataset_info,
    )


def make_bit_jft_adam_run(model: ModelConfig, dataset_info: DatasetInfo, options: TrainOptions) -> Run:
    """ResNets on JFT-300M with Adam, as the ViT paper's baseline: arXiv:2010.11929, Tables 3 and 7.

    vitreous train DATA --recipe NAME --model BiT-R152x2

    A ResNet without a row in the tables uses the settings of R50x1.
    """
    return make_jft_run(
        JFT_RESNET_HYPERPARAMETERS.get(model.name(), JFT_RESNET_HYPERPARAMETERS["BiT-R50x1"]), model, dataset_info
    )


def make_jft_run(epochs_and_lr: tuple[int, float], model: ModelConfig, dataset_info: DatasetInfo) -> Run:
    """Build a run of the ViT paper's Table 3 on JFT-300M from (epochs, learning rate)."""
    return Run(
        **google_run_fields(model, dataset_info),
        views=INCEPTION_VIEWS,
        optimizer=make_adam_optimizer(epochs_and_lr[1], 0.1),
        schedule=ScheduleConfig(PRETRAIN_WARMUP_STEPS, "linear"),
        objective=SupervisedConfig(loss="sigmoid", head_bias=sigmoid_head_bias(model.classes)),
        batch_size=PRETRAIN_BATCH_SIZE,
        epochs=epochs_and_lr[0],
    )


def bit_sgd_run_builder(data: str, epochs: int | None = None) -> RunBuilder:
    """Return a function that builds BiT's pre-training with SGD on a dataset. With another number of `epochs`, the
    learning rate drops at the same fractions of the run."""
    default_epochs, drops = BIT_SCHEDULES[data]
    multilabel = data != "ImageNet"

    def build_run(model: ModelConfig, dataset_info: DatasetInfo, options: TrainOptions) -> Run:
        """BiT's ResNets with SGD: lr 0.03 x batch / 256, divided by ten three or four times (arXiv:1912.11370).

        vitreous train DATA --recipe NAME --model BiT-R50x1

        On JFT-300M, 7 epochs as in Table 7 of arXiv:2010.11929; BiT used --epochs 40, with drops at the same fractions
        of the run. Sigmoid loss except for ImageNet. Weight decay is decoupled here. In the original it is part of the
        gradient, where momentum 0.9 makes it ten times as strong.
        """
        return Run(
            **google_run_fields(model, dataset_info),
            views=INCEPTION_VIEWS,
            optimizer=OptimizerConfig(
                "sgd", lr=0.03 * PRETRAIN_BATCH_SIZE / 256, momentum=0.9, weight_decay=1e-4, decay_on="all", clip=None
            ),
            schedule=ScheduleConfig(5_000, "steps", milestones=tuple(drop / default_epochs for drop in drops)),
            objective=SupervisedConfig(
                loss="sigmoid" if multilabel else "softmax",
                head_bias=sigmoid_head_bias(model.classes) if multilabel else 0.0,
            ),
            batch_size=PRETRAIN_BATCH_SIZE,
            epochs=epochs or default_epochs,
        )

    return build_run


def list_table5_results(data: str, **accuracies: float) -> tuple[PublishedResult, ...]:
    """List the ImageNet top-1 of the ViT paper's Table 5, fine-tuned at 384 pixels, by abbreviated model name:
    B16=77.91 for ViT-B/16."""
    setting = f"{data}, fine-tuned on ImageNet at 384 pixels"
    return tuple((f"ViT-{key[0]}/{key[1:]}", setting, f"{value:.2f} %") for key, value in accuracies.items())


def list_table6_results(**accuracies: float) -> tuple[PublishedResult, ...]:
    """List the ImageNet top-1 of the ViT paper's Table 6, for hybrids of R50 pre-trained on JFT-300M, by abbreviated
    model name."""
    return tuple(
        (f"R50+{model}", setting, accuracy)
        for model, setting, accuracy in list_table5_results("JFT-300M", **accuracies)
    )


def list_table7_results(r50: float, r152: float) -> tuple[PublishedResult, ...]:
    """List the ImageNet top-1 of the two ResNets of the ViT paper's Table 7."""
    setting = "JFT-300M for 7 epochs, fine-tuned on ImageNet"
    return (("BiT-R50x1", setting, f"{r50} %"), ("BiT-R152x2", setting, f"{r152} %"))


VIT_PAPER, BIT_PAPER = "arXiv:2010.11929, Table 3", "arXiv:1912.11370"
BIT_MODELS = ("BiT-R50x1", "BiT-R152x4")
PRETRAIN_RECIPES = (
    build_pretraining_recipe(
        "vit-imagenet",
        make_vit_imagenet_run,
        "ViT from scratch on ImageNet",
        VIT_PAPER,
        list_table5_results("ImageNet", B16=77.91, B32=73.38, L16=76.53, L32=71.16),
        models=VIT_MODELS,
    ),
    build_pretraining_recipe(
        "vit-imagenet21k",
        make_vit_imagenet21k_run,
        "ViT on ImageNet-21k",
        VIT_PAPER,
        list_table5_results("ImageNet-21k", B16=83.97, B32=81.28, L16=85.15, L32=80.99),
        data="ImageNet-21k",
        models=VIT_MODELS,
    ),
    build_pretraining_recipe(
        "vit-jft",
        make_vit_jft_run,
        "ViT and hybrids, multi-label",
        VIT_PAPER,
        list_table5_results("JFT-300M", B16=84.15, B32=80.73, L16=87.12, L32=84.37, H14=88.04)
        + list_table6_results(B16=85.58, B32=84.90, L16=87.12, L32=85.68),
        data="JFT-300M",
        models=tuple(JFT_HYPERPARAMETERS),
    ),
    build_pretraining_recipe(
        "bit-jft-adam",
        make_bit_jft_adam_run,
        "ResNet, multi-label, Adam",
        "arXiv:2010.11929, Tables 3 and 7",
        list_table7_results(77.54, 84.97),
        data="JFT-300M",
        models=tuple(JFT_RESNET_HYPERPARAMETERS),
    ),
    build_pretraining_recipe(
        "bit-jft-sgd",
        bit_sgd_run_builder("JFT-300M", 7),
        "ResNet, multi-label, SGD",
        "arXiv:2010.11929, Table 7",
        list_table7_results(78.24, 84.37),
        data="JFT-300M",
        models=("BiT-R50x1", "BiT-R152x2"),
    ),
    build_pretraining_recipe(
        "bit-imagenet",
        bit_sgd_run_builder("ImageNet"),
        "ResNet from scratch on ImageNet (BiT-S)",
        BIT_PAPER,
        (("BiT-R152x4", "ImageNet, fine-tuned on it", "81.30 %"),),
        models=BIT_MODELS,
    ),
    build_pretraining_recipe(
        "bit-imagenet21k",
        bit_sgd_run_builder("ImageNet-21k"),
        "ResNet on ImageNet-21k (BiT-M)",
        BIT_PAPER,
        (("BiT-R152x4", "ImageNet-21k, fine-tuned on ImageNet", "85.39 %"),),
        data="ImageNet-21k",
        models=BIT_MODELS,
    ),
)
