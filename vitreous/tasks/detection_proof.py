"""Compare an exported detector with its model on the same images: matching objects, and the largest differences."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np

from vitreous.data.annotations.shapes import rle_to_mask
from vitreous.tasks.detections import Detections, decode_detections
from vitreous.tasks.export_proof import COMPARISON_BATCH_SIZE, VerificationImages

BOX_TOLERANCE = 0.01  # maximum difference of an edge of a box in pixels
SCORE_TOLERANCE = 1e-3  # maximum difference of a score
MASK_TOLERANCE = 0.001  # maximum share of the image's pixels in which two masks differ
OBJECT_TOLERANCE = 0.001  # maximum share of objects that only the model or only the export detects


@dataclass(frozen=True)
class ObjectComparison:
    """The result of `compare_objects`.

    - `objects`: the number of objects that the model detects plus the number that the export detects.
    - `num_matched`: the number of these objects that both detect.
    - `max_box_difference`: the largest difference of an edge of matched boxes in pixels.
    - `max_score_difference`: the largest difference of matched scores.
    - `max_mask_difference`: the largest share of the image's pixels in which matched masks differ.
    - `images_per_second`: throughput of the model and of the export.
    - `is_finite`: whether all outputs of the export are finite.
    """

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
        """Convert the comparison to a dict with the keys of `export --json`."""
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
        """Return why the export is rejected, "" if it is accepted. `allowed` is the maximum share of objects that may
        differ, None for `OBJECT_TOLERANCE`. `quantised` is unused, because detectors are not quantised."""
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
    """Detect objects with the engines of a model and of its export, alternating chunk by chunk, and compare them. The
    first chunk is not timed.

    `min_score` is the model's score threshold; an object with a score just above it may be missing. `progress` is
    called with the number of finished images.
    """
    seconds, timed_images, max_objects, is_finite = [0.0, 0.0], 0, 1, True
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
            is_finite = is_finite and all(bool(np.isfinite(array).all()) for array in outputs[1])
            size, max_objects = (pixels.shape[2], pixels.shape[3]), outputs[0][1].shape[1]
            image_pairs = zip(*(zip(*engine_outputs, strict=True) for engine_outputs in outputs), strict=True)
            pairs += [(decode_detections(ours, size), decode_detections(theirs, size)) for ours, theirs in image_pairs]
        progress(min(start + COMPARISON_BATCH_SIZE, len(images)))
    throughputs = timed_images / seconds[0], timed_images / seconds[1]
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
        images_per_second=throughputs,
        is_finite=is_finite,
    )


def match_both_ways(
    ours: Detections, theirs: Detections, min_score: float, max_objects: int
) -> list[tuple[float, float, float] | None]:
    """Match the objects of the model (`ours`) with those of the export (`theirs`), in both directions.

    Returns the differences of box, score and mask for each object, or None if the other side does not detect it. An
    object is skipped if it may be missing only because of its score. This is a score within `SCORE_TOLERANCE` of
    `min_score`, or of the lowest score of an output with all `max_objects` slots in use.
    """
    differences: list[tuple[float, float, float] | None] = []
    for source, target in ((ours, theirs), (theirs, ours)):
        lowest_score = max(min_score, float(target.scores[-1]) if len(target) >= max_objects else 0.0)
        for index in range(len(source)):
            difference = measure_object_difference(source, index, target)
            if difference is not None or source.scores[index] > lowest_score + SCORE_TOLERANCE:
                differences.append(difference)
    return differences


def measure_object_difference(source: Detections, index: int, target: Detections) -> tuple[float, float, float] | None:
    """Return the differences of box, score and mask between the object `index` of `source` and the nearest object of
    the same class in `target`; None if there is none within the tolerances."""
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
