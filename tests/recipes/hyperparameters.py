"""The hyperparameters of a recipe that `sources.csv` lists with their sources."""

from __future__ import annotations

import csv
import json
from dataclasses import fields
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from vitreous.config import to_builtins
from vitreous.data.augmentation.augment import Augment
from vitreous.recipes.registry import RECIPES, build_example_run
from vitreous.training.run import Run

SOURCES_CSV = Path(__file__).parent / "sources.csv"
#: valid values of `agrees`
VERDICTS = ("yes", "differs", "not verified", "ours")
#: optimizer settings that only these optimizers use
ONLY_FOR = {
    "matrix_lr": ("muon",),
    "betas": ("adamw", "lamb", "muon"),
    "eps": ("adamw", "lamb", "muon"),
    "momentum": ("sgd", "lars"),
}
OPTIMIZER_FIELDS = (
    *("name", "lr", "matrix_lr", "betas", "eps", "momentum", "weight_decay", "decay_on"),
    *("clip", "clip_by", "layer_decay"),
)
#: model fields that recipes set, by path
MODEL_FIELDS = (
    *("image", "regularization.dropout", "regularization.drop_path", "head.representation", "positions.kind", "pool"),
    *("attention.window", "attention.global_blocks", "attention.pad", "mlp.kind", "norm.layer_scale"),
)
#: values that have no effect, so that sources.csv does not list them
NEUTRAL_VALUES: dict[str, Any] = {
    **{
        f"objective.{name}": None
        for name in ("name", "teacher", "autoencoder", "frequencies", "class_weights", "teacher_mean", "teacher_std")
    },
    **{"objective.patch_head_width": 0, "objective.gram_start": 0.0, "objective.teacher_size": 0},
    **{"views.anchor_scale": 0.0},
    **{"objective.patch_dropout": 0.0, "objective.patch_dropout_until": 0.7, "objective.mimetic": False},
    **{"objective.progressive": 1.0, "objective.progressive_until": 0.7, "objective.head_bias": 0.0},
    **{"objective.adapter": "none", "objective.federated": 0, "objective.agnostic": False},
    **{"views.flip_vertical": 0.0, "views.turn": False, "views.max_class_share": 1.0, "views.hue": 0.0},
    **{
        "views.jitter": [0.0, 0.0, 0.0],
        "optimizer.clip_by": "all",
        "optimizer.layer_decay": 1.0,
        "optimizer.rates": [],
    },
    **{
        "model.positions.kind": "learned",
        "model.pool": "class",
        "model.mlp.kind": "gelu",
        "model.regularization.dropout": 0.0,
    },
    **{
        "model.regularization.drop_path": 0.0,
        "model.attention.window": 0,
        "model.attention.global_blocks": [],
        "tune.last_blocks": None,
        "ema": None,
    },
    **{"data.repeats": 1, "hold_out": None, "grid": None, "preprocess.stride": 0, "data.repeat_threshold": None},
    **{"schedule.warmup_includes_base": False, "ema_warmup": None},
    **{"model.head.representation": None, "model.norm.layer_scale": None, "model.attention.pad": None},
}


class SourceRow(NamedTuple):
    """A line of `sources.csv`: the value (JSON) of a setting, for recipes and models matched by patterns separated by
    spaces.

    `source`: file and line of a repository at a commit, or a table of a paper. `agrees` is one of `VERDICTS`.
    """

    recipes: str
    models: str
    setting: str
    value: str
    source: str
    agrees: str
    note: str

    def covers(self, recipe: str, model: str) -> bool:
        """Whether the line applies to this recipe and model."""
        chosen = any(fnmatch(recipe, pattern) for pattern in self.recipes.split(" "))
        return chosen and any(fnmatch(model, pattern) for pattern in self.models.split(" "))


def read_sources() -> list[SourceRow]:
    """Return the lines of `sources.csv`."""
    with SOURCES_CSV.open(newline="") as file:
        return [SourceRow(**row) for row in csv.DictReader(file)]


