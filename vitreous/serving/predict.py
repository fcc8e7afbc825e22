"""The verb `predict`: names and probabilities for image files, by the preprocessing the model was trained with."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from vitreous.data.decode import decode, printable
from vitreous.data.sources import list_images
from vitreous.errors import DataError
from vitreous.evaluation.forward import CHUNK, forward
from vitreous.training.evaluate import open_bundle
from vitreous.training.machine import pick_device
from vitreous.training.session import DTYPES
from vitreous.weights.bundle import Bundle


@dataclass(frozen=True)
class Prediction:
    """One image's answer: the class names, best first, with their probabilities; or why there is none."""

    path: str
    names: tuple[str, ...] = ()
    probabilities: tuple[float, ...] = ()
    error: str | None = None


@dataclass(frozen=True)
class Predictor:
    """A bundle ready to answer."""

    bundle: Bundle
    device: str = "cpu"
    precision: str = "fp32"

    def predict(
        self,
        images: Sequence[str | os.PathLike[str]],
        top: int = 5,
        bad_images: str = "stop",
        each: Callable[[int], None] = lambda done: None,
    ) -> list[Prediction]:
        """The `top` classes of every image file, in the order given.

        Raises DataError for a file that cannot be read; with `bad_images="skip"` its prediction has an `error` instead.
        """
        answers: list[Prediction] = []
        for start in range(0, len(images), CHUNK):
            answers += self.some(images[start : start + CHUNK], top, bad_images)
            each(len(answers))
        return answers

    def some(self, paths: Sequence[str | os.PathLike[str]], top: int, bad_images: str) -> list[Prediction]:
        """Predictions for at most one forward pass of files."""
        pixels, errors = [], {}
        for row, path in enumerate(paths):
            try:
                pixels.append(self.bundle.preprocess.pixels(decode(path, self.bundle.preprocess.channels)))
            except DataError as error:
                if bad_images == "stop":
                    raise
                errors[row] = error.message
        probabilities = iter(self.probabilities(torch.stack(pixels)) if pixels else [])
        found = []
        for row, path in enumerate(paths):
            if row in errors:
                found.append(Prediction(os.fspath(path), error=errors[row]))
                continue
            p = next(probabilities)
            best = np.argsort(-p, kind="stable")[:top]
            found.append(Prediction(os.fspath(path), tuple(self.bundle.classes[i] for i in best), tuple(float(p[i]) for i in best)))
        return found

    @torch.inference_mode()
    def probabilities(self, pixels: torch.Tensor) -> np.ndarray:
        """(B, C, *image) uint8 -> (B, K) float64 probabilities."""
        logits = forward(self.bundle.model, pixels.to(self.device), self.bundle.preprocess, DTYPES[self.precision])
        p = np.exp(logits.astype(np.float64) - logits.max(1, keepdims=True))
        return p / p.sum(1, keepdims=True)


def load(run: str | os.PathLike[str], device: str = "auto", precision: str = "auto") -> Predictor:
    """A trained model, from its run folder or bundle, ready for `.predict(["dog.jpg"])`.

    Raises UsageError where there is no run, WeightsError where the bundle is damaged.
    """
    bundle, device = open_bundle(run), pick_device(device)
    bundle.model.to(device).eval()
    return Predictor(bundle, device, "fp32" if precision == "auto" else precision)


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
