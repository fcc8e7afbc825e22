"""What a tracker is: the few calls that a run makes to a program that shows runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from PIL import Image

Status = Literal["finished", "stopped", "failed"]
MetricsLine = Mapping[str, Any]  # of metrics.jsonl: numbers or None by name, "step" and "epoch" among them


@dataclass(frozen=True)
class RunInfo:
    """A run as a tracker hears of it, once, before the first line.

    `identity`: what the tracker called it when the run began, empty for a new one. `step`: the optimiser step that the
    run goes on from, 0 for a new one. `config` is config.yaml as dicts, lists, numbers and strings.
    """

    folder: Path
    identity: str
    step: int
    config: dict[str, Any]

    @property
    def name(self) -> str:
        """The name of the run: that of its folder."""
        return self.folder.resolve().name


class Tracker(Protocol):
    """One program that shows runs. All calls come from one thread, in order; any of them may raise or hang.

    `rewinds`: whether `start` drops lines after `RunInfo.step` that the tracker has. Where it cannot, those lines are
    not sent a second time.
    """

    rewinds: ClassVar[bool]

    def start(self, info: RunInfo) -> str:
        """Make the run, or open that of `info.identity` again; returns its identity."""
        ...

    def log_line(self, line: MetricsLine) -> None:
        """Add a line of metrics."""
        ...

    def log_pictures(self, pictures: Mapping[str, Image.Image], step: int) -> None:
        """Add pictures by name."""
        ...

    def log_bundle(self, bundle: Path) -> None:
        """Add the trained model, a folder, as an artefact."""
        ...

    def finish(self, status: Status, summary: Mapping[str, Any]) -> None:
        """End the run; `summary` is summary.json, empty for a run that did not come to its end."""
        ...


def extract_numbers(line: MetricsLine) -> dict[str, float]:
    """The figures of a line, by name: numbers, less step and what was not measured (None)."""
    return {name: float(value) for name, value in line.items() if value is not None and name != "step"}


def flatten_config(value: Any, path: str = "") -> dict[str, Any]:
    """Nested dicts as one: {"optimizer": {"lr": 1}} -> {"optimizer.lr": 1}."""
    if not isinstance(value, Mapping):
        return {path: value}
    join = f"{path}." if path else ""
    return {name: leaf for key, item in value.items() for name, leaf in flatten_config(item, f"{join}{key}").items()}
