"""Build the page of `gpu.py`, Markdown tables, from its rows."""

from __future__ import annotations

import time
from typing import Any

import torch

from vitreous.apps.bench.report import describe_packages
from vitreous.system.machine import get_processor_name

Row = dict[str, Any]
TABLE_HEAD = "| work | contender | images/s (lowest to highest) | of peak, model FLOPs (executed) | memory, GiB | build + first step, s |\n|---|---|---|---|---|---|"


def build_page(rows: list[Row]) -> str:
    """Return the page of a run of `gpu.py`, with one section per section of the rows."""
    cards = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    peaks = [row["peak"] for row in rows if row.get("peak")]
    lines = [
        f"# GPU, {time.strftime('%Y-%m-%d')}",
        "",
        f"{', '.join(cards) or 'no GPU'}; {get_processor_name()}, {torch.get_num_threads()} threads; torch {torch.__version__}, {describe_packages()}.",
        "",
        "    bash benchmarks/gpu.sh OUT",
        "",
        "Each throughput is the median of three windows of 0.4 s after warm-up. Executed FLOPs omit the operations of the",
        "last block that vitreous skips, because the head uses only one token. Shares are relative to the peak, which is",
        "measured in the same process by",
        f"products of 8192 x 8192 matrices in bfloat16, {min(peaks, default=0) / 1e12:.0f} to {max(peaks, default=0) / 1e12:.0f} TFLOP/s.",
        "",
    ]
    for name in dict.fromkeys(row["section"] for row in rows if "section" in row):
        section_rows = [row for row in rows if row.get("section") == name]
        lines += [f"## {name.capitalize()}", "", *SECTION_FORMATTERS.get(name, timed_lines)(section_rows), ""]
    return "\n".join(lines)


def timed_lines(rows: list[Row]) -> list[str]:
    """Return the table of timed cases, with their throughput, share of the peak, memory and start-up time."""
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
        throughput = f"{row['images_per_second']:.1f} ({spread[0]:.1f} to {spread[1]:.1f})"
        lines.append(
            f"| {row['work']} | {row['contender']} | {throughput} | {share} | {row['memory_bytes'] / 2**30:.1f} | {start} |"
        )
    return [*lines, "", *format_duration(rows)]


def format_rows(rows: list[Row]) -> list[str]:
    """Return a list with all metrics of each row."""
    lines = []
    for row in rows:
        if "work" in row:
            metrics = {key: value for key, value in row.items() if key not in ("section", "work", "contender")}
            lines.append(
                f"- {row['work']}, {row['contender']}: "
                + ", ".join(f"{k} {format_value(v)}" for k, v in metrics.items())
            )
    return [*lines, "", *format_duration(rows)]


def format_value(value: Any) -> str:
    """Format a number with four significant digits; other values as text."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def test_lines(rows: list[Row]) -> list[str]:
    """Return the counts of pytest, and the names of failed tests."""
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
    """Return the duration of a section in seconds, as a line."""
    return [f"{row['took']:.0f} s." for row in rows if "took" in row]


SECTION_FORMATTERS = {"tests": test_lines, "loop": format_rows, "limits": format_rows, "cifar": format_rows}
