"""The available trackers, and the distribution of a run's metrics, images and bundle to them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from vitreous.errors import Interrupted, ResourceError, install_hint
from vitreous.progress import ProgressListener
from vitreous.training.folder import RunFolder
from vitreous.training.trackers.base import MetricsLine, Status, Tracker
from vitreous.training.trackers.channel import TRACKERS_FILE, TrackerChannel, TrackerProgress


class TrackerEntry(NamedTuple):
    """An available tracker: the module and class of its adapter, the library that it requires, and the extra that
    installs it."""

    module: str
    kind: str
    library: str
    extra: str

    def make(self) -> Tracker:
        """Create the adapter of the tracker."""
        return getattr(import_module(f"vitreous.training.trackers.{self.module}"), self.kind)()


TRACKERS = {
    "tensorboard": TrackerEntry("tensorboard", "TensorBoard", "torch.utils.tensorboard", "tensorboard"),
    "wandb": TrackerEntry("weights_and_biases", "WeightsAndBiases", "wandb", "wandb"),
    "mlflow": TrackerEntry("mlflow", "MLflow", "mlflow", "mlflow"),
}


def choose_trackers(names: Sequence[str], resumed: RunFolder | None, listener: ProgressListener) -> tuple[str, ...]:
    """Return the trackers of a run: `names`, or those of the `resumed` run if `names` is empty. Their libraries are
    imported here, before any thread starts.

    Raises ResourceError if a tracker in `names` is not installed. If a tracker of the resumed run is not installed,
    prints a note.
    """
    stored = (
        tuple(TrackerProgress(resumed.path).entries) if resumed and (resumed.path / TRACKERS_FILE).is_file() else ()
    )
    available = []
    for name in dict.fromkeys(names or stored):
        if name not in TRACKERS:
            continue
        try:
            import_module(TRACKERS[name].library)
            available.append(name)
        except ImportError:
            hint = install_hint(TRACKERS[name].extra)
            if names:
                raise ResourceError(f"{name} is not installed", f"{hint}, or remove --log-to {name}") from None
            listener.note(f"{name} is not installed, so this run is no longer logged to it; {hint}")
    return tuple(available)


class Trackers:
    """All trackers of a run; a `MetricsSink` of its folder. No method raises, and only `close` blocks, for a limited
    time."""

    def __init__(self, names: Sequence[str], folder: RunFolder, listener: ProgressListener) -> None:
        self.folder, self.listener = folder, listener
        progress = TrackerProgress(folder.path)
        self.channels = [TrackerChannel(name, TRACKERS[name].make, progress, folder) for name in names]
        self.started = False
        self.reported: set[str] = set()

    def resume_from(self, step: int, lines: list[MetricsLine]) -> None:
        """Start all trackers at the first call: the run continues from `step`, and `lines` are its metrics so far.
        Later calls have no effect."""
        if self.started or not self.channels:
            return
        self.started = True
        for channel in self.channels:
            channel.start(step, lines)

    def log_line(self, line: MetricsLine) -> None:
        """Send a line of metrics to all trackers."""
        self.send("log_line", dict(line))

    def log_images(self, images: Mapping[str, Image.Image], step: int) -> None:
        """Send images by name to all trackers, at an optimiser step."""
        self.send("log_images", images, step)

    def log_bundle(self, bundle: Path) -> None:
        """Send the folder of the trained model to all trackers."""
        self.send("log_bundle", bundle)

    def send(self, call: str, *arguments: Any) -> None:
        """Queue a call of the method `call` at all trackers that are not disabled."""
        for channel in self.channels:
            channel.enqueue(call, *arguments)
        self.report_problems()

    def report_problems(self) -> None:
        """Print one warning for each disabled tracker, the first time only."""
        for channel in self.channels:
            if channel.problem and channel.name not in self.reported:
                self.reported.add(channel.name)
                self.listener.note(
                    f"{channel.name} no longer receives this run ({channel.problem}); metrics.jsonl is complete, and "
                    "a resumed run sends the missing lines"
                )

    def close(self, status: Status, seconds: float) -> None:
        """End the run at all trackers with its status. Together they have `seconds` to send their queued calls."""
        path = self.folder.summary
        summary = json.loads(path.read_text("utf-8")) if status == "finished" and path.is_file() else {}
        self.send("finish", status, summary)
        deadline = time.monotonic() + seconds
        for channel in self.channels:
            channel.close(deadline)
        self.report_problems()


@contextmanager
def run_trackers(
    names: Sequence[str], folder: RunFolder, listener: ProgressListener, seconds: float
) -> Iterator[Trackers]:
    """Yield the trackers of a run, and close them after the block with its status, for at most `seconds`."""
    trackers = Trackers(names, folder, listener)
    status: Status = "failed"
    try:
        yield trackers
        status = "finished"
    except Interrupted:
        status = "stopped"
        raise
    finally:
        trackers.close(status, seconds)
