"""vitreous recipes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tyro.conf import Positional

from vitreous.cli.console import Console
from vitreous.tasks.metrics import label_metric

if TYPE_CHECKING:
    from vitreous.recipes.recipe import Recipe
    from vitreous.training.run import Run

#: fields of a run that are printed for every recipe, those of each optimiser that mean nothing, and the decay of others
PRINTED = (("data", "repeats"), ("preprocess", "fit"), ("preprocess", "share"))
UNUSED = {
    "adamw": ("matrix_lr", "momentum"),
    "lamb": ("matrix_lr", "momentum"),
    "lars": ("matrix_lr", "betas", "eps"),
    "sgd": ("matrix_lr", "betas", "eps"),
    "muon": ("momentum",),
}
#: the figure that published results are of, by what the objective needs to know of places
LEADING = {"": "top1", "classes": "miou", "objects": "ap"}
OF_DECAY = {"milestones": "steps", "timescale": "rsqrt"}


@dataclass(frozen=True)
class Options:
    """List the recipes of `vitreous train --recipe NAME`, or show one: hyperparameters, command and published results.

    Example: vitreous recipes 'finetune-*'
    """

    pattern: Positional[str] = "*"
    """Recipe name, or a pattern with * and ?."""


def run(options: Options, console: Console) -> dict[str, Any]:
    """Print the table, or the one recipe of that name."""
    from fnmatch import fnmatchcase

    from vitreous.recipes.names import NAMES, known

    names = [name for name in NAMES if fnmatchcase(name, options.pattern.lower())]
    if not names:
        known(options.pattern)
    if options.pattern.lower() in NAMES:
        return print_recipe(names[0], console)
    from vitreous.recipes.registry import RECIPES, example

    rows = [describe_recipe(RECIPES[name], example(name)) for name in names]
    console.table(
        ["name", "for", "source", "batch", "length", "lr"],
        [[r["name"], r["about"], r["source"], r["batch_size"], length(r), f"{r['lr']:g}"] for r in rows],
    )
    console.say(
        "`vitreous recipes NAME` tells its other numbers; any of them can be set: --lr, --optimizer.betas 0.9 0.95."
    )
    return {"recipes": rows}


def describe_recipe(recipe: Recipe, run: Run) -> dict[str, Any]:
    """A row of the table: `run` is the recipe's first model on the data that it was written for."""
    return {
        "name": recipe.name,
        "about": recipe.about,
        "source": recipe.source,
        "data": recipe.data,
        "batch_size": run.batch_size,
        "epochs": None if recipe.by_steps else run.epochs,
        "steps": run.steps if recipe.by_steps else None,
        "epochs_range": [recipe.lengths[0][1].least, recipe.lengths[0][1].most] if recipe.lengths else None,
        "optimizer": run.optimizer.name,
        "lr": run.optimizer.lr,
        "rule": recipe.rule,
        "init": recipe.from_weights,
    }


def length(row: dict[str, Any]) -> str:
    """Epochs or steps, for the table; a range where the number of images decides."""
    if row["epochs_range"]:
        return "{:g} to {:g} epochs".format(*row["epochs_range"])
    return f"{row['steps']} steps" if row["steps"] else f"{row['epochs']:g} epochs"


def print_recipe(name: str, console: Console) -> dict[str, Any]:
    """Print one recipe, and return its document."""
    from vitreous.config import to_plain
    from vitreous.nn.sizes import format_size
    from vitreous.recipes.registry import RECIPES, example

    recipe, run = RECIPES[name], example(name)
    row = describe_recipe(recipe, run) | {"grid": list(recipe.grid), "hold_out": recipe.hold_out}
    models = [(model or run.model.name(), example(name, model)) for model in recipe.models or (None,)]
    console.say(f"{name}: {recipe.about} ({recipe.source})\n\n{recipe.text}\n")
    cells = []
    for model, r in models:
        m, lr = r.model, f"{r.optimizer.lr:g}"
        cells.append(
            [
                model,
                format_size(m.image),
                f"{r.epochs:.4g}",
                r.steps,
                lr,
                f"{m.regularization.dropout:g}",
                f"{m.regularization.drop_path:g}",
            ]
        )
    console.table(["model", "pixels", "epochs", "steps", "lr", "dropout", "drop path"], cells)
    console.say(f"on {recipe.data}: {run.data.images:,} images, {run.model.classes:,} classes")
    for kind, length in recipe.lengths:
        console.say(f"epochs on other data ({kind}): {length.shown:,.0f} / training images, {length.text}")
    console.say()
    console.table(["setting", "value"], [[path, value] for path, value in decided_settings(run)])
    grid = " ".join(map(str, recipe.grid))
    console.say(
        f"\nlearning rate and batch: {recipe.rule}; --lr-grid: {grid}, with {held_out(recipe)} of the training images "
        "held out"
    )
    if recipe.published:
        console.say("\npublished, not measured here:")
        console.table(["model", "data", label_metric(LEADING[recipe.objective.annotated])], recipe.published)
    published = [{"model": model, "data": data, "figure": figure} for model, data, figure in recipe.published]
    variants = [
        {"model": m, "image": format_size(r.model.image), "epochs": r.epochs, "steps": r.steps, "lr": r.optimizer.lr}
        for m, r in models
    ]
    return {"recipe": row, "text": recipe.text, "models": variants, "run": to_plain(run), "published": published}


def held_out(recipe: Recipe) -> str:
    """The share of the training images on which --lr-grid chooses, in words."""
    from vitreous.recipes.recipe import SHARES

    if recipe.hold_out is not None:
        return f"{recipe.hold_out:.0%}"
    *small, (_, rest) = SHARES
    return ", ".join(f"{share:.0%} (below {images:,})" for images, share in small) + f" or {rest:.0%}"


def decided_settings(run: Run) -> list[tuple[str, str]]:
    """Path and value of what a recipe decides: its optimiser and schedule whole, of the rest what is not as usual."""
    from vitreous.config import to_plain
    from vitreous.data.augmentation.augment import Augment
    from vitreous.objectives.supervised import SupervisedConfig

    whole = to_plain(run)
    rows = [(f"{part}.{key}", value) for part in ("optimizer", "schedule") for key, value in whole[part].items()]
    usual, learned = to_plain(Augment()), to_plain(SupervisedConfig()) | {"name": None, "loss": None}
    rows += [(f"views.{key}", value) for key, value in whole["views"].items() if value != usual.get(key)]
    rows += [(f"objective.{key}", value) for key, value in whole["objective"].items() if value != learned.get(key)]
    rows += [(key, whole[key]) for key in ("batch_size", "ema")]
    rows += [(f"{part}.{key}", whole[part][key]) for part, key in PRINTED]
    hidden = {f"optimizer.{key}" for key in UNUSED[run.optimizer.name]}
    hidden |= {f"schedule.{key}" for key, decay in OF_DECAY.items() if decay != run.schedule.decay}
    return [(path, format_value(value)) for path, value in rows if path not in hidden]


def format_value(value: Any) -> str:
    """A value as `--path` takes it."""
    if isinstance(value, list):
        return " ".join(map(format_value, value)) or "none"
    return "none" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
