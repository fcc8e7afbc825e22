"""The verb `predict`: names and probabilities for image files, by the preprocessing the model was trained with."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from torch import Tensor

from vitreous.data.decode import printable
from vitreous.data.layouts.folder import list_images
from vitreous.data.loader import complete
from vitreous.errors import DataError, UsageError
from vitreous.evaluation.abstention import check_abstain
from vitreous.evaluation.engine import Engine, How, make_engine
from vitreous.evaluation.forward import CHUNK, answer
from vitreous.evaluation.several import THRESHOLD
from vitreous.evaluation.temperature import probabilities
from vitreous.machine import default_workers
from vitreous.reports.opening import open_bundle
from vitreous.weights.bundle import Bundle


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
    """A bundle ready to answer."""

    bundle: Bundle
    engine: Engine

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
        bundle's temperature first. An image whose highest probability is below `abstain`, in (0, 1], is `unsure`.
        Files are decoded by as many threads as there are cores, CHUNK at a time, then answered together.
        Raises UsageError for an `abstain` that cannot be, and DataError for a file that cannot be read; with `bad_images="skip"` its
        prediction has an `error` instead.
        """
        several = self.bundle.several
        check_abstain(abstain)
        if abstain is not None and several:
            raise UsageError("--abstain is for models that name one class an image", "use --threshold where there may be several")
        if threshold is None:
            threshold = THRESHOLD if several and top is None else -1.0
        top = top or (len(self.bundle.classes) if several else 5)
        answers: list[Prediction] = []
        with ThreadPoolExecutor(default_workers()) as pool:
            for start in range(0, len(images), CHUNK):
                paths = images[start : start + CHUNK]
                pictures = list(pool.map(self.read, paths))
                if bad_images == "stop":
                    complete(pictures)
                p = probabilities(answer(self.engine, pictures).astype(np.float64) / self.bundle.temperature, self.bundle.loss)
                sure = p.max(1) >= (abstain or 0.0)
                found = [self.named(*row, top, threshold) for row in zip(paths, pictures, p, strict=True)]
                answers += [one if certain or one.error else replace(one, unsure=True) for one, certain in zip(found, sure, strict=True)]
                each(len(answers))
        return answers

    def read(self, path: str | os.PathLike[str]) -> Tensor | DataError:
        """A file as (C, *image) uint8, or why it cannot be read."""
        try:
            return self.bundle.preprocess.pixels(self.bundle.preprocess.decoded(path))
        except DataError as error:
            return error

    def named(self, path: str | os.PathLike[str], picture: Tensor | DataError, p: np.ndarray, top: int, threshold: float) -> Prediction:
        """One image's answer from its (K,) probabilities: the `top` of those above the threshold."""
        if isinstance(picture, DataError):
            return Prediction(os.fspath(path), error=picture.message)
        best = [i for i in np.argsort(-p, kind="stable")[:top] if p[i] > threshold]
        return Prediction(os.fspath(path), tuple(self.bundle.classes[i] for i in best), tuple(float(p[i]) for i in best))


def load(
    run: str | os.PathLike[str],
    how: How | None = None,
    examples: Sequence[str | os.PathLike[str]] = (),
) -> Predictor:
    """A trained model, from its run folder or bundle, ready for `.predict(["dog.jpg"])`.

    `how` says what computes: device, precision, engine. int8 is calibrated on the files `examples`.
    Raises UsageError where there is no run, WeightsError where the bundle is damaged.
    """
    bundle = open_bundle(run)

    def pictures() -> Iterator[Tensor]:
        for path in examples:
            with suppress(DataError):
                yield bundle.preprocess.pixels(bundle.preprocess.decoded(path))

    return Predictor(bundle, make_engine(bundle.model, bundle.preprocess, how, pictures))


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
