"""An exported file beside the model that it was made of, on the same pictures: how far their answers are apart, and how
fast both are."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vitreous.errors import DataError
from vitreous.evaluation.calibration import probabilities
from vitreous.evaluation.multilabel import THRESHOLD
from vitreous.serving.card import Card
from vitreous.serving.runtime import Runtime

FEWEST, MOST = 8, 200  # pictures to judge an export on: fewer prove nothing, more take long and tell little
CHUNK = 16  # pictures that both answer in turn
NEAR = 1e-3  # |Δlogit| of a float32 export, at most
LOSS = {None: 0.0, "int8": 0.02}  # share of answers that may change, by what was quantised


@dataclass(frozen=True)
class Pictures:
    """What an export is judged on: `pixels` (n, C, *image), their `labels`, (n,) numbers or (n, K) in {0, 1}, where
    known, and what they are called."""

    pixels: np.ndarray
    labels: np.ndarray | None
    name: str

    def __len__(self) -> int:
        return len(self.pixels)

    def part(self, rows: slice) -> Pictures:
        """Some of them."""
        return replace(self, pixels=self.pixels[rows], labels=None if self.labels is None else self.labels[rows])


@dataclass(frozen=True)
class Proof:
    """What came of it. `agreement`: of the class of the highest logit, or, where an image may have several classes, of
    each decision. `right`: top-1 of the original and of the export, where each picture has one label. Rates are images
    a second."""

    images: int
    furthest: float
    agreement: float
    right: tuple[float, float] | None
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


def compare(
    original: Runtime, export: Runtime, pictures: Pictures, card: Card, progress: Callable[[int], None]
) -> Proof:
    """Ask both about every picture, chunk by chunk in turn. Speed is of all chunks but the first, which warms both
    up."""
    outputs: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    seconds, counted = [0.0, 0.0], 0
    starts = list(range(0, len(pictures), CHUNK))
    rounds: list[int] = starts * 2 if len(starts) == 1 else starts
    for number, start in enumerate(rounds):
        pixels = pictures.pixels[start : start + CHUNK]
        for side, runtime in enumerate((original, export)):
            began = time.perf_counter()
            logits = runtime.logits(pixels)
            seconds[side] += (time.perf_counter() - began) * bool(number)
            if number < len(starts):
                outputs[side].append(logits)
        counted += len(pixels) * bool(number)
        progress(min(start + CHUNK, len(pictures)))
    ours, theirs = (np.concatenate(side).astype(np.float64) for side in outputs)
    labels = pictures.labels
    right = (
        None
        if labels is None or labels.ndim == 2
        else tuple(float((side.argmax(1) == labels).mean()) for side in (ours, theirs))
    )
    finite = bool(np.isfinite(theirs).all())
    return Proof(
        len(pictures),
        float(np.abs(ours - theirs).max()) if finite else float("inf"),
        agreement(ours, theirs, card),
        right,  # type: ignore[arg-type]
        (counted / seconds[0], counted / seconds[1]),
        finite,
    )


def agreement(ours: np.ndarray, theirs: np.ndarray, card: Card) -> float:
    """The share of the (n, K) answers that are the same ones."""
    if not card.multilabel:
        return float((ours.argmax(1) == theirs.argmax(1)).mean())
    decided = [probabilities(side / card.temperature, card.loss) > THRESHOLD for side in (ours, theirs)]
    return float((decided[0] == decided[1]).mean())


def lost(proof: Proof, quantised: str | None, allowed: float | None) -> str:
    """What speaks against an export, or nothing. `allowed`: the share of answers that may change; by default none in
    float32, 2 % in int8. Top-1 may fall by half of that, and logits in float32 move by 1e-3."""
    share = LOSS[quantised] if allowed is None else allowed
    reasons = [] if proof.finite else ["it gives logits that are not finite"]
    if proof.finite and 1 - proof.agreement > share + 1e-9:
        reasons.append(f"{1 - proof.agreement:.1%} of its answers are others, {share:.1%} may be")
    if proof.finite and proof.right and proof.right[0] - proof.right[1] > share / 2 + 1e-9:
        reasons.append(f"its top-1 is {proof.right[1]:.2%}, not {proof.right[0]:.2%}")
    if proof.finite and quantised is None and allowed is None and proof.furthest > NEAR:
        reasons.append(f"its logits are up to {proof.furthest:.1e} off, {NEAR:.0e} may be")
    return ", ".join(reasons)


def enough(pictures: Pictures) -> Pictures:
    """The same. Raises DataError for too few."""
    if len(pictures) < FEWEST:
        raise DataError(
            f"an export is judged on at least {FEWEST} pictures; {pictures.name} has {len(pictures)}",
            "name more: --images",
        )
    return pictures
