"""Untrained generative models: tiny, fast, and with different outputs for every class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contracts import randomise
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.generation.process import Diffusion, Process
from vitreous.inference.generators import build_generator_predictor
from vitreous.inference.options import InferenceOptions
from vitreous.inference.predict import Predictor
from vitreous.models.configs.dit import DiTConfig
from vitreous.models.dit import DiT
from vitreous.tasks.generation import Generation
from vitreous.weights.bundle import Bundle, load_bundle

CLASSES = ("ant", "<b>bee</b>", "cat")


def save_generator(
    folder: Path,
    classes: tuple[str, ...] = CLASSES,
    channels: int = 3,
    process: Process = Diffusion(),  # noqa: B008
) -> Path:
    """Save a DiT-32x1/2 for 8 x 8 pixels."""
    torch.manual_seed(0)
    config = DiTConfig(
        image=(8, 8), channels=channels, classes=len(classes), width=32, depth=1, heads=1, hidden=64,
        learned_variance=False,
    )  # fmt: skip
    preprocess = ImagePreprocess((8, 8), channels=channels, mean=(0.5,) * channels, std=(0.5,) * channels)
    Bundle(randomise(DiT(config)).eval(), Generation(classes, process), preprocess).save(folder)
    return folder


def save_autoencoder(folder: Path, **changes: Any) -> Any:
    """Save a tiny AutoencoderKL of diffusers with random weights: 4 latent channels, one latent position for 2 x 2
    pixels, scaling factor 0.5."""
    diffusers = pytest.importorskip("diffusers", reason="a test dependency")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"block_out_channels": (8, 8), "norm_num_groups": 4, "latent_channels": 4}
    sizes |= {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    autoencoder = diffusers.AutoencoderKL(**sizes | {"scaling_factor": 0.5} | changes).eval()
    autoencoder.save_pretrained(folder)
    return autoencoder


def predictor_in(folder: Path) -> Predictor:
    """Load a generator for the server in float32, where an image depends on its batch only by rounding."""
    return build_generator_predictor(load_bundle(folder), InferenceOptions(precision="fp32"))
