"""Recipes of AugReg, "How to train your ViT?" (arXiv:2106.10270), and of big_vision's plain ViT baseline
(arXiv:2205.01580)."""

from __future__ import annotations

from dataclasses import replace

from vitreous.data.augmentation.augment import Augment
from vitreous.models.config import ModelConfig, replace_known_fields
from vitreous.objectives.supervised import SupervisedConfig
from vitreous.recipes.names import AUGREG_LEVELS
from vitreous.recipes.options import TrainOptions
from vitreous.recipes.recipe import (
    INCEPTION_VIEWS,
    DatasetInfo,
    PublishedResult,
    Recipe,
    RunBuilder,
    apply_google_settings,
    build_pretraining_recipe,
    google_run_fields,
    sigmoid_head_bias,
)
from vitreous.training.run import OptimizerConfig, Run, ScheduleConfig

#: model -> its augmentation level on ImageNet-21k in big_vision's configs
SMALL_MODEL_LEVELS = {"ViT-S/16": "light1", "ViT-B/32": "light2", "ViT-B/16": "light2"}
#: dataset -> epochs, and the augmentation level by model in big_vision's configs; "" for all other models
DATASET_DEFAULTS = {
    "imagenet": (300, {"ViT-Ti/16": "light1", "ViT-S/32": "medium1", "": "medium2"}),
    "imagenet21k": (300, {"ViT-Ti/16": "none", "ViT-S/32": "none", **SMALL_MODEL_LEVELS, "": "medium2"}),
}
PLAIN_MODELS = ("ViT-B/16", "ViT-Ti/16", "ViT-S/32", "ViT-S/16", "ViT-B/32", "ViT-L/16")
AUGREG_PRETRAINING_MODELS = (*PLAIN_MODELS, "R+ViT-Ti/16", "R26+ViT-S/32", "R50+ViT-L/32")


def build_level_augmentation(level: str) -> Augment:
    """Build the augmentation of one of the seven levels of `AUGREG_LEVELS`: Inception crop, flip, RandAugment and
    MixUp."""
    layers, magnitude, mixup = AUGREG_LEVELS[level]
    return replace(INCEPTION_VIEWS, rand_style="big_vision", rand_layers=layers, rand_magnitude=magnitude, mixup=mixup)


def augreg_run_builder(data: str, level: str | None = None) -> RunBuilder:
    """Return a function that builds AugReg's pre-training on `imagenet` or `imagenet21k`, at an augmentation level
    (None: the default level of the model)."""
    epochs, levels = DATASET_DEFAULTS[data]

    def build_run(model: ModelConfig, dataset_info: DatasetInfo, options: TrainOptions) -> Run:
        """AugReg pre-training: arXiv:2106.10270, section 3, with the losses of big_vision's vit_i1k.py and vit_i21k.py.

        vitreous train DATA --recipe NAME --model ViT-B/16

        A recipe without a level in its name uses big_vision's augmentation level. The loss is sigmoid; head biases
        start at -ln K for K classes, which the paper does not specify. There is a representation layer on ImageNet
        only, and weight decay on matrices. There is no dropout and no stochastic depth, as in big_vision. Half of the
        paper's grid uses --dropout 0.1 --drop-path 0.1, and half of it --weight-decay 0.03. The 30-epoch runs on
        ImageNet-21k use --epochs 30. The original momentum is bfloat16; here it is float32.
        """
        return Run(
            **google_run_fields(apply_google_settings(model, options, representation=data == "imagenet"), dataset_info),
            views=build_level_augmentation(level or levels.get(model.name(), levels[""])),
            optimizer=OptimizerConfig("adamw", lr=1e-3, betas=(0.9, 0.999), weight_decay=0.1, clip=1.0),
            schedule=ScheduleConfig(10_000, "cosine"),
            objective=SupervisedConfig(loss="sigmoid", head_bias=sigmoid_head_bias(model.classes)),
            batch_size=4096,
            epochs=epochs,
        )

    return build_run


