"""Recipes of ViT-5 (arXiv:2602.08071): the hyperparameters of DeiT III, with the authors' changes."""

from __future__ import annotations

from vitreous.models.config import ModelConfig, replace_known_fields
from vitreous.recipes.deit import build_deit3_finish_run, build_deit3_run
from vitreous.recipes.options import TrainOptions
from vitreous.recipes.recipe import DatasetInfo, Recipe, build_pretraining_recipe
from vitreous.training.run import Run

DEFAULT_MODEL = "ViT-5-S/16"  # other models have its hyperparameters
#: model -> learning rate, epochs, stochastic depth of `vit5` and of `vit5-finish`, image size of `vit5`
VIT5_HYPERPARAMETERS = {
    "ViT-5-S/16": (4e-3, 800, 0.05, 0.05, 224),
    "ViT-5-B/16": (3e-3, 800, 0.2, 0.25, 192),
    "ViT-5-L/16": (3e-3, 400, 0.35, 0.5, 192),
}


def set_rotary_grid(model: ModelConfig) -> ModelConfig:
    """Return the model with rotary positions of whole numbers on its grid, as in the authors' tables; models with other
    positions are unchanged."""
    if model.values_at(["rotary.coordinates"]) != {"rotary.coordinates": "reference"}:
        return model
    return replace_known_fields(model, {"rotary.reference": max(model.grid)})


def make_vit5_run(model: ModelConfig, dataset_info: DatasetInfo, options: TrainOptions) -> Run:
    """ViT-5 on ImageNet-1k: arXiv:2602.08071, and wangf3014/ViT-5's README.

    vitreous train DATA --recipe NAME --model ViT-5-B/16

    DeiT III's hyperparameters (`deit3`), with stochastic depth of 0.05, 0.2 and 0.35 for S, B and L, and 400 epochs for
    L. B and L are trained on images of 192 pixels, and finished with `vit5-finish`. Learning rate and stochastic depth
    depend on the model size; other models use those of S. Rotary positions are whole numbers at every image size.
    """
    lr, epochs, drop_path, _, _ = VIT5_HYPERPARAMETERS.get(model.name(), VIT5_HYPERPARAMETERS[DEFAULT_MODEL])
    return build_deit3_run(set_rotary_grid(model), dataset_info, lr, drop_path, epochs)


def make_vit5_finish_run(model: ModelConfig, dataset_info: DatasetInfo, options: TrainOptions) -> Run:
    """ViT-5's last 20 epochs at 224 pixels: wangf3014/ViT-5's README.

    vitreous train DATA --recipe NAME --init runs/vit5

    As `deit3-finish`, with stochastic depth of 0.05, 0.25 and 0.5 for S, B and L.
    """
    drop_path = VIT5_HYPERPARAMETERS.get(model.name(), VIT5_HYPERPARAMETERS[DEFAULT_MODEL])[3]
    return build_deit3_finish_run(set_rotary_grid(model), dataset_info, drop_path)


VIT5_PAPER = "arXiv:2602.08071"
VIT5_RESULTS = {"ViT-5-S/16": "82.2 %", "ViT-5-B/16": "84.2 %", "ViT-5-L/16": "84.9 %"}
VIT5_RECIPES: tuple[Recipe, ...] = (
    build_pretraining_recipe(
        "vit5",
        make_vit5_run,
        "ViT-5 from scratch on ImageNet, 800 epochs, LAMB",
        VIT5_PAPER,
        tuple((model, "ImageNet, finished at 224 pixels", accuracy) for model, accuracy in VIT5_RESULTS.items()),
        side=lambda name, dataset_info: VIT5_HYPERPARAMETERS.get(name, VIT5_HYPERPARAMETERS[DEFAULT_MODEL])[4],
        lr_scaling="sqrt",
        models=tuple(VIT5_HYPERPARAMETERS),
        warmup_in_epochs=True,
    ),
    build_pretraining_recipe(
        "vit5-finish",
        make_vit5_finish_run,
        "vit5's weights at 224 pixels",
        VIT5_PAPER,
        tuple((model, "ImageNet", accuracy) for model, accuracy in VIT5_RESULTS.items()),
        lr_scaling="fixed",
        models=tuple(VIT5_HYPERPARAMETERS),
        from_weights=True,
        warmup_in_epochs=True,
    ),
)
