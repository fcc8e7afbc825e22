"""Compare an exported file with its model on the same images."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import numpy as np

CHUNK = 16  # images that both answer in turn
NEAR = 1e-3  # |Δlogit|, or of features, of a float32 export, at most
COSINE = 0.99  # of features that count as the same
DENSE = 0.001  # of pixels, whose two highest logits are equal in more places
LOSS = {None: 0.0, "int8": 0.02}  # share of answers that may change, by what was quantised


@dataclass(frozen=True)
class Pictures:
    """Images that an export is judged on: `pixels` (n, C, *image), their `labels`, (n,) numbers or (n, K) in {0, 1},
    where known, and the name of the set."""

    pixels: np.ndarray
    labels: np.ndarray | None
    name: str

    def __len__(self) -> int:
        return len(self.pixels)

    def part(self, rows: slice) -> Pictures:
        """A part of the images."""
        return replace(self, pixels=self.pixels[rows], labels=None if self.labels is None else self.labels[rows])


@dataclass(frozen=True)
class Proof:
    """The result of the comparison. `agreement`: share of images with the same class first; or, where an image may have
    several classes, of equal decisions; of pixels with the same class; or, of features, of those whose cosine to the
    original's is at least 0.99. `right`: top-1 of the original and of the export, where each image has one label.
    `rates`: images a second of both."""

    images: int
    furthest: float
    agreement: float
    right: tuple[float, float] | None
    _: KW_ONLY
    rates: tuple[float, float]
    finite: bool

    def plain(self) -> dict[str, Any]:
        """The keys of `export --json`."""
        return {
            "images": self.images,
            "max_abs_logit_difference": self.furthest,
            "top1_agreement": self.agreement,
            "top1": None if self.right is None else {"original": self.right[0], "export": self.right[1]},
            "images_per_second": self.rates[1],
            "original_images_per_second": self.rates[0],
        }


def compare_outputs(
    original: Any, export: Any, pictures: Pictures, card: Any, progress: Callable[[int], None]
) -> Proof:
    """Compute all logits by both, or features where there is no head, chunk by chunk in turn; the first chunk is not
    timed."""
    seconds, counted = [0.0, 0.0], 0
    furthest, same, right, finite = 0.0, 0.0, np.zeros(2), True
    labels = pictures.labels
    if labels is not None and card.task.count_hits(np.zeros((1, len(card.task.outputs))), labels[:1]) is None:
        labels = None
    starts = list(range(0, len(pictures), CHUNK))
    rounds: list[int] = starts * 2 if len(starts) == 1 else starts
    for number, start in enumerate(rounds):
        pixels, outputs = pictures.pixels[start : start + CHUNK], []
        for side, engine in enumerate((original, export)):
            began = time.perf_counter()
            outputs.append(outputs_of(engine, card, pixels).astype(np.float64))
            seconds[side] += (time.perf_counter() - began) * bool(number)
        ours, theirs = outputs
        if number < len(starts):
            finite = finite and bool(np.isfinite(theirs).all())
            furthest = max(furthest, float(np.abs(ours - theirs).max())) if finite else float("inf")
            same += agreement(ours, theirs, card) * len(pixels)
            if labels is not None:
                right += [card.task.count_hits(one, labels[start : start + CHUNK]) for one in (ours, theirs)]
        counted += len(pixels) * bool(number)
        progress(min(start + CHUNK, len(pictures)))
    rates = counted / seconds[0], counted / seconds[1]
    tops = None if labels is None else (float(right[0]) / len(labels), float(right[1]) / len(labels))
    return Proof(len(pictures), furthest, agreement=same / len(pictures), right=tops, rates=rates, finite=finite)


def outputs_of(engine: Any, card: Any, pixels: np.ndarray) -> np.ndarray:
    """The logits (B, K) of (B, C, *image) pixels, (B, K, *image) of a dense head, or the features (B, D) without a
    head."""
    return engine.logits(pixels) if card.task.outputs or card.pixel_classes else engine.features(pixels)


def agreement(ours: np.ndarray, theirs: np.ndarray, card: Any) -> float:
    """The share of equal answers in two arrays of (n, K) or (n, K, *image) logits, or of near (n, D) features."""
    if card.task.outputs:
        return card.task.measure_agreement(ours, theirs)
    if not card.pixel_classes:
        norms = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
        return float(((ours * theirs).sum(1) >= COSINE * norms).mean())
    return float((ours.argmax(1) == theirs.argmax(1)).mean())


def lost(proof: Proof, quantised: str | None, allowed: float | None, dense: bool = False) -> str:
    """The reasons against an export, or an empty string. `allowed`: the share of answers that may change; by default
    none in float32, of pixels (`dense`) a thousandth, 2 % in int8. Top-1 may fall by half of that, and
    logits in float32 move by 1e-3."""
    if not proof.finite:
        return "it gives numbers that are not finite"
    share = max(LOSS[quantised], DENSE * dense) if allowed is None else allowed
    reasons = []
    if 1 - proof.agreement > share + 1e-9:
        reasons.append(f"{1 - proof.agreement:.1%} of its answers are others, {share:.1%} may be")
    if proof.right and proof.right[0] - proof.right[1] > share / 2 + 1e-9:
        reasons.append(f"its top-1 is {proof.right[1]:.2%}, not {proof.right[0]:.2%}")
    if quantised is None and allowed is None and proof.furthest > NEAR:
        reasons.append(f"its outputs are up to {proof.furthest:.1e} off, {NEAR:.0e} may be")
    return ", ".join(reasons)
