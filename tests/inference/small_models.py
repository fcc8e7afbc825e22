"""Helpers of the tests of predict and embed: a tiny model as a bundle, noise images, and synthetic photographs."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from vitreous.data.modalities.images import ImagePreprocess
from vitreous.errors import DataError
from vitreous.inference.predict import Predictor
from vitreous.inference.reading import read_model_input
from vitreous.models.config import MlpConfig, ViTConfig
from vitreous.models.vit import ViT
from vitreous.tasks.classification import Classification
from vitreous.tasks.regression import Regression
from vitreous.weights.bundle import Bundle

CLASSES = ("ant", "bee", "cat", "=dog")


def make_tiny_bundle(seed: int = 0, classes: tuple[str, ...] = CLASSES) -> Bundle:
    """A ViT of two blocks for 16 x 16 pixels whose predictions differ between images."""
    torch.manual_seed(seed)
    model = ViT(
        ViTConfig(
            image=(16, 16), patch=(4, 4), width=24, depth=2, heads=2, classes=len(classes), mlp=MlpConfig(hidden=48)
        )
    )
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return Bundle(model, Classification(classes), ImagePreprocess((16, 16)))


def write_images(folder: Path, count: int) -> list[str]:
    """Write `count` PNG files of noise, of different sizes; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    files = []
    for index in range(count):
        pixels = rng.integers(0, 256, (12 + index % 9, 20 - index % 7, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{index}.png")
        files.append(str(folder / f"{index}.png"))
    return files


def make_photo(width: int, height: int, seed: int = 0) -> Image.Image:
    """A synthetic photograph: detail at every scale (amplitude falling as 1/f, as in photographs), and edges."""
    rng = np.random.default_rng(seed)
    down, across = np.meshgrid(np.fft.fftfreq(height), np.fft.rfftfreq(width), indexing="ij")
    slope = 1 / np.maximum(np.hypot(down, across), 1 / max(width, height))
    bands = []
    for _ in range(3):
        noise = np.fft.irfft2(np.fft.rfft2(rng.standard_normal((height, width))) * slope, (height, width))
        bands.append(noise / noise.std() * 45 + 120)
    pixels = np.stack(bands, -1)
    pixels[height // 3 : height // 2, width // 4 : width // 2] = (210, 60, 40)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def encode_jpeg(image: Image.Image, orientation: int = 1, **options: object) -> bytes:
    """Encode an image as a JPEG file with an EXIF orientation."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    out = io.BytesIO()
    image.save(out, "JPEG", **({"quality": 92, "exif": exif} | options))  # type: ignore[arg-type]
    return out.getvalue()


def read_predictor_input(predictor: Predictor, content: Any) -> Any:
    """Decode a file, or its bytes, to the predictor's input pixels; returns the error if it cannot be read."""
    try:
        return read_model_input(content, predictor.card.preprocess, exact=predictor.exact)
    except DataError as error:
        return error


def save_value_model(folder: Path, task: Regression) -> None:
    """Write a bundle with random weights that predicts the values of `task` for images of 16 x 16 pixels."""
    torch.manual_seed(0)
    model = ViT(
        ViTConfig(
            image=(16, 16),
            patch=(8, 8),
            classes=len(task.targets),
            width=16,
            depth=1,
            heads=2,
            mlp=MlpConfig(hidden=32),
        )
    ).eval()
    nn.init.normal_(model.head.weight)
    Bundle(model, task, ImagePreprocess((16, 16))).save(folder)
