"""vitreous doctor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vitreous.cli.console import Console


@dataclass(frozen=True)
class Options:
    """Versions, devices, number formats, and a training step of two seconds.

    Example: vitreous doctor
    """

    device: str = "auto"
    """auto, cpu, cuda, cuda:1 or mps."""


def run(options: Options, console: Console) -> dict[str, Any]:
    """Print what there is and what it does."""
    from vitreous.cores import Neighbours, describe_share
    from vitreous.jobs.doctor import examine

    document = examine(options.device)
    console.table(["doctor", ""], [[name.replace("_", " "), value] for name, value in document.items()])
    if (document["other_work"] or 0) >= Neighbours.SHARE:
        console.note(describe_share(document["other_work"]))
    return document
