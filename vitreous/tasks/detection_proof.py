"""Compare an exported detector with its model on the same images: matching objects, and largest differences."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np

from vitreous.data.annotations.shapes import rle_to_mask
from vitreous.tasks.detections import Detections, decode_detections
from vitreous.tasks.export_proof import COMPARISON_BATCH_SIZE, VerificationImages

BOX_TOLERANCE = 0.01  # pixels that the edge of a box may differ by
SCORE_TOLERANCE = 1e-3  # that a score may differ by
MASK_TOLERANCE = 0.001  # share of the image's pixels that a mask may differ by
OBJECT_TOLERANCE = 0.001  # share of the objects that only one of the two may detect


@dataclass(frozen=True)
class ObjectComparison:
    """The result of the comparison. Of all `objects`, those of the original and those of the export, the other detects
    `same` as well. Largest differences of these: `boxes`, of an edge in pixels; `scores`; `masks`, the share of the
    pixels that only one mask contains. `rates`: images/s of both."""

    images: int
    objects: int
    same: int
    boxes: float
    _: KW_ONLY
    scores: float
    masks: float
    rates: tuple[float, float]
    finite: bool

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison with the keys of `export --json`."""
        return {
            "images": self.images,
            "max_abs_logit_difference": None,
            "top1_agreement": None,
            "top1": None,
            "objects": self.objects,
            "object_agreement": self.same / self.objects if self.objects else None,
            "max_box_difference": self.boxes,
            "max_score_difference": self.scores,
            "max_mask_difference": self.masks,
            "images_per_second": self.rates[1],
            "original_images_per_second": self.rates[0],
        }

    def lost(self, allowed: float | None, quantised: str | None = None) -> str:
        """Return why the export is rejected, "" if it is accepted. `allowed`: the share of objects that may differ.
        There is no `quantised` detector."""
        if not self.finite:
            return "its outputs are not finite"
        if not self.objects:
            return "the model detects no objects on these images, so the export cannot be verified"
        share = OBJECT_TOLERANCE if allowed is None else allowed
        if 1 - self.same / self.objects > share + 1e-9:
            return f"{1 - self.same / self.objects:.1%} of the objects differ (limit {share:.1%})"
        return ""


def compare_objects(
    original: Any, export: Any, pictures: VerificationImages, least: float, progress: Callable[[int], None]
) -> ObjectComparison:
    """Detect objects with both engines, alternating chunk by chunk; the first chunk is not timed.

    `least`: the minimum score of the model's objects; an object just above it may be missing.
    """
    seconds, counted, room, finite = [0.0, 0.0], 0, 1, True
    pairs: list[tuple[Detections, Detections]] = []
    starts = list(range(0, len(pictures), COMPARISON_BATCH_SIZE))
    rounds = starts * 2 if len(starts) == 1 else starts
    for number, start in enumerate(rounds):
        pixels, answers = pictures.pixels[start : start + COMPARISON_BATCH_SIZE], list[Sequence[np.ndarray]]()
        for side, engine in enumerate((original, export)):
            began = time.perf_counter()
            answers.append(engine.objects(pixels))
            seconds[side] += (time.perf_counter() - began) * bool(number)
        counted += len(pixels) * bool(number)
        if number < len(starts):
            finite = finite and all(bool(np.isfinite(part).all()) for part in answers[1])
            size, room = (pixels.shape[2], pixels.shape[3]), answers[0][1].shape[1]
            rows = zip(*(zip(*answer, strict=True) for answer in answers), strict=True)
            pairs += [(decode_detections(ours, size), decode_detections(theirs, size)) for ours, theirs in rows]
        progress(min(start + COMPARISON_BATCH_SIZE, len(pictures)))
    rates = counted / seconds[0], counted / seconds[1]
    differences = [one for ours, theirs in pairs for one in match_both_ways(ours, theirs, least, room)]
    within = [one for one in differences if one is not None]
    boxes, scores, masks = np.max(within, 0).tolist() if within else (0.0, 0.0, 0.0)
    return ObjectComparison(
        len(pictures),
        len(differences),
        same=len(within),
        boxes=boxes,
        scores=scores,
        masks=masks,
        rates=rates,
        finite=finite,
    )


def match_both_ways(
    ours: Detections, theirs: Detections, least: float, room: int
) -> list[tuple[float, float, float] | None]:
    """Return differences of box, score and mask for each object of either side; None if the other side does not detect
    it. An object is skipped if it is missing only because of its score: within `SCORE_TOLERANCE` of `least`, or of the
    lowest score of an output with all `room` slots in use."""
    rows: list[tuple[float, float, float] | None] = []
    for one, other in ((ours, theirs), (theirs, ours)):
        floor = max(least, float(other.scores[-1]) if len(other) >= room else 0.0)
        for number in range(len(one)):
            difference = measure_object_difference(one, number, other)
            if difference is not None or one.scores[number] > floor + SCORE_TOLERANCE:
                rows.append(difference)
    return rows


def measure_object_difference(one: Detections, number: int, other: Detections) -> tuple[float, float, float] | None:
    """Return differences of box, score and mask to the nearest object of the same class; None above the tolerances."""
    alike = np.flatnonzero(other.labels == one.labels[number])
    if not len(alike):
        return None
    apart = np.abs(other.boxes[alike] - one.boxes[number]).max(1)
    place = int(alike[np.argmin(apart)])
    box, score = float(apart.min()), abs(float(other.scores[place] - one.scores[number]))
    mask = 0.0
    if one.masks is not None and other.masks is not None:
        sides = (rle_to_mask(runs, one.size) for runs in (one.masks[number], other.masks[place]))
        mask = float((next(sides) != next(sides)).mean())
    return (box, score, mask) if box <= BOX_TOLERANCE and score <= SCORE_TOLERANCE and mask <= MASK_TOLERANCE else None
