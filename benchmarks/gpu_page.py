"""The page of `gpu.py`: Markdown tables from its rows."""

from __future__ import annotations

import time
from typing import Any

import torch

from vitreous.apps.bench.report import describe_packages
from vitreous.system.machine import get_processor_name

Row = dict[str, Any]
TABLE_HEAD = "| work | contender | images/s (lowest to highest) | of peak, model FLOPs (executed) | memory, GiB | build + first step, s |\n|---|---|---|---|---|---|"


def build_page(rows: list[Row]) -> str:
    """The page of a run."""
    cards = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    peaks = [row["peak"] for row in rows if row.get("peak")]
    lines = [
        f"# GPU, {time.strftime('%Y-%m-%d')}",
        "",
        f"{', '.join(cards) or 'no GPU'}; {get_processor_name()}, {torch.get_num_threads()} threads; torch {torch.__version__}, {describe_packages()}.",
        "",
        "    bash benchmarks/gpu.sh OUT",
        "",
        "Each figure is the median of three windows of 0.4 s after warm-up. Executed FLOPs are those of the model without",
        "what vitreous leaves out of the last block, of which the head reads one token. Shares are of the peak, measured",
        "in the same process:",
        f"products of 8192 x 8192 matrices in bfloat16, {min(peaks, default=0) / 1e12:.0f} to {max(peaks, default=0) / 1e12:.0f} TFLOP/s.",
        "",
    ]
    for name in dict.fromkeys(row["section"] for row in rows if "section" in row):
        own = [row for row in rows if row.get("section") == name]
        lines += [f"## {name.capitalize()}", "", *SECTION_FORMATTERS.get(name, timed_lines)(own), ""]
    return "\n".join(lines)


def timed_lines(rows: list[Row]) -> list[str]:
    """A table of timed cases."""
    lines = [TABLE_HEAD]
    for row in rows:
        if "work" not in row:
            continue
        if "failure" in row:
            lines.append(f"| {row['work']} | {row['contender']} | failed: {row['failure']} | | | |")
            continue
        spread = row.get("images_per_second_range", [row["images_per_second"]] * 2)
        share = ""
        if row.get("share_of_peak") is not None:
            share = f"{row['share_of_peak']:.1%} ({row.get('executed_share_of_peak', row['share_of_peak']):.1%})"
        start = f"{row['build_seconds']:.1f} + {row['first_seconds']:.1f}" if "build_seconds" in row else ""
        rate = f"{row['images_per_second']:.1f} ({spread[0]:.1f} to {spread[1]:.1f})"
        lines.append(
            f"| {row['work']} | {row['contender']} | {rate} | {share} | {row['memory_bytes'] / 2**30:.1f} | {start} |"
        )
    return [*lines, "", *format_duration(rows)]


def format_rows(rows: list[Row]) -> list[str]:
    """Each row as a list of its figures."""
    lines = []
    for row in rows:
        if "work" in row:
            figures = {key: value for key, value in row.items() if key not in ("section", "work", "contender")}
            lines.append(
                f"- {row['work']}, {row['contender']}: "
                + ", ".join(f"{k} {format_value(v)}" for k, v in figures.items())
            )
    return [*lines, "", *format_duration(rows)]


def format_value(value: Any) -> str:
    """A figure with four digits that count."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def test_lines(rows: list[Row]) -> list[str]:
    """What pytest said."""
    lines = []
    for row in rows:
        if "tests" in row:
            lines.append(
                f"{row['tests']} tests, {row['failures']} failures, {row['errors']} errors, {row['skipped']} skipped."
            )
            lines += [f"- {name}" for name in row["failed"]]
        elif "status" in row:
            lines.append(f"pytest ended without a report (status {row['status']}).")
    return [*lines, "", *format_duration(rows)]


def format_duration(rows: list[Row]) -> list[str]:
    """The seconds that the section took."""
    return [f"{row['took']:.0f} s." for row in rows if "took" in row]


SECTION_FORMATTERS = {"tests": test_lines, "loop": format_rows, "limits": format_rows, "cifar": format_rows}
