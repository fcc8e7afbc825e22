"""What a recipe without labels prints before it starts on a small set: its settings, and what is to be expected."""

from __future__ import annotations

from vitreous.objectives.dino import DINOConfig
from vitreous.objectives.dinov2 import DINOv2Config
from vitreous.objectives.mae import MAEConfig
from vitreous.recipes.options import TrainOptions
from vitreous.recipes.recipe import DatasetInfo
from vitreous.recipes.unlabelled import has_small_settings
from vitreous.training.run import Run

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
