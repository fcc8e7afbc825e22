"""Warnings about likely problems of a run, each reported once, with cause and fix."""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Callable

import numpy as np

from vitreous.data.split import ArraySplit, FileSplit, Split
from vitreous.tasks.classification_metrics import Report
from vitreous.training.loop import TrainingState

MAX_DUPLICATE_QUERIES, MAX_DUPLICATE_CANDIDATES = (
    256,
    100_000,
)  # validation images to look up, training files to search
EXPLODED_NORM_FACTOR, NORM_HISTORY = 100.0, 100  # factor of the median gradient norm, over this number of steps
SLOW_LOADING_SHARE, SLOW_LOADING_LINES = 0.3, 3  # share of the time, in this number of consecutive log lines


class HealthMonitor:
    """Monitors a run. `warn` is called with each warning, `record_warning` with its step, name and text."""

    def __init__(
        self, tell: Callable[[str], None], keep: Callable[[int, str, str], None] = lambda step, name, text: None
    ) -> None:
        self.warn, self.record_warning, self.warned = tell, keep, set()
        self.last_step = 0  # the last step
        self.norms: deque[float] = deque(maxlen=NORM_HISTORY)
        self.slow = 0

    def warn_once(self, name: str, text: str) -> None:
        """Report a warning, the first time only."""
        if name not in self.warned:
            self.warned.add(name)
            self.warn(text)
            self.record_warning(self.last_step, name, text)

    def data(self, train: Split, val: Split | None) -> None:
        """Warn about validation images that are byte-identical to training images."""
        if val is None or not len(val):
            return
        indices = np.linspace(0, len(val) - 1, min(MAX_DUPLICATE_QUERIES, len(val))).astype(int)
        copies = count_shared_images(train, val, indices)
        if copies:
            share = "all" if copies == len(indices) else f"{copies} of {len(indices)}"
            self.warn_once(
                "data",
                f"{share} sampled validation images are also training images, which inflates accuracy; separate "
                "the splits",
            )

    def step(self, state: TrainingState) -> None:
        """After a step: warn about a gradient norm far above the median."""
        self.last_step = state.step
        median_norm = float(np.median(self.norms)) if len(self.norms) == NORM_HISTORY else math.inf
        if math.isfinite(state.norm) and state.norm > EXPLODED_NORM_FACTOR * median_norm > 0:
            text = (
                f"step {state.step}: gradient norm {state.norm:.3g}, {state.norm / median_norm:.0f} times the median "
                "before; lower --lr"
            )
            self.warn_once("norm", text + ("" if state.run.optimizer.clip else ", or use --clip-grad 1"))
        if math.isfinite(state.norm):
            self.norms.append(state.norm)

    def line(self, waiting_share: float, state: TrainingState, cached: bool) -> None:
        """After a log line: warn about a loop that waits for images."""
        self.slow = self.slow + 1 if waiting_share > SLOW_LOADING_SHARE else 0
        if self.slow == SLOW_LOADING_LINES:
            workers = state.run.data.workers
            advice = (
                "augmentation in memory is the bottleneck: lighten it"
                if cached
                else f"raise --workers ({workers} now) or use smaller files"
            )
            self.warn_once("data_wait", f"{waiting_share:.0%} of the time the model waits for images; {advice}")

    def report(self, report: Report, classes: tuple[str, ...]) -> None:
        """After an evaluation: warn if all predictions are the same class."""
        if report.confusion_cells is None:
            return
        label_classes, predicted_classes = (
            np.unique(report.confusion_cells[:, 0]),
            np.unique(report.confusion_cells[:, 1]),
        )
        if len(label_classes) > 1 and len(predicted_classes) == 1:
            name = classes[int(predicted_classes[0])]
            self.warn_once(
                "one class",
                f"all {report.images} validation images are predicted as {name}: the model has learned nothing yet, or "
                "--lr is too high",
            )


def count_shared_images(train: Split, val: Split, indices: np.ndarray) -> int:
    """Count the validation images of these (n,) indices that are in the training split, byte for byte; 0 if that takes
    too long."""
    if isinstance(train, ArraySplit) and isinstance(val, ArraySplit):
        train_hashes = {hash_image_file(pixels.tobytes()) for pixels in train.pixels}
        return sum(hash_image_file(val.pixels[index].tobytes()) in train_hashes for index in indices)
    if not isinstance(train, FileSplit) or not isinstance(val, FileSplit) or len(train) > MAX_DUPLICATE_CANDIDATES:
        return 0
    try:
        sizes: dict[int, list] = {}
        for path in train.paths:
            sizes.setdefault(path.stat().st_size, []).append(path)
        train_hashes = {}
        copies = 0
        for index in indices:
            path = val.paths[index]
            size = path.stat().st_size
            if size in sizes and size not in train_hashes:
                train_hashes[size] = {hash_image_file(candidate.read_bytes()) for candidate in sizes[size]}
            copies += size in sizes and hash_image_file(path.read_bytes()) in train_hashes[size]
        return copies
    except OSError:
        return 0


def hash_image_file(content: bytes) -> bytes:
    """Return a hash of a file's content."""
    return hashlib.blake2b(content, digest_size=16).digest()
