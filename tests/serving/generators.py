"""Models that make images and have learned nothing: tiny, quick, and different for every class."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.contracts import randomise
from vitreous.data.preprocess import Preprocess
from vitreous.evaluation.inference_options import InferenceOptions
from vitreous.generation.process import Diffusion, Process
from vitreous.models.configs.dit import DiTConfig
from vitreous.models.dit import DiT
from vitreous.serving.generators import generator_predictor
from vitreous.serving.predict import Predictor
from vitreous.weights.bundle import Bundle, load_bundle
from vitreous.weights.tasks import Generation

CLASSES = ("ant", "<b>bee</b>", "cat")


def save_generator(
    place: Path,
    classes: tuple[str, ...] = CLASSES,
    channels: int = 3,
    process: Process = Diffusion(),  # noqa: B008
) -> Path:
    """A DiT-32x1/2 of 8 x 8 pixels."""
    torch.manual_seed(0)
    config = DiTConfig(
        image=(8, 8), channels=channels, classes=len(classes), width=32, depth=1, heads=1, hidden=64,
        learned_variance=False,
    )  # fmt: skip
    preprocess = Preprocess((8, 8), channels=channels, mean=(0.5,) * channels, std=(0.5,) * channels)
    Bundle(randomise(DiT(config)).eval(), Generation(classes, process), preprocess).save(place)
    return place


def predictor_in(place: Path) -> Predictor:
    """A generator ready to be served, in float32: an image depends on its batch by the last bits alone."""
    return generator_predictor(load_bundle(place), InferenceOptions(precision="fp32"))
