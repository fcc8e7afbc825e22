"""The verb `predict`: names and probabilities for image files, by the preprocessing the model was trained with."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vitreous.cores import default_workers
from vitreous.data.decode import printable
from vitreous.data.layouts.folder import list_images
from vitreous.errors import DataError, UsageError
from vitreous.evaluation.abstention import check_abstain
from vitreous.evaluation.several import THRESHOLD
from vitreous.evaluation.temperature import probabilities
from vitreous.serving.card import Card
from vitreous.serving.reading import read
from vitreous.serving.runtime import Runtime, TorchRuntime

if TYPE_CHECKING:
    from torch import Tensor

    from vitreous.evaluation.engine import How
    from vitreous.weights.bundle import Bundle

CHUNK = 64  # files that are decoded at a time


@dataclass(frozen=True)
class Prediction:
    """One image's answer: the class names, best first, with their probabilities; or why there is none.

    Where an image may have several classes, there may be no name. `unsure`: no probability reaches what an answer needs.
    """

    path: str
    names: tuple[str, ...] = ()
    probabilities: tuple[float, ...] = ()
    error: str | None = None
    unsure: bool = False


@dataclass(frozen=True)
class Predictor:
    """A model ready to answer. `bundle` has its weights, for looking inside; an exported file has none."""

    card: Card
    runtime: Runtime
    bundle: Bundle | None = None
    exact: bool = False

    def predict(
        self,
        images: Sequence[str | os.PathLike[str]],
        top: int | None = None,
        bad_images: str = "stop",
        each: Callable[[int], None] = lambda done: None,
        threshold: float | None = None,
        abstain: float | None = None,
    ) -> list[Prediction]:
        """The `top` classes of every image file (5 if not said), in the order given, of a probability above `threshold`.

        Where an image may have several classes, and neither is said: all of a probability above 0.5. With the softmax loss
        probabilities are shared out among the classes, with the others each is a question of its own. Logits are divided by the
        model's temperature first. An image whose highest probability is below `abstain`, in (0, 1], is `unsure`.
        Raises UsageError for an `abstain` that cannot be, and DataError for a file that cannot be read; with `bad_images="skip"` its
        prediction has an `error` instead.
        """
        asked = self.asked(top, threshold, abstain)
        answers: list[Prediction] = []
        with ThreadPoolExecutor(default_workers()) as pool:
            for start in range(0, len(images), CHUNK):
                paths = images[start : start + CHUNK]
                pictures = list(pool.map(self.read, paths))
                if bad_images == "stop" and (bad := next((p for p in pictures if isinstance(p, DataError)), None)):
                    raise bad
                good = [picture for picture in pictures if isinstance(picture, np.ndarray)]
                rows = iter(self.probabilities(np.stack(good)) if good else ())
                for path, picture in zip(paths, pictures, strict=True):
                    where = os.fspath(path)
                    found = isinstance(picture, np.ndarray)
                    answers.append(asked.answer(self.card, next(rows), where) if found else Prediction(where, error=picture.message))
                each(len(answers))
        return answers

    def asked(self, top: int | None = None, threshold: float | None = None, abstain: float | None = None) -> Asked:
        """What is asked of the probabilities, with what the model decides where it is not said. Raises UsageError."""
        several = self.card.several
        check_abstain(abstain)
        if abstain is not None and several:
            raise UsageError("--abstain is for models that name one class an image", "use --threshold where there may be several")
        if threshold is None:
            threshold = THRESHOLD if several and top is None else -1.0
        return Asked(top or (len(self.card.classes) if several else 5), threshold, abstain or 0.0)

    def read(self, path: str | os.PathLike[str]) -> np.ndarray | DataError:
        """A file as (C, *image) pixels, or why it cannot be read."""
        try:
            return read(path, self.card.preprocess, exact=self.exact)
        except DataError as error:
            return error

    def probabilities(self, pixels: np.ndarray) -> np.ndarray:
        """(B, C, *image) pixels -> (B, K) float64."""
        return probabilities(self.runtime.logits(pixels).astype(np.float64) / self.card.temperature, self.card.loss)


@dataclass(frozen=True)
class Asked:
    """At most `top` classes of a probability above `threshold`; unsure where the highest is below `abstain`."""

    top: int
    threshold: float
    abstain: float = 0.0

    def answer(self, card: Card, p: np.ndarray, path: str) -> Prediction:
        """One image's answer from its (K,) probabilities."""
        best = [i for i in np.argsort(-p, kind="stable")[: self.top] if p[i] > self.threshold]
        names, values = tuple(card.classes[i] for i in best), tuple(float(p[i]) for i in best)
        return Prediction(path, names, values, unsure=bool(p.max() < self.abstain))


def load(
    run: str | os.PathLike[str],
    how: How | None = None,
    examples: Sequence[str | os.PathLike[str]] = (),
    exact: bool = False,
) -> Predictor:
    """A trained model, from its run folder or bundle, ready for `.predict(["dog.jpg"])`.

    `how` says what computes: device, precision, engine. int8 is calibrated on the files `examples`. `exact` decodes every JPEG at its
    full size. Raises UsageError where there is no run, WeightsError where the bundle is damaged.
    """
    from vitreous.reports.opening import open_bundle
    from vitreous.serving.card import card_of

    bundle = open_bundle(run)

    def pictures() -> Iterator[Tensor]:
        for path in examples:
            with suppress(DataError):
                yield bundle.preprocess.pixels(bundle.preprocess.decoded(path))

    return Predictor(card_of(bundle), TorchRuntime(bundle, how, pictures), bundle, exact)


def expand(images: Sequence[str]) -> Iterator[Path]:
    """Files as they are, folders as the images below them. Raises DataError for what is neither."""
    for name in images:
        path = Path(name)
        if path.is_dir():
            found = list_images(path)
            if not found:
                raise DataError(f"no images in {printable(path)}")
            yield from found
        elif os.path.lexists(path):
            yield path
        else:
            raise DataError(f"no such file: {printable(path)}")
