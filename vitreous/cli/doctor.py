"""vitreous doctor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from vitreous.training.doctor import examine

    found = examine(options.device)
    console.table(["doctor", ""], [[name.replace("_", " "), str(value)] for name, value in found.items()])
    return found
