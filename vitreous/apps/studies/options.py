"""Command-line options of `vitreous study`. Needs no PyTorch."""

from __future__ import annotations

import re
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from vitreous.errors import UsageError

DURATION_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


@dataclass(frozen=True)
class StudyOptions:
    """Reproduce a table or figure of a paper: train its runs and write a page with the result.

    Example: vitreous study positions --data photos/ --seeds 5 --out runs/studies

    Without a name: list the studies with their cost at three scales. Studies in one --out folder share runs.
    """

    name: Annotated[Positional[str], arg(metavar="NAME")] = ""
    """Name of a study; without it, the list of studies."""
    data: str | None = None
    """Training dataset, as for `train` (default: digits, with 30 % of the training images held out for validation)."""
    to: Annotated[tuple[str, ...] | None, arg(metavar="[NAME=]DATA...")] = None
    """Target datasets of studies of transfer, few-shot learning or pre-training; for `groups`, folders of datasets
    (default: subsets of the digits)."""
    scale: Literal["small", "gpu", "published"] | None = None
    """Size of models and runs (default: small)."""
    _: KW_ONLY
    seeds: int | None = None
    """Runs per cell, with seeds 0, 1, 2 ... (default: from the scale)."""
    steps: int | None = None
    """Optimiser steps per run (default: from the scale)."""
    budget: str | None = None
    """Shorten all runs by one factor to fit this time on this machine: 90s, 30m, 2h (default: no limit)."""
    ray: str | None = None
    """Ray cluster that runs the trainings: `auto`, HOST:PORT, or `local` to start one here. All its machines need
    access to --out."""
    resume: bool = False
    """Continue the study in --out with its settings."""
    out: str = "runs/studies"
    """Folder for studies and the runs that they share."""
    dry_run: bool = False
    """Estimate runs, hours and disk space from a few timed steps per model; train nothing."""
    device: str | None = None
    """auto, cpu, cuda, cuda:1 or mps (default: auto)."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] | None = None
    """Compute dtype (default: auto)."""
    workers: int | None = None
    """Processes that decode images; does not change the results."""

    def __post_init__(self) -> None:
        if self.to is not None and not self.to:
            raise UsageError("--to has no dataset", "use vitreous study transfer --to pets/ flowers/")
        for name in ("seeds", "steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name} must be at least 1, not {value}")
        if self.budget is not None:
            parse_duration(self.budget)


def parse_duration(text: str) -> float:
    """Parse `90s`, `30m`, `1.5h` or `2d` to seconds. Raises UsageError for any other form, and for 0."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd])", text.strip().lower())
    seconds = float(match[1]) * DURATION_UNITS[match[2]] if match else 0.0
    if not seconds:
        raise UsageError(f"invalid --budget {text!r}", "use a number and a unit: 90s, 30m, 2h, 1d")
    return seconds
