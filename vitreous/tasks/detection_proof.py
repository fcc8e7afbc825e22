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
    `num_matched` as well. Largest differences of these: `max_box_difference`, of an edge in pixels;
    `max_score_difference`; `max_mask_difference`, the share of the pixels that only one mask contains.
    `images_per_second`: images/s of both."""

    images: int
    objects: int
    num_matched: int
    max_box_difference: float
    _: KW_ONLY
    max_score_difference: float
    max_mask_difference: float
    images_per_second: tuple[float, float]
    is_finite: bool

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison with the keys of `export --json`."""
        return {
            "images": self.images,
            "max_abs_logit_difference": None,
            "top1_agreement": None,
            "top1": None,
            "objects": self.objects,
            "object_agreement": self.num_matched / self.objects if self.objects else None,
            "max_box_difference": self.max_box_difference,
            "max_score_difference": self.max_score_difference,
            "max_mask_difference": self.max_mask_difference,
            "images_per_second": self.images_per_second[1],
            "original_images_per_second": self.images_per_second[0],
        }

    def get_rejection_reason(self, allowed: float | None, quantised: str | None = None) -> str:
        """Return why the export is rejected, "" if it is accepted. `allowed`: the share of objects that may differ.
        There is no `quantised` detector."""
        if not self.is_finite:
            return "its outputs are not finite"
        if not self.objects:
            return "the model detects no objects on these images, so the export cannot be verified"
        share = OBJECT_TOLERANCE if allowed is None else allowed
        if 1 - self.num_matched / self.objects > share + 1e-9:
            return f"{1 - self.num_matched / self.objects:.1%} of the objects differ (limit {share:.1%})"
        return ""


def compare_objects(
    original: Any, export: Any, images: VerificationImages, min_score: float, progress: Callable[[int], None]
) -> ObjectComparison:
    """Detect objects with both engines, alternating chunk by chunk; the first chunk is not timed.

    `min_score`: the minimum score of the model's objects; an object just above it may be missing.
    """
    seconds, timed_images, max_objects, finite = [0.0, 0.0], 0, 1, True
    pairs: list[tuple[Detections, Detections]] = []
    starts = list(range(0, len(images), COMPARISON_BATCH_SIZE))
    rounds = starts * 2 if len(starts) == 1 else starts
    for round_index, start in enumerate(rounds):
        pixels, outputs = images.pixels[start : start + COMPARISON_BATCH_SIZE], list[Sequence[np.ndarray]]()
        for engine_index, engine in enumerate((original, export)):
            start_time = time.perf_counter()
            outputs.append(engine.objects(pixels))
            seconds[engine_index] += (time.perf_counter() - start_time) * bool(round_index)
        timed_images += len(pixels) * bool(round_index)
        if round_index < len(starts):
            finite = finite and all(bool(np.isfinite(array).all()) for array in outputs[1])
            size, max_objects = (pixels.shape[2], pixels.shape[3]), outputs[0][1].shape[1]
            image_pairs = zip(*(zip(*engine_outputs, strict=True) for engine_outputs in outputs), strict=True)
            pairs += [(decode_detections(ours, size), decode_detections(theirs, size)) for ours, theirs in image_pairs]
        progress(min(start + COMPARISON_BATCH_SIZE, len(images)))
    rates = timed_images / seconds[0], timed_images / seconds[1]
    differences = [
        difference for ours, theirs in pairs for difference in match_both_ways(ours, theirs, min_score, max_objects)
    ]
    matched = [difference for difference in differences if difference is not None]
    boxes, scores, masks = np.max(matched, 0).tolist() if matched else (0.0, 0.0, 0.0)
    return ObjectComparison(
        len(images),
        len(differences),
        num_matched=len(matched),
        max_box_difference=boxes,
        max_score_difference=scores,
        max_mask_difference=masks,
        images_per_second=rates,
        is_finite=finite,
    )


def match_both_ways(
    ours: Detections, theirs: Detections, min_score: float, max_objects: int
) -> list[tuple[float, float, float] | None]:
    """Return differences of box, score and mask for each object of either side; None if the other side does not detect
    it. An object is skipped if it is missing only because of its score: within `SCORE_TOLERANCE` of `min_score`, or of
    the lowest score of an output with all `max_objects` slots in use."""
    differences: list[tuple[float, float, float] | None] = []
    for source, target in ((ours, theirs), (theirs, ours)):
        floor = max(min_score, float(target.scores[-1]) if len(target) >= max_objects else 0.0)
        for index in range(len(source)):
            difference = measure_object_difference(source, index, target)
            if difference is not None or source.scores[index] > floor + SCORE_TOLERANCE:
                differences.append(difference)
    return differences


def measure_object_difference(source: Detections, index: int, target: Detections) -> tuple[float, float, float] | None:
    """Return differences of box, score and mask to the nearest object of the same class; None above the tolerances."""
    same_class = np.flatnonzero(target.labels == source.labels[index])
    if not len(same_class):
        return None
    box_distances = np.abs(target.boxes[same_class] - source.boxes[index]).max(1)
    nearest = int(same_class[np.argmin(box_distances)])
    box, score = float(box_distances.min()), abs(float(target.scores[nearest] - source.scores[index]))
    mask = 0.0
    if source.masks is not None and target.masks is not None:
        mask_pair = (rle_to_mask(runs, source.size) for runs in (source.masks[index], target.masks[nearest]))
        mask = float((next(mask_pair) != next(mask_pair)).mean())
    return (box, score, mask) if box <= BOX_TOLERANCE and score <= SCORE_TOLERANCE and mask <= MASK_TOLERANCE else None