def plain_vit_run_builder(epochs: int) -> RunBuilder:
    """Return a function that builds big_vision's plain ViT baseline with this number of epochs."""

    def build_run(model: ModelConfig, dataset_info: DatasetInfo, options: TrainOptions) -> Run:
        """Better plain ViT baselines for ImageNet: arXiv:2205.01580 and big_vision's vit_s16_i1k.py.

        vitreous train DATA --recipe NAME

        Fixed positions, mean pooling, a representation layer, batch size 1024, RandAugment(2, 10), MixUp 0.2.
        big_vision's weight decay of 1e-4 is multiplied only by the schedule. Here it is 0.1, because the learning rate
        of 1e-3 multiplies it too; it applies to matrices. The original momentum is bfloat16; here it is float32. The
        original holds out the last 1 % of the training images for model selection and reports the test split.
        """
        model = apply_google_settings(model, options)
        model = replace_known_fields(
            model, {"positions.kind": "sincos-big-vision", "pool": "mean", "class_token": False}
        )
        return Run(
            **google_run_fields(model, dataset_info),
            views=replace(INCEPTION_VIEWS, rand_style="big_vision", rand_layers=2, rand_magnitude=10, mixup=0.2),
            optimizer=OptimizerConfig("adamw", lr=1e-3, betas=(0.9, 0.999), weight_decay=0.1, clip=1.0),
            schedule=ScheduleConfig(10_000, "cosine"),
            batch_size=1024,
            epochs=epochs,
        )

    return build_run


def list_finetuned_accuracies(**accuracies: float) -> tuple[PublishedResult, ...]:
    """List the ImageNet top-1 of the weights that AugReg recommends, pre-trained on ImageNet-21k and fine-tuned at 384
    pixels, by abbreviated model name."""
    hybrids = {"R50L32": "R50+ViT-L/32", "R26S32": "R26+ViT-S/32", "RTi16": "R+ViT-Ti/16"}
    names = {key: hybrids.get(key, f"ViT-{key[:-2]}/{key[-2:]}") for key in accuracies}
    return tuple(
        (names[key], "ImageNet-21k, fine-tuned on ImageNet at 384 pixels", f"{value:.2f} %")
        for key, value in accuracies.items()
    )


#: augmentation level -> results of the weights pre-trained with it; light1 in their file names is the paper's light2
PUBLISHED_BY_LEVEL = {
    "none": list_finetuned_accuracies(S32=79.58, Ti16=78.22, RTi16=75.40),
    "light2": list_finetuned_accuracies(S16=83.73, B32=83.59, R26S32=83.85),
    "medium1": list_finetuned_accuracies(B16=85.49, R50L32=85.99),
    "strong1": list_finetuned_accuracies(L16=85.59),
}


def build_augreg_recipes(data: str, title: str) -> list[Recipe]:
    """Build the recipes of a dataset: one with the default level of each model, and one for each of the seven
    levels."""
    about = f"ViT with the model's augmentation, {title}-sized data"
    default_recipe = build_pretraining_recipe(
        f"augreg-{data}",
        augreg_run_builder(data),
        about,
        "arXiv:2106.10270",
        data=title,
        models=AUGREG_PRETRAINING_MODELS,
    )
    recipes = [default_recipe]
    for level, (layers, magnitude, mixup) in AUGREG_LEVELS.items():
        about = f"as {default_recipe.name}, with RandAugment({layers}, {magnitude}), MixUp {mixup:g}"
        published = PUBLISHED_BY_LEVEL.get(level, ()) if data == "imagenet21k" else ()
        recipes.append(
            replace(
                default_recipe,
                name=f"{default_recipe.name}-{level}",
                make=augreg_run_builder(data, level),
                about=about,
                published=published,
            )
        )
    return recipes


AUGREG_RECIPES = (*build_augreg_recipes("imagenet", "ImageNet"), *build_augreg_recipes("imagenet21k", "ImageNet-21k"))
PLAIN_VIT_RECIPES = tuple(
    build_pretraining_recipe(
        name,
        plain_vit_run_builder(epochs),
        f"ViT-S/16 from scratch in {epochs} epochs",
        "arXiv:2205.01580",
        (("ViT-S/16", "ImageNet", accuracy),),
        models=("ViT-S/16",),
    )
    for name, epochs, accuracy in (("plain-vit", 90, "76.5 %"), ("plain-vit-300", 300, "80.0 %"))
)
