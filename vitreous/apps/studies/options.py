"""What a user can say to `study`. Needs no PyTorch."""

from __future__ import annotations

import re
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from vitreous.errors import UsageError

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


@dataclass(frozen=True)
class StudyOptions:
    """Answer a question of a paper: train the runs of one of its tables or figures, and write a page of the result.

    Example: vitreous study positions --data photos/ --seeds 5 --out runs/studies

    Without a name: the list, with what each costs at three scales. A run that another study in --out has made is not
    made again.
    """

    name: Annotated[Positional[str], arg(metavar="NAME")] = ""
    """A study; without a name they are listed."""
    data: str | None = None
    """The data to learn from, as `train` takes it (default: digits, with 30 % of its images held out to judge)."""
    to: Annotated[tuple[str, ...] | None, arg(metavar="[NAME=]DATA...")] = None
    """The other data sets of a study of transfer, few shots or pre-training; of `groups` folders of data sets (default:
    parts of the digits)."""
    scale: Literal["small", "gpu", "published"] | None = None
    """How large models and runs are (default: small)."""
    _: KW_ONLY
    seeds: int | None = None
    """Runs of each cell, seeds 0, 1, 2 … (default: by the scale)."""
    steps: int | None = None
    """Optimiser steps of each run (default: by the scale)."""
    budget: str | None = None
    """Shorten all runs alike so that the study takes about so long here: 90s, 30m, 2h (default: no limit)."""
    ray: str | None = None
    """Make the runs on this Ray cluster (`auto`, HOST:PORT; `local` starts one here); all its machines see --out."""
    resume: bool = False
    """Go on with the study in --out; its settings are those that it began with."""
    out: str = "runs/studies"
    """The folder of studies and of the runs that they share."""
    dry_run: bool = False
    """Print how many runs, hours and bytes it takes, by a few timed steps of each model, and train nothing."""
    device: str | None = None
    """auto, cpu, cuda, cuda:1 or mps (default: auto)."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] | None = None
    """Numbers to compute with (default: auto)."""
    workers: int | None = None
    """Processes that decode images; changes no figure."""

    def __post_init__(self) -> None:
        if self.to is not None and not self.to:
            raise UsageError("--to names no data set", "vitreous study transfer --to pets/ flowers/")
        for name in ("seeds", "steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name} must be at least 1, not {value}")
        if self.budget is not None:
            parse_duration(self.budget)


def parse_duration(text: str) -> float:
    """Seconds of `90s`, `30m`, `1.5h` or `2d`. Raises UsageError for anything else, and for 0."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd])", text.strip().lower())
    seconds = float(match[1]) * UNITS[match[2]] if match else 0.0
    if not seconds:
        raise UsageError(f"--budget cannot be {text!r}", "give a number and a unit: 90s, 30m, 2h, 1d")
    return seconds
