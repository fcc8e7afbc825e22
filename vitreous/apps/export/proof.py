"""Compare an exported file with its model on the same images, and gather those images."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from vitreous.data.keys import permutation
from vitreous.data.layouts.video import open_sample
from vitreous.data.preprocess import Preprocess
from vitreous.data.run_data import open_run_data, open_training_data, sample_images
from vitreous.data.split import Data
from vitreous.errors import DataError, UsageError
from vitreous.inference.card import Card
from vitreous.inference.class_maps import native
from vitreous.inference.detections import fit_image
from vitreous.inference.engine import Engine
from vitreous.inference.export_file import normalised
from vitreous.inference.sources import Item, read_item, source
from vitreous.inference.tiles import native_pixels
from vitreous.system.cores import default_workers
from vitreous.weights.bundle import Bundle

FEWEST, MOST = 8, 200  # images to judge an export on: fewer prove nothing, more take long and tell little
CALIBRATION = 128  # images that int8 is calibrated on, at most
CHUNK = 16  # images that both answer in turn
NEAR = 1e-3  # |Δlogit|, or of features, of a float32 export, at most
COSINE = 0.99  # of features that count as the same
DENSE = 0.001  # of pixels, whose two highest logits are equal in more places
LOSS = {None: 0.0, "int8": 0.02}  # share of answers that may change, by what was quantised
MORE = "name more: --images"


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
    original: Engine, export: Engine, pictures: Pictures, card: Card, progress: Callable[[int], None]
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
                right += [card.task.count_hits(one, labels[start : start + CHUNK]) or 0 for one in (ours, theirs)]
        counted += len(pixels) * bool(number)
        progress(min(start + CHUNK, len(pictures)))
    rates = counted / seconds[0], counted / seconds[1]
    tops = None if labels is None else (float(right[0]) / len(labels), float(right[1]) / len(labels))
    return Proof(len(pictures), furthest, agreement=same / len(pictures), right=tops, rates=rates, finite=finite)


def outputs_of(engine: Engine, card: Card, pixels: np.ndarray) -> np.ndarray:
    """The logits (B, K) of (B, C, *image) pixels, (B, K, *image) of a dense head, or the features (B, D) without a
    head."""
    return engine.logits(pixels) if card.task.outputs or card.pixel_classes else engine.features(pixels)


def agreement(ours: np.ndarray, theirs: np.ndarray, card: Card) -> float:
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


def gather(
    run: str | os.PathLike[str],
    bundle: Bundle,
    images: Sequence[str],
    data: str | os.PathLike[str] | None,
    calibrate: bool,
) -> tuple[Pictures, list[np.ndarray] | None]:
    """The images to judge on: `images`, files or folders; or `data`; or the run's validation images, or else its test
    images.

    For int8 also normalised images to calibrate on, (1, C, *image) float32 each: of the training split of the data, or,
    where there is none, every other of the images given. Raises UsageError where there are no images, DataError for too
    few.
    """
    opened = None
    if images:
        judged = of_files(images, bundle.preprocess, bool(bundle.object_classes))
    else:
        opened, judged = of_data(run, bundle, data)
    calibration = None
    if calibrate:
        if (train := open_training_data(run, opened)) is not None:
            pixels = (tensor.numpy() for tensor in sample_images(train, bundle.preprocess))
        elif len(judged) < 2 * FEWEST:
            needed = f"{FEWEST} to calibrate int8 on and {FEWEST} others to judge it on are needed"
            raise DataError(f"{judged.name} has {len(judged)} pictures: {needed}", MORE)
        else:
            pixels, judged = iter(judged.part(slice(0, None, 2)).pixels), judged.part(slice(1, None, 2))
        calibration = [normalised(picture[None], bundle.preprocess) for picture in islice(pixels, CALIBRATION)]
        if len(calibration) < FEWEST:
            raise DataError(f"int8 is calibrated on at least {FEWEST} pictures; there are {len(calibration)}", MORE)
    if len(judged) < FEWEST:
        raise DataError(f"an export is judged on at least {FEWEST} pictures; {judged.name} has {len(judged)}", MORE)
    return judged, calibration


def fitted_item(preprocess: Preprocess, item: Item) -> np.ndarray:
    """An item as the (C, *image) pixels that a detector takes. Raises DataError, with its name."""
    return fit_image(native(preprocess, item), preprocess)[0]


def of_files(images: Sequence[str], preprocess: Preprocess, whole: bool = False) -> Pictures:
    """Files, and those in folders; of more than are needed, a choice that is always the same. `whole`: as detectors
    take them. Raises DataError."""
    items = list(source(images))
    chosen = sorted(permutation(len(items), 0, 0)[: 2 * MOST].tolist())
    with ThreadPoolExecutor(default_workers()) as pool:
        read = partial(fitted_item, preprocess) if whole else partial(read_item, preprocess=preprocess, exact=True)
        pixels = list(pool.map(read, [items[row] for row in chosen]))
    name = f"{len(pixels)} of {len(items)} files" if len(pixels) < len(items) else "the files given"
    return Pictures(np.stack(pixels), None, name)


def of_data(run: str | os.PathLike[str], bundle: Bundle, data: str | os.PathLike[str] | None) -> tuple[Data, Pictures]:
    """Images of a data set, or of the run's own, with labels for a model that has classes.

    Raises UsageError where there is no data set, DataError where no image can be read.
    """
    try:
        source, opened = open_run_data(
            run, data, "test", labelled=bool(bundle.task.outputs), targets=bundle.task.label_columns
        )
    except (UsageError, DataError) as error:
        if data is not None:
            raise
        message = f"there are no pictures to judge the export on: {error.message}"
        raise UsageError(message, "name some: --images FOLDER, or --data DATA") from None
    name = next((name for name in ("val", "test") if name in opened.splits), next(iter(opened.splits)))
    split = opened.splits[name]
    split = bundle.task.align_labels(split, opened) if bundle.task.outputs else split
    p, pixels, rows = bundle.preprocess, [], []
    for row in permutation(len(split), 0, 0)[: 4 * MOST].tolist():
        try:
            picture = p.decoded(open_sample(split, row), split.name(row))
            pixels.append(fit_image(native_pixels(picture), p)[0] if bundle.object_classes else p.array(picture))
            rows.append(row)
        except DataError:
            continue
        if len(rows) == MOST:
            break
    if not rows:
        raise DataError(f"no picture of {source} can be read", "name others: --images FOLDER")
    labels = split.labels[rows] if bundle.task.outputs else None
    return opened, Pictures(np.stack(pixels), labels, f"{source} ({name})")


def other_sizes(pictures: Pictures, patch: tuple[int, ...]) -> Iterator[np.ndarray]:
    """Eight images at two other sizes, (8, C, H, W): a patch lower and one wider, then larger by two and by one."""
    pixels = pictures.pixels[:FEWEST]
    native = pixels.shape[2:]
    for more in ((-1, 1), (2, 1)):
        height, width = (max(2, side // p + n) * p for side, p, n in zip(native, patch, more, strict=True))
        pad = ((0, max(0, height - native[0])), (0, max(0, width - native[1])))
        yield np.pad(pixels, ((0, 0), (0, 0), *pad), mode="wrap")[:, :, :height, :width]
