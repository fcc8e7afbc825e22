"""The verb `vitreous train`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vitreous.cli.console import Console, format_split_metrics
from vitreous.errors import UsageError, escape_unprintable
from vitreous.recipes.options import TrainOptions as Options
from vitreous.tasks.metrics import METRICS

if TYPE_CHECKING:
    from vitreous.data.split import Data
    from vitreous.training.run import Run

__all__ = ["Options", "run"]
MAX_HEADER_CLASSES = 10  # classes that the header lists


def run(options: Options, console: Console) -> dict[str, Any]:
    """Train a model, and print its metrics; with --dry-run, print the plan instead. Returns the document.

    Raises UsageError if --world or --images is set without --dry-run.
    """
    from pathlib import Path

    from vitreous.models.names import config_from_name
    from vitreous.recipes.names import check_recipe_name
    from vitreous.weights.files import open_weights_file

    options.require_data_source()
    if not options.dry_run and (options.world, options.images) != (None, None):
        raise UsageError(
            "--world and --images apply to --dry-run only", "add --dry-run; to train on several devices, use torchrun"
        )
    if options.model:
        config_from_name(options.model)  # rejects unknown names before PyTorch is imported
    if options.recipe:
        check_recipe_name(options.recipe)
    if options.init and Path(options.init).is_file():
        open_weights_file(options.init)
    from vitreous.jobs.train import launch_training

    if options.dry_run:
        return print_train_plan(options, console)

    def print_run_header(run: Run, data: Data) -> None:
        print_header(run, data, console)

    summary = launch_training(options, console, print_run_header)
    for name, key in (("validation", "val"), ("test", "test")):
        if summary[key] is not None:
            console.print_line(format_split_metrics(name, summary[key]))
    for line in format_checkpoint_selection(summary):
        console.print_line(line)
    rows = [
        ("model", f"{summary['model']}, {summary['parameters']:,} parameters"),
        ("time", f"{summary['wall_seconds'] / 60:.1f} minutes"),
        ("report", f"{summary['run']}/report.html"),
    ]
    next_commands = list_next_commands(summary["run"])
    rows += zip(["next", *[""] * (len(next_commands) - 1)], next_commands, strict=True)
    for name, text in rows:
        console.print_line(f"{name:9}  {text}")
    return summary


def list_next_commands(run: str) -> list[str]:
    """Return example commands that use the trained model of a run; `serve` if the model takes images."""
    from pathlib import Path

    from vitreous.inference.open_model import read_task_type
    from vitreous.training.folder import RunFolder

    folder = RunFolder(Path(run))
    preprocess = folder.run().preprocess if folder.config.is_file() else None
    example = read_task_type(run).example_command(run, preprocess is not None and preprocess.is_animated)
    return [example] + [f"vitreous serve {run}"] * (preprocess is not None and preprocess.is_browsable)


def print_header(run: Run, data: Data, console: Console) -> None:
    """Print data, classes, model, recipe, device, precision and steps on stderr before training, one line each."""
    from vitreous.nn.sizes import format_size

    counts = {name: len(split) for name, split in data.splits.items()} | {"train": run.data.images}
    names = list(run.data.outputs[:MAX_HEADER_CLASSES]) + ["…"] * (len(run.data.outputs) > MAX_HEADER_CLASSES)
    has_other_axes, preprocess = len(run.model.image) != 2, run.preprocess
    size_text = format_size(run.model.image)
    size_text = (
        "x".join(map(str, run.model.image)) if has_other_axes else "x".join([size_text] * (1 + ("x" not in size_text)))
    )
    input_text = f"{size_text} {preprocess.unit}"
    noun = "images" if preprocess.is_browsable else preprocess.noun
    if not preprocess.stacks:
        min_tokens = getattr(run.views, "fewest_tokens", 0)
        input_text = (
            f"original aspect ratios, {f'{min_tokens} to ' if min_tokens else 'up to '}{run.max_image_tokens} patches"
        )
    batch = f"{run.batch_size}" + (f" x {run.accumulate}" if run.accumulate > 1 else "")
    lines = {
        "data": f"{shorten_path(run.data.source)}: "
        + ", ".join(f"{count:,} {name}" for name, count in counts.items())
        + f" {noun}",
        "targets"
        if run.data.targets
        else "classes": f"{len(run.data.outputs):,} ({', '.join(map(escape_unprintable, names))})",
        "model": f"{run.model.name()} at {input_text}, {2 * run.model.macs() / 1e9:.3g} GFLOPs "
        + ("each" if has_other_axes else "an image")
        + (f", from {run.init}" if run.init else ", from scratch"),
        "recipe": f"{run.recipe or 'none'}, {run.optimizer.name} with learning rate {run.optimizer.lr:.3g}",
        "device": run.device,
        "precision": run.precision,
        "steps": f"{run.steps:,} of {batch} {noun}, {run.epochs:g} epochs",
    }
    if not run.data.outputs:
        del lines["classes"]
    for name, text in lines.items():
        console.line(f"{name:9}  {text}")


def shorten_path(source: str) -> str:
    """Return the relative path of a dataset within the working directory; other sources are unchanged."""
    import os

    relative = os.path.relpath(source) if os.path.isabs(source) else source
    return source if relative.startswith("..") else relative


def format_checkpoint_selection(summary: dict[str, Any]) -> Iterator[str]:
    """Yield lines on the checkpoint that was selected, and on early stopping, if the run used these."""
    selection = summary.get("selection")
    if not selection:
        return
    best = selection["best"]
    if best and selection["weights"] == "best":
        position = f"step {best['step']:,} (epoch {best['epoch']:.4g})"
        number_format = next(
            (metric.format_spec for metric in METRICS.values() if metric.label == best["metric"]), ".4g"
        )
        value, count = f"{best['value']:{number_format}}", best["evaluations"]
        yield f"best checkpoint: {position}, {best['metric']} {value} on validation, best of {count} evaluations"
    else:
        yield f"last checkpoint: step {selection['weights_step']:,}"
    if selection["drift"]:
        yield f"stopped early at step {summary['steps']:,}: {selection['drift']}"
    elif selection["stopped_early"]:
        patience_text = (
            f"{best['evaluations_since']} consecutive evaluations without improvement over step {best['step']:,}"
        )
        yield f"stopped early at step {summary['steps']:,}: {patience_text}"


def print_train_plan(options: Options, console: Console) -> dict[str, Any]:
    """Print and return the plan of a run: model, image size, parameters, cost, memory, and estimated time.

    The time is estimated from a few timed steps or, with --world, from spec sheets of the device. No file is written.
    """
    from vitreous.cli.console import format_byte_count
    from vitreous.config import to_builtins

    if options.world is None:
        from vitreous.jobs.preview import preview_run as preview
    else:
        from vitreous.jobs.scaled import preview_distributed_run as preview
    run, document = preview(options, console)
    plan = {
        name.removesuffix("_bytes"): format_byte_count(value)
        if name.endswith("_bytes") and value is not None
        else value
        for name, value in document.items()
    }
    console.table(
        ["plan", ""], [[name.replace("_", " "), f"{v:,}" if isinstance(v, int) else str(v)] for name, v in plan.items()]
    )
    return document | {"run": to_builtins(run)}
