"""Format numbers and names for pages, and render the page templates.

Probabilities and shares of attention or variance have two significant digits (`format_share`, and `percent` of
apps/server/page/page.js). Metrics have two decimals, as on the command line; intervals and metrics per class have one.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from vitreous.reports.pages.metric_terms import MetricTerms, explain_metric
from vitreous.tasks.metrics import METRICS

if TYPE_CHECKING:
    from jinja2 import Environment

    from vitreous.tasks.base import Task

# shown in per cent
PERCENT_METRICS = (
    *(key for key, metric in METRICS.items() if metric.is_share),
    "fewshot_top1",
    "merged_top1",
    "variance_share",
    "rollout_spread",
)

#: task name -> its title on pages
TASK_TITLES = {
    "classification": "{noun} classification",
    "regression": "Regression",
    "segmentation": "Semantic segmentation",
    "detection": "Object detection",
    "generation": "{noun} generation",
    "features": "Feature extraction",
}


def format_share(share: float) -> str:
    """Format a share in [0, 1] with two significant digits: `91 %`, `1.2 %`, `0.034 %`.

    Values near 1 get enough decimals to distinguish them from 1: `99.6 %`, `99.97 %`, and `>99.9999 %` from 0.999999.
    """
    value = 100 * share
    if value == 0 or value >= 100:
        return f"{value:.0f} %"
    if value >= 99.9999:
        return ">99.9999 %"
    if value < 0.001:
        return f"{value:.1e} %".replace("e-0", "e-")
    if value < 99.5:
        return f"{value:#.2g}".rstrip(".") + " %"
    return next(text for decimals in range(1, 6) if float(text := f"{value:.{decimals}f}") < 100) + " %"


def format_share_markup(share: float) -> str:
    """Format a share as `format_share`, with a non-breaking space before the percent sign."""
    return format_share(share).replace(" ", "\u00a0")


def format_percent(value: float | None, decimals: int = 2) -> str:
    """Format a share in [0, 1] in per cent: `51.20 %`; a dash for None."""
    return "–" if value is None else f"{100 * value:.{decimals}f} %"


def format_metric_value(name: str, value: float, decimals: int = 2) -> str:
    """Format the value of the metric `name`: a share in per cent, other metrics as their entry in `METRICS` specifies,
    or with three decimals."""
    if name in PERCENT_METRICS:
        return format_percent(value, decimals)
    return format(value, METRICS[name].format_spec if name in METRICS else ".3f")


def format_interval(name: str, interval: list[float] | None) -> str:
    """Format the confidence interval of the metric `name`: `49.8 % to 52.6 %`; an empty string for None."""
    return (
        ""
        if interval is None
        else f"{format_metric_value(name, interval[0], 1)} to {format_metric_value(name, interval[1], 1)}"
    )


def format_number(value: float | None) -> str:
    """Format a number with four significant digits, from 1000 on without decimals; a dash for None."""
    return "–" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def format_bytes(value: float | None) -> str:
    """Format bytes in MiB or GiB; a dash for None and 0."""
    return "–" if not value else f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"


def format_seconds(seconds: float) -> str:
    """Format a time in seconds, minutes or hours."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def format_flops(exaflops: float) -> str:
    """Format floating-point operations with a suitable unit: `2.45 TFLOPs`, `31.2 exaFLOPs`."""
    units = (("exaFLOPs", 1.0), ("PFLOPs", 1e-3), ("TFLOPs", 1e-6), ("GFLOPs", 1e-9))
    name, unit = next((unit for unit in units if exaflops >= unit[1]), units[-1])
    value = exaflops / unit
    return f"{value:,.0f} {name}" if value >= 1000 else f"{value:.3g} {name}"


def format_count(count: int, noun: str) -> str:
    """Format a count with its noun: `1 image`, `1,200 images`."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def format_task_title(task: Task, samples: str) -> str:
    """Format the title of a task, such as `Multi-label image classification`.

    `samples` is the noun of its inputs: `images`, `clips`, `volumes` or `signals`.
    """
    noun = "Video" if samples == "clips" else samples.removesuffix("s").capitalize()
    title = TASK_TITLES[task.name].format(noun=noun)
    if getattr(task, "multilabel", False):
        return f"Multi-label {title[0].lower()}{title[1:]}"
    return "Instance segmentation" if task.masks else title


def format_breakable_name(name: str) -> Any:
    """Escape a name as markup that may break after a slash, backslash or one of `- _ . :`."""
    from markupsafe import Markup, escape

    return Markup("<wbr>").join(escape(piece) for piece in re.split(r"(?<=[/\\\-_.:])(?=.)", name))


def format_file_name(name: str) -> Any:
    """Return the file name of an image as markup, with the full path as its title."""
    from markupsafe import Markup

    return Markup('<span title="{}">{}</span>').format(name, format_breakable_name(PurePath(name).name))


def render_template(template: str, **values: Any) -> str:
    """Render a template of this folder with `values`; the formatters of this module are its filters."""
    return get_template_environment().get_template(template).render(term=MetricTerms(), **values)


@cache
def get_template_environment() -> Environment:
    """Return the environment of the templates, which compiles each template once."""
    from jinja2 import Environment, PackageLoader

    loader = PackageLoader("vitreous", "reports/pages")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, loader=loader)
    environment.filters |= {"seconds": format_seconds, "percent": format_percent, "share": format_share_markup}
    environment.filters |= {
        "number": format_number,
        "bytes": format_bytes,
        "name": format_breakable_name,
        "counted": format_count,
    }
    environment.filters |= {"flops": format_flops, "file": format_file_name, "explained": explain_metric}
    return environment
