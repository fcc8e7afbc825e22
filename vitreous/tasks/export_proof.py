"""Compare the outputs of an exported file with those of its model on the same images."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import numpy as np

COMPARISON_BATCH_SIZE = 16  # images per chunk
LOGIT_TOLERANCE = 1e-3  # maximum difference of a logit, or of a feature, in a float32 export
MAX_CHANGED_SHARE = {None: 0.0, "int8": 0.02}  # maximum share of changed predictions, by quantisation


@dataclass(frozen=True)
class VerificationImages:
    """Images for the verification of an export.

    `pixels` are (n, C, *image). `labels` are class indices (n,), or (n, K) in {0, 1}, or None. `name` is the name of
    their dataset.
    """

    pixels: np.ndarray
    labels: np.ndarray | None
    name: str

    def __len__(self) -> int:
        return len(self.pixels)

    def take(self, selection: slice) -> VerificationImages:
        """Return the images in a range."""
        return replace(
            self, pixels=self.pixels[selection], labels=None if self.labels is None else self.labels[selection]
        )


@dataclass(frozen=True)
class ExportComparison:
    """The result of `compare_outputs`.

    - `max_difference`: the largest difference of an output.
    - `agreement`: the share of images with the same top-1 class, of equal multi-label decisions, of pixels with the
      same class, or of features with a cosine of at least 0.99 to the model's.
    - `top1_accuracies`: top-1 of the model and of the export, for single-label data.
    - `images_per_second`: throughput of the model and of the export.
    - `is_finite`: whether all outputs of the export are finite.
    """

    images: int
    max_difference: float
    agreement: float
    top1_accuracies: tuple[float, float] | None
    _: KW_ONLY
    images_per_second: tuple[float, float]
    is_finite: bool
    tolerance: float = 0.0  # maximum share of predictions that may change in float32

    def to_dict(self) -> dict[str, Any]:
        """Convert the comparison to a dict with the keys of `export --json`."""
        return {
            "images": self.images,
            "max_abs_logit_difference": self.max_difference,
            "top1_agreement": self.agreement,
            "top1": None
            if self.top1_accuracies is None
            else {"original": self.top1_accuracies[0], "export": self.top1_accuracies[1]},
            "images_per_second": self.images_per_second[1],
            "original_images_per_second": self.images_per_second[0],
        }

    def get_rejection_reason(self, allowed: float | None, quantised: str | None = None) -> str:
        """Return why the export is rejected, "" if it is accepted.

        `allowed` is the maximum share of predictions that may change; None for 2 % in int8, else `tolerance`. Top-1 may
        fall by half of it. If `allowed` is None, float32 outputs may differ by at most `LOGIT_TOLERANCE`.
        """
        if not self.is_finite:
            return "its outputs are not finite"
        share = max(MAX_CHANGED_SHARE[quantised], self.tolerance) if allowed is None else allowed
        reasons: list[str] = []
        if 1 - self.agreement > share + 1e-9:
            reasons.append(f"{1 - self.agreement:.1%} of its predictions differ (limit {share:.1%})")
        if self.top1_accuracies and self.top1_accuracies[0] - self.top1_accuracies[1] > share / 2 + 1e-9:
            reasons.append(
                f"its top-1 is {self.top1_accuracies[1]:.2%}, below the model's {self.top1_accuracies[0]:.2%}"
            )
        if quantised is None and allowed is None and self.max_difference > LOGIT_TOLERANCE:
            reasons.append(f"its outputs differ by up to {self.max_difference:.1e} (limit {LOGIT_TOLERANCE:.0e})")
        return ", ".join(reasons)


def compare_outputs(
    original: Any, export: Any, images: VerificationImages, task: Any, progress: Callable[[int], None]
) -> ExportComparison:
    """Compute the outputs of the engines of a model and of its export, alternating chunk by chunk, and compare them.
    The first chunk is not timed.

    Outputs are logits, or features for a model without a head. `progress` is called with the number of finished images.
    """
    seconds, timed_images = [0.0, 0.0], 0
    max_difference, agreement_sum, correct_counts, is_finite = 0.0, 0.0, np.zeros(2), True
    labels = images.labels
    if labels is not None and task.count_correct(np.zeros((1, len(task.outputs))), labels[:1]) is None:
        labels = None
    starts = list(range(0, len(images), COMPARISON_BATCH_SIZE))
    rounds: list[int] = starts * 2 if len(starts) == 1 else starts
    for round_index, start in enumerate(rounds):
        pixels, outputs = images.pixels[start : start + COMPARISON_BATCH_SIZE], list[np.ndarray]()
        for engine_index, engine in enumerate((original, export)):
            start_time = time.perf_counter()
            outputs.append(task.compute(engine, pixels).astype(np.float64))
            seconds[engine_index] += (time.perf_counter() - start_time) * bool(round_index)
        ours, theirs = outputs
        if round_index < len(starts):
            is_finite = is_finite and bool(np.isfinite(theirs).all())
            max_difference = max(max_difference, float(np.abs(ours - theirs).max())) if is_finite else float("inf")
            agreement_sum += task.measure_agreement(ours, theirs) * len(pixels)
            if labels is not None:
                correct_counts += [
                    task.count_correct(engine_outputs, labels[start : start + COMPARISON_BATCH_SIZE]) or 0
                    for engine_outputs in (ours, theirs)
                ]
        timed_images += len(pixels) * bool(round_index)
        progress(min(start + COMPARISON_BATCH_SIZE, len(images)))
    throughputs = timed_images / seconds[0], timed_images / seconds[1]
    top1 = None if labels is None else (float(correct_counts[0]) / len(labels), float(correct_counts[1]) / len(labels))
    return ExportComparison(
        len(images),
        max_difference,
        agreement=agreement_sum / len(images),
        top1_accuracies=top1,
        images_per_second=throughputs,
        is_finite=is_finite,
        tolerance=task.export_tolerance,
    )