def get_recipe_settings(name: str, model: str | None = None) -> dict[str, Any]:
    """Return the hyperparameters of a recipe by dotted name, for a model (default: the recipe's first) on its original
    data.

    Settings without effect are left out.
    """
    recipe, run = RECIPES[name], build_example_run(name, model)
    plain = to_builtins(run)
    optimizer, schedule = run.optimizer, run.schedule
    settings = {
        "batch_size": run.batch_size,
        **({"steps": run.steps} if recipe.by_steps else {"epochs": run.epochs}),
        **{f"optimizer.{key}": plain["optimizer"][key] for key in OPTIMIZER_FIELDS if uses_optimizer_field(run, key)},
        "schedule.decay": schedule.decay,
        "schedule.warmup_includes_base": schedule.warmup_includes_base,
        **{f"schedules.{key}": [ramp.start, ramp.end, ramp.curve, ramp.steps] for key, ramp in run.schedules.items()},
        **{f"schedules.{key}.includes_end": True for key, ramp in run.schedules.items() if ramp.includes_end},
        **{f"model.{path}": to_builtins(value) for path, value in run.model.values_at(MODEL_FIELDS).items()},
        **{f"objective.{key}": value for key, value in plain["objective"].items()},
        **list_view_settings(run.views, plain["views"]),
        **{f"preprocess.{key}": plain["preprocess"][key] for key in ("mean", "std", "fit", "share", "filter")},
    }
    if recipe.warmup_in_epochs:
        settings["schedule.warmup_epochs"] = round(schedule.warmup_steps * run.step_size / run.data.images, 2)
    else:
        settings["schedule.warmup_steps"] = schedule.warmup_steps
    if schedule.decay == "steps":
        settings["schedule.milestones"] = [round(share, 4) for share in schedule.milestones]
    elif schedule.decay != "constant":
        settings["schedule.last_lr"] = float(f"{schedule.end * optimizer.lr:.6g}")
    settings |= {
        "optimizer.rates": plain["optimizer"]["rates"],
        "ema": run.ema,
        "ema_warmup": None if run.ema is None else run.ema_warmup,
        "tune.last_blocks": run.tune.last_blocks,
        "data.repeats": run.data.repeats,
        "data.repeat_threshold": run.data.repeat_threshold if run.data.sampling == "repeat-factor" else None,
        "preprocess.stride": run.preprocess.stride,
        "grid": list(recipe.grid) if recipe.from_weights and recipe.objective.labelled else None,
        "hold_out": recipe.hold_out,
    }
    if not settings.get("objective.adapter") or settings["objective.adapter"] == "none":
        settings.pop("objective.adapter_tokens", None)
    shown = {key: value for key, value in settings.items() if not is_off(key, value)}
    return {key: json.loads(json.dumps(value)) for key, value in shown.items()}


def is_off(setting: str, value: Any) -> bool:
    """Whether a setting has no effect, or is not a hyperparameter."""
    if setting not in NEUTRAL_VALUES:
        return False
    return (
        NEUTRAL_VALUES[setting] in (None, value)
        if setting.startswith("objective.")
        else NEUTRAL_VALUES[setting] == value
    )


def uses_optimizer_field(run: Run, key: str) -> bool:
    """Whether the optimizer of a run uses this field."""
    optimizer = run.optimizer
    if key == "clip_by":
        return optimizer.clip is not None
    if key == "decay_on":
        return optimizer.weight_decay > 0
    return key not in ONLY_FOR or optimizer.name in ONLY_FOR[key]


def list_view_settings(views: Any, plain: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of views: of `Augment` crop, flip and all enabled settings, of others all."""
    if isinstance(views, Augment):
        off = Augment()
        shown = {"crop", "flip"} | {f.name for f in fields(views) if getattr(views, f.name) != getattr(off, f.name)}
        plain = {key: value for key, value in plain.items() if key in shown}
    jitters = any(plain.get("jitter", ()))
    left_out = {"name"} | (set() if jitters else {"jitter", "jitter_probability", "jitter_style"})
    return {f"views.{key}": value for key, value in plain.items() if key not in left_out}


def list_published_metrics(name: str) -> dict[tuple[str, str], str]:
    """Return a recipe's published metrics by model and `published: DATA`."""
    return {(model, f"published: {data}"): metric for model, data, metric in RECIPES[name].published}
