"""`report.html` of a learning-rate grid: one page that needs nothing but itself, in light and in dark."""

from __future__ import annotations

import io
import json
import shlex
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from vitreous.models.names import name_of
from vitreous.training.folder import Folder, whole
from vitreous.weights.bundle import write_text

INK = "#010203"  # stands for the colour of the page's text
COLOURS = ("#3b8ed0", "#d1823b", "#3fa66b", "#c2578f", "#8a78d6", "#a59321", "#2fa3a8", "#b65c4a")  # legible on white and on black

Curve = tuple[str, str, list[dict[str, Any]]]  # name, colour, lines of metrics


def write_report(folder: Folder, table: dict[str, Any], summary: dict[str, Any] | None = None) -> None:
    """Write RUN/report.html. `table` is `trials.json`, `summary` that of the run on all images, once it is there."""
    from jinja2 import Environment

    run, val = folder.run(), (summary or {}).get("val") or {}
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["span"] = span
    page = environment.from_string(files("vitreous.reports").joinpath("grid.html").read_text("utf-8"))
    rates = [row["lr"] for row in table["trials"]]
    trials: list[Curve] = [
        (f"{rate:g}", COLOURS[number % len(COLOURS)], metrics(folder.path / row["folder"] / "metrics.jsonl"))
        for number, (rate, row) in enumerate(zip(rates, table["trials"], strict=True))
    ]
    last: list[Curve] = [(f"{run.optimizer.lr:g}, all images", INK, metrics(folder.metrics))] if summary else []
    several = any(line.get("val/map") is not None for _, _, lines in [*trials, *last] for line in lines)
    measure, key = ("mAP", "map") if several else ("top-1", "top1")
    text = page.render(
        **table,
        model=name_of(run.model),
        data=Path(run.data.source).name or run.data.source,
        images=run.data.images,
        measure=measure,
        curves=markup(drawing(("training loss", "train/loss", [*trials, *last]), (f"held-out {measure}", f"val/{key}", trials))),
        val=val.get(key),
        summary=summary,
        commands=commands(folder, run.data.source, table),
    )
    write_text(folder.path / "report.html", text)


def metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file; none where there is no file."""
    lines = path.read_text("utf-8").splitlines(keepends=True) if path.is_file() else []
    return [json.loads(line) for line in lines if whole(line)]


def commands(folder: Folder, source: str, table: dict[str, Any]) -> list[str]:
    """What repeats the protocol, each trial, and the last run, and what reads the test split."""
    place, data = str(folder.path), shlex.quote(source)
    first = folder.path / "command.txt"
    lines = [first.read_text("utf-8").strip()] if first.is_file() else []
    homes = [*(f"{place}/{row['folder']}" for row in table["trials"]), place]
    lines += [f"vitreous train {data} --config {shlex.quote(home + '/config.yaml')} --out AGAIN" for home in homes]
    return [*lines, f"vitreous evaluate {shlex.quote(place)}"]


def span(seconds: float) -> str:
    """A time for people."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.1f} min"


def drawing(*panels: tuple[str, str, Sequence[Curve]]) -> str:
    """Panels (title, key of the metrics, curves) against epochs, as SVG markup whose ink is that of the page."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    style = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK)
    with rc_context({**style, "svg.fonttype": "none", "svg.hashsalt": "vitreous", "font.size": 9, "font.family": "sans-serif"}):
        figure = Figure(figsize=(9.6, 3.6))
        figure.subplots_adjust(left=0.05, right=0.99, bottom=0.13, top=0.92, wspace=0.14)  # finding the room takes as long as drawing
        for axes, (title, key, curves) in zip(figure.subplots(1, len(panels)), panels, strict=True):
            for name, colour, lines in curves:
                points = [(line["epoch"], line[key]) for line in lines if line.get(key) is not None]
                if points:
                    axes.plot(*zip(*points, strict=True), color=colour, label=name, marker="o" if len(points) < 20 else "", markersize=3)
            axes.set_title(title, fontsize=10)
            axes.set_xlabel("epochs")
            axes.grid(alpha=0.2, color=INK)
            axes.spines[["top", "right"]].set_visible(False)
            if axes.lines:
                axes.legend(frameon=False, title="learning rate")
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    return text[text.index("<svg") :].replace(INK, "currentColor")


def markup(text: str) -> Any:
    """Text that the page takes as it is."""
    from markupsafe import Markup

    return Markup(text)
