"""vitreous train."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vitreous.recipes.options import TrainOptions as Options

if TYPE_CHECKING:
    from vitreous.cli.console import Console

__all__ = ["Options", "run"]


def run(options: Options, console: Console) -> dict[str, Any]:
    """Train, or with --dry-run tell what training would be; returns the document."""
    from pathlib import Path

    from vitreous.models.names import configure
    from vitreous.recipes.names import known
    from vitreous.weights.files import open_weights

    if options.model:
        configure(options.model)  # what cannot be is refused before PyTorch is imported
    if options.recipe:
        known(options.recipe)
    if options.init and Path(options.init).is_file():
        open_weights(options.init)
    from vitreous.recipes.train import carry_out

    if options.dry_run:
        return plan(options, console)
    summary = carry_out(options, console)
    console.say(figures("validation", summary["val"]))
    if "lr_grid" not in summary:
        console.say(figures("test", summary["test"]))
    minutes = summary["wall_seconds"] / 60
    console.say(f"{summary['model']}, {summary['parameters']:,} parameters, trained in {minutes:.1f} minutes: {summary['run']}")
    console.say(f"next: vitreous predict {summary['run']} IMAGE …, or read {summary['run']}/report.html")
    return summary


def figures(name: str, found: dict[str, Any] | None) -> str:
    """One line of a split's figures."""
    if found is None:
        return f"{name}: no such split, nothing was measured"
    if "map" in found:
        return several(name, found)
    ends = found["interval"]
    low, high = ends["top1"]
    top5 = "" if found["top5"] is None else f", top-5 {found['top5']:.2%}{within(ends['top5'], '.1%')}"
    nll = "" if found["nll"] is None else f", NLL {found['nll']:.3f}{within(ends['nll'])}, ECE {found['ece']:.3f}{within(ends['ece'])}"
    return f"{name}: top-1 {found['top1']:.2%} (95 % interval {low:.1%} to {high:.1%}){top5}{nll}, {found['images']} images"


def within(ends: Sequence[float] | None, form: str = ".3f") -> str:
    """The interval behind a figure, where there is one."""
    return f" ({ends[0]:{form}} to {ends[1]:{form}})" if ends else ""


def several(name: str, found: dict[str, Any]) -> str:
    """The same where images have several labels."""
    ends = found["interval"]
    interval = "" if ends["map"] is None else f" (95 % interval {ends['map'][0]:.1%} to {ends['map'][1]:.1%})"
    nll = "" if found["nll"] is None else f", NLL {found['nll']:.3f}{within(ends['nll'])}"
    f1 = ", ".join(f"{kind} F1 {found[f'{kind}_f1']:.2%}{within(ends[f'{kind}_f1'], '.1%')}" for kind in ("macro", "micro"))
    return f"{name}: mAP {found['map']:.2%}{interval}, {f1}{nll}, {found['images']} images"


def plan(options: Options, console: Console) -> dict[str, Any]:
    """The plan: model, resolution, parameters, cost, memory, time from a few timed steps. Writes nothing."""
    from vitreous.config import to_plain
    from vitreous.recipes.preview import preview

    run, document = preview(options, console)
    console.table(["plan", ""], [[name.replace("_", " "), str(value)] for name, value in document.items()])
    return document | {"run": to_plain(run)}
