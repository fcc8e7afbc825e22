"""Warnings about likely problems of a run. Each is reported once, with its cause and a fix."""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Callable

import numpy as np

from vitreous.data.split import ArraySplit, FileSplit, Split
from vitreous.tasks.classification_metrics import Report
from vitreous.training.loop import TrainingState

MAX_DUPLICATE_QUERIES = 256  # validation images that are searched among the training images
MAX_DUPLICATE_CANDIDATES = 100_000  # training files above which the search is skipped
EXPLODED_NORM_FACTOR = 100.0  # a gradient norm above this factor times the median is reported
NORM_HISTORY = 100  # steps of the median
SLOW_LOADING_SHARE = 0.3  # share of the time that the loop waits for data, above which loading is slow
SLOW_LOADING_LINES = 3  # consecutive log lines with slow loading after which it is reported


class HealthMonitor:
    """Checks a run for likely problems. `warn` receives the text of each warning; `record_warning` receives its step,
    name and text."""

    def __init__(
        self,
        warn: Callable[[str], None],
        record_warning: Callable[[int, str, str], None] = lambda step, name, text: None,
    ) -> None:
        self.warn, self.record_warning, self.warned = warn, record_warning, set()
        self.last_step = 0
        self.norms: deque[float] = deque(maxlen=NORM_HISTORY)
        self.slow = 0  # consecutive log lines with slow loading

    def warn_once(self, name: str, text: str) -> None:
        """Report a warning unless a warning of this name was already reported."""
        if name not in self.warned:
            self.warned.add(name)
            self.warn(text)
            self.record_warning(self.last_step, name, text)

    def data(self, train: Split, val: Split | None) -> None:
        """Warn if validation images are byte-identical to training images."""
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
        """Warn if the gradient norm of the last step is far above the median. Call it after every step."""
        self.last_step = state.step
        median_norm = float(np.median(self.norms)) if len(self.norms) == NORM_HISTORY else math.inf
        if math.isfinite(state.norm) and state.norm > EXPLODED_NORM_FACTOR * median_norm > 0:
            text = (
                f"step {state.step}: gradient norm {state.norm:.3g} is {state.norm / median_norm:.0f} times the median "
                f"of the last {NORM_HISTORY} steps; lower --lr"
            )
            self.warn_once("norm", text + ("" if state.run.optimizer.clip else ", or use --clip-grad 1"))
        if math.isfinite(state.norm):
            self.norms.append(state.norm)

    def line(self, waiting_share: float, state: TrainingState, cached: bool) -> None:
        """Warn if the loop waits for data for a large share of the time. Call it after every log line.

        `waiting_share` is the share of the time since the last log line, `cached` whether the images are in memory.
        """
        self.slow = self.slow + 1 if waiting_share > SLOW_LOADING_SHARE else 0
        if self.slow == SLOW_LOADING_LINES:
            workers = state.run.data.workers
            advice = (
                "augmentation is the bottleneck: use fewer augmentations"
                if cached
                else f"raise --workers (now {workers}), or use smaller image files"
            )
            self.warn_once("data_wait", f"the model waits for images {waiting_share:.0%} of the time; {advice}")

    def report(self, report: Report, classes: tuple[str, ...]) -> None:
        """Warn if all predictions of an evaluation are the same class."""
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
    """Count the validation images at the `indices` (n,) that are byte-identical to a training image.

    Returns 0 if the comparison would take too long, or if a file cannot be read.
    """
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
    """Return a 16-byte hash of the content of an image file."""
    return hashlib.blake2b(content, digest_size=16).digest()
