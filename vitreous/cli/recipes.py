"""The verb `vitreous recipes`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tyro.conf import Positional

from vitreous.cli.console import Console

if TYPE_CHECKING:
    from vitreous.recipes.recipe import Recipe
    from vitreous.training.run import Run

#: (section, field) of a run that is printed even if it has the default value
ALWAYS_PRINTED_SETTINGS = (("data", "repeats"), ("preprocess", "fit"), ("preprocess", "share"))
#: optimizer -> fields of its config that it does not use
UNUSED_OPTIMIZER_FIELDS = {
    "adamw": ("matrix_lr", "momentum"),
    "lamb": ("matrix_lr", "momentum"),
    "lars": ("matrix_lr", "betas", "eps"),
    "sgd": ("matrix_lr", "betas", "eps"),
    "muon": ("momentum",),
}
RecipeTask = Literal["classification", "pretraining", "segmentation", "detection", "regression", "generation"]
#: task of recipes -> title of its table, and the label of published results
TASK_TITLES = {
    "classification": ("Classification", "top-1"),
    "pretraining": ("Pre-training without labels", "top-1"),
    "segmentation": ("Semantic segmentation", "mIoU"),
    "detection": ("Object detection and instance segmentation", "AP"),
    "regression": ("Regression", "R2"),
    "generation": ("Image and video generation", "FID"),
}
#: field of a schedule -> the decay that uses it
DECAY_FIELDS = {"milestones": "steps", "timescale": "rsqrt"}


@dataclass(frozen=True)
class Options:
    """List the recipes of `vitreous train --recipe NAME`, or show one: hyperparameters, command and published results.

    Example: vitreous recipes 'finetune-*'
    Example: vitreous recipes --task segmentation
    """

    pattern: Positional[str] = "*"
    """Recipe name, or a pattern with * and ?."""
    task: RecipeTask | None = None
    """List the recipes of one task only."""


def run(options: Options, console: Console) -> dict[str, Any]:
    """Print a table of recipes for each task, or one recipe. Raises UsageError if no name matches the pattern and the
    task."""
    from fnmatch import fnmatchcase

    from vitreous.errors import UsageError
    from vitreous.recipes.names import RECIPE_NAMES, check_recipe_name

    names = [name for name in RECIPE_NAMES if fnmatchcase(name, options.pattern.lower())]
    if not names:
        check_recipe_name(options.pattern)
    if options.pattern.lower() in RECIPE_NAMES:
        return print_recipe(names[0], console)
    from vitreous.recipes.registry import RECIPES, build_example_run

    if options.task:
        names = [name for name in names if RECIPES[name].task == options.task]
    if not names:
        message = f"no recipe for {options.task} matches {options.pattern}"
        raise UsageError(message, f"list them all: vitreous recipes --task {options.task}")
    recipes = [describe_recipe(RECIPES[name], build_example_run(name)) for name in names]
    for task, (title, _) in TASK_TITLES.items():
        if rows := [recipe for recipe in recipes if recipe["task"] == task]:
            console.print_line(f"{title}\n")
            console.table(["name", "for", "length", "batch", "lr", "source"], map(list_recipe_cells, rows))
            console.print_line()
    console.print_line("`vitreous recipes NAME` prints hyperparameters and published results of a recipe.")
    return {"recipes": recipes}


def list_recipe_cells(recipe: dict[str, Any]) -> list[Any]:
    """Return the cells of a recipe summary in the table of recipes."""
    length, lr = format_length(recipe), f"{recipe['lr']:g}"
    return [recipe["name"], recipe["description"], length, recipe["batch_size"], lr, recipe["source"]]


def describe_recipe(recipe: Recipe, run: Run) -> dict[str, Any]:
    """Return the summary of a recipe for table and document; `run` is its run with the first model on its original
    dataset."""
    return {
        "name": recipe.name,
        "task": recipe.task,
        "description": recipe.about,
        "source": recipe.source,
        "data": recipe.data,
        "batch_size": run.batch_size,
        "epochs": None if recipe.by_steps else run.epochs,
        "steps": run.steps if recipe.by_steps else None,
        "epochs_range": [recipe.lengths[0][1].least, recipe.lengths[0][1].max_epochs] if recipe.lengths else None,
        "optimizer": run.optimizer.name,
        "lr": run.optimizer.lr,
        "lr_rule": recipe.lr_scaling,
        "init": recipe.from_weights,
    }


def format_length(recipe: dict[str, Any]) -> str:
    """Format the training length of a recipe summary: epochs or steps; a range if it depends on the number of
    images."""
    if recipe["epochs_range"]:
        return "{:g} to {:g} epochs".format(*recipe["epochs_range"])
    return f"{recipe['steps']} steps" if recipe["steps"] else f"{recipe['epochs']:g} epochs"


def print_recipe(name: str, console: Console) -> dict[str, Any]:
    """Print a recipe with its models, hyperparameters and published results, and return the document."""
    from vitreous.config import to_builtins
    from vitreous.nn.sizes import format_size
    from vitreous.recipes.registry import RECIPES, build_example_run

    recipe, run = RECIPES[name], build_example_run(name)
    summary = describe_recipe(recipe, run) | {"lr_grid": list(recipe.grid), "hold_out": recipe.hold_out}
    models = [(model or run.model.name(), build_example_run(name, model)) for model in recipe.models or (None,)]
    console.print_line(f"{name}: {recipe.about} ({recipe.source})\n\n{recipe.text}\n")
    cells = []
    for model, example in models:
        m, lr = example.model, f"{example.optimizer.lr:g}"
        cells.append(
            [
                model,
                format_size(m.image),
                f"{example.epochs:.4g}",
                example.steps,
                lr,
                f"{m.regularization.dropout:g}",
                f"{m.regularization.drop_path:g}",
            ]
        )
    console.table(["model", "pixels", "epochs", "steps", "lr", "dropout", "drop path"], cells)
    console.print_line(f"on {recipe.data}: {run.data.images:,} images, {run.model.classes:,} classes")
    for dataset_type, length in recipe.lengths:
        console.print_line(
            f"epochs on other datasets ({dataset_type}): {length.num_samples:,.0f} / training images, {length.text}"
        )
    console.print_line()
    console.table(["setting", "value"], [[path, value] for path, value in list_recipe_settings(run)])
    grid = " ".join(map(str, recipe.grid))
    console.print_line(
        f"\nlearning rate and batch: {recipe.lr_scaling}; --lr-grid: {grid}, with {format_hold_out(recipe)} of the "
        f"training images "
        "held out"
    )
    if recipe.published:
        console.print_line("\npublished results, not measured here:")
        console.table(["model", "data", TASK_TITLES[recipe.task][1]], recipe.published)
    published = [{"model": model, "data": data, "result": result} for model, data, result in recipe.published]
    variants = [
        {
            "model": m,
            "image_size": format_size(example.model.image),
            "epochs": example.epochs,
            "steps": example.steps,
            "lr": example.optimizer.lr,
        }
        for m, example in models
    ]
    return {"recipe": summary, "text": recipe.text, "models": variants, "run": to_builtins(run), "published": published}


def format_hold_out(recipe: Recipe) -> str:
    """Format the share of the training images that --lr-grid holds out, which may depend on their number."""
    from vitreous.recipes.recipe import HOLD_OUT_SHARES

    if recipe.hold_out is not None:
        return f"{recipe.hold_out:.0%}"
    *thresholds, (_, default_share) = HOLD_OUT_SHARES
    return ", ".join(f"{share:.0%} (below {images:,})" for images, share in thresholds) + f" or {default_share:.0%}"


def list_recipe_settings(run: Run) -> list[tuple[str, str]]:
    """Return (path, value) of the settings of a run that are printed.

    These are all used fields of optimizer and schedule, and other fields that do not have the default value.
    """
    from vitreous.config import to_builtins
    from vitreous.data.augmentation.augment import Augment
    from vitreous.objectives.supervised import SupervisedConfig

    run_dict = to_builtins(run)
    settings = [
        (f"{group}.{key}", value) for group in ("optimizer", "schedule") for key, value in run_dict[group].items()
    ]
    default_views, default_objective = (
        to_builtins(Augment()),
        to_builtins(SupervisedConfig()) | {"name": None, "loss": None},
    )
    settings += [(f"views.{key}", value) for key, value in run_dict["views"].items() if value != default_views.get(key)]
    settings += [
        (f"objective.{key}", value)
        for key, value in run_dict["objective"].items()
        if value != default_objective.get(key)
    ]
    settings += [(key, run_dict[key]) for key in ("batch_size", "ema")]
    settings += [(f"{group}.{key}", run_dict[group][key]) for group, key in ALWAYS_PRINTED_SETTINGS]
    hidden = {f"optimizer.{key}" for key in UNUSED_OPTIMIZER_FIELDS[run.optimizer.name]}
    hidden |= {f"schedule.{key}" for key, decay in DECAY_FIELDS.items() if decay != run.schedule.decay}
    return [(path, format_setting(value)) for path, value in settings if path not in hidden]


def format_setting(value: Any) -> str:
    """Format a value as it is set on the command line, such as `0.9 0.95`."""
    if isinstance(value, list):
        return " ".join(map(format_setting, value)) or "none"
    return "none" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
