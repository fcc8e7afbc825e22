"""The interface of experiment trackers: the calls that a run makes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from PIL import Image

Status = Literal["finished", "stopped", "failed"]
MetricsLine = Mapping[str, Any]  # a line of metrics.jsonl: numbers or None by name, including "step" and "epoch"


@dataclass(frozen=True)
class RunInfo:
    """The description of a run that a tracker receives once, before the first line of metrics.

    `tracker_run_id` is the tracker's ID of the run, empty for a new run. `step` is the optimiser step from which the
    run continues, 0 for a new run. `config` is config.yaml as dicts, lists, numbers and strings.
    """

    folder: Path
    tracker_run_id: str
    step: int
    config: dict[str, Any]

    @property
    def name(self) -> str:
        """The name of the run, which is the name of its folder."""
        return self.folder.resolve().name


class Tracker(Protocol):
    """Interface of an experiment tracker. All calls are made from one thread, in order; any of them may raise or hang.

    `rewinds`: whether `start` removes the tracker's lines after `RunInfo.step`. If it does not, these lines are not
    sent a second time.
    """

    rewinds: ClassVar[bool]

    def start(self, info: RunInfo) -> str:
        """Create the run, or reopen the run `info.tracker_run_id`. Returns the tracker's ID of the run."""
        ...

    def log_line(self, line: MetricsLine) -> None:
        """Add a line of metrics."""
        ...

    def log_images(self, images: Mapping[str, Image.Image], step: int) -> None:
        """Add images by name, at an optimiser step."""
        ...

    def log_bundle(self, bundle: Path) -> None:
        """Add the folder of the trained model as an artefact."""
        ...

    def finish(self, status: Status, summary: Mapping[str, Any]) -> None:
        """End the run. `summary` is the content of summary.json, empty if the run did not finish."""
        ...


def extract_numbers(line: MetricsLine) -> dict[str, float]:
    """Return the numbers of a line of metrics by name, without the step and missing values (None)."""
    return {name: float(value) for name, value in line.items() if value is not None and name != "step"}


def flatten_config(value: Any, path: str = "") -> dict[str, Any]:
    """Flatten nested dicts: {"optimizer": {"lr": 1}} -> {"optimizer.lr": 1}."""
    if not isinstance(value, Mapping):
        return {path: value}
    join = f"{path}." if path else ""
    return {name: leaf for key, item in value.items() for name, leaf in flatten_config(item, f"{join}{key}").items()}
