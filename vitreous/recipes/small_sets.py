"""What a recipe without labels prints before it starts on a small set: its settings, and what is to be expected."""

from __future__ import annotations

from vitreous.objectives.dino import DINOConfig
from vitreous.objectives.dinov2 import DINOv2Config
from vitreous.objectives.mae import MAEConfig
from vitreous.recipes.options import TrainOptions
from vitreous.recipes.recipe import DatasetInfo
from vitreous.recipes.unlabelled import has_small_settings
from vitreous.training.run import Run

#: docs/pretraining.md, "Is it worth the time"
MEASURED = (
    "two minutes of one core from scratch gave 71.8 % on 9,000 images of CIFAR-10, one of dino and one of fine-tuning "
    "53.1 % (docs/pretraining.md); leave --recipe out unless most of your images have no labels"
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


def advise_labels(run: Run, info: DatasetInfo, options: TrainOptions) -> str:
    """Return what was measured of pre-training on small sets whose images have labels, for a run that is about to do
    so; an empty string for any other run."""
    if run.init or len(run.data.classes) < 2 or not describe_small_settings(run, info, options):
        return ""
    return f"the images have labels, and {run.recipe} learns without them: {MEASURED}"
