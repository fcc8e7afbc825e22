"""Predictors of generative models, so that a server can hold them like other predictors.

B images of C channels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import numpy as np

from vitreous.errors import UsageError
from vitreous.inference.predict import Predictor

if TYPE_CHECKING:
    from vitreous.inference.options import InferenceOptions
    from vitreous.inference.samples import Generator
    from vitreous.weights.bundle import Bundle


class GeneratorEngine:
    """The engine of a predictor whose model generates images: it has a `generator`, and computes no outputs for
    images."""

    name = "torch"
    chunk_size = 1

    def __init__(self, generator: Generator) -> None:
        self.generator, self.precision = generator, generator.sampler.precision

    def logits(self, pixels: np.ndarray) -> NoReturn:
        """Raise UsageError for any (B, C, *image) pixels, because the model has no outputs for images."""
        raise UsageError("the model generates images and has no outputs for images", "use `vitreous sample`")

    features = objects = logits


def build_generator_predictor(bundle: Bundle, how: InferenceOptions | None = None, vae: str | None = None) -> Predictor:
    """Build a predictor of a generative model, with the autoencoder `vae`, or that of the run. Raises UsageError for an
    engine other than PyTorch, for images that a page cannot display, and for an unavailable device or precision;
    UsageError and WeightsError as `Autoencoder` does."""
    from vitreous.inference.card import build_card
    from vitreous.inference.samples import Generator

    card, channels = build_card(bundle), bundle.model.config.channels
    if how and how.engine == "openvino":
        raise UsageError("--engine openvino does not support generative models", "leave --engine out")
    if bundle.preprocess.is_animated:
        raise UsageError(f"{card.name} generates clips, but a server returns images", "use `vitreous sample`")
    decoded = bool(vae or bundle.task.autoencoder)
    if (channels not in (1, 3) and not decoded) or len(bundle.preprocess.image) != 2:
        problem = f"{card.name} generates images of {channels} channels and {len(bundle.preprocess.image)} axes"
        hint = "set the autoencoder of latents, --vae FOLDER: pages show images of 1 or 3 channels and 2 axes"
        raise UsageError(problem, hint)
    generator = Generator(bundle, how.device if how else "auto", how.precision if how else "auto", vae)
    return Predictor(card, GeneratorEngine(generator), bundle)


def get_generator(predictor: Predictor) -> Generator | None:
    """Return the generator of a predictor; None if its model does not generate images."""
    return predictor.engine.generator if isinstance(predictor.engine, GeneratorEngine) else None
