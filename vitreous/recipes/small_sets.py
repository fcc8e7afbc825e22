"""What a recipe without labels prints before it starts on a small set: its settings, and what is to be expected."""

from __future__ import annotations

from vitreous.objectives.dino import DINOConfig
from vitreous.objectives.dinov2 import DINOv2Config
from vitreous.objectives.mae import MAEConfig
from vitreous.recipes.options import TrainOptions
from vitreous.recipes.recipe import DatasetInfo
from vitreous.recipes.unlabelled import has_small_settings
from vitreous.training.run import Run

#: docs/pretraining.md, "Is it worth the time": with labels for all images, and with few
SHORT = "half a minute of {} and of fine-tuning gave {} % on 2,000 CIFAR-10 images, a minute from scratch 59.2 %"
WITH_LABELS = {
    "dino": "one minute of dino and one of fine-tuning gave 53.1 % on 9,000 CIFAR-10 images, two from scratch 71.8 %",
    "dinov2": SHORT.format("dinov2", 24.1),
    "mae": SHORT.format("mae", 19.8),
}
FEW_LABELS = (
    "with 60 labels of Quick, Draw! a minute of mae and fine-tuning gave 28.2 %, of dino 81.7 %, from scratch 80.1 %"
)
RECIPES = ("masked-patches", "mae", "dino", "dinov2")


def describe_small_settings(run: Run, info: DatasetInfo, options: TrainOptions) -> str:
    """Return one line with the settings that a recipe has for small images and few photographs, where a run takes them
    in place of the published ones; an empty string for any other run."""
    if run.recipe not in RECIPES or not has_small_settings(run.model, info, options):
        return ""
    settings, objective = [f"{run.step_size} images a step", f"learning rate {run.optimizer.lr:g}"], run.objective
    if isinstance(objective, MAEConfig):
        settings.append(f"a decoder of {objective.decoder_depth} blocks of {objective.decoder_width}")
    if isinstance(objective, DINOConfig | DINOv2Config):
        momentum, temperature = run.schedules["momentum"], run.schedules["teacher_temperature"]
        settings.append(f"{objective.prototypes} prototypes")
        settings.append(f"KoLeo {objective.koleo:g}")
        settings.append(f"teacher momentum {momentum.start:g} to {momentum.end:g}")
        settings.append(f"teacher temperature {temperature.end:g}")
    return f"{run.recipe} takes our settings for small sets, not the published ones: {', '.join(settings)}"


def advise_pretraining(run: Run, info: DatasetInfo, options: TrainOptions) -> str:
    """Return what was measured of pre-training in equal time where it lost: on small sets whose images have labels,
    and by `mae` on those without; an empty string for any other run."""
    if run.init or not describe_small_settings(run, info, options):
        return ""
    if len(run.data.classes) > 1:
        figures = WITH_LABELS.get(run.recipe, WITH_LABELS["mae"])
        hint = "leave --recipe out unless most of your images have no labels"
        return f"the images have labels, and {run.recipe} learns without them: {figures} (docs/pretraining.md); {hint}"
    if run.recipe == "mae":
        return f"mae is slow on small sets: {FEW_LABELS} (docs/pretraining.md); use --recipe dino, or train for long"
    return ""
