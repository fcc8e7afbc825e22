"""The input and the result of a figure: `FigureContext` (model, images, dataset) and `FigureResult`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitreous.data.decoding.clip import Clip
from vitreous.data.keys import draw_permutation
from vitreous.data.layouts.video import open_sample
from vitreous.data.modalities.base import Preprocess
from vitreous.data.rgb_images import to_rgb_image
from vitreous.data.run_data import open_run_data
from vitreous.data.split import Data, Split
from vitreous.errors import DataError, UsageError, escape_unprintable
from vitreous.models.zoo import Model
from vitreous.progress import ProgressListener
from vitreous.reports.options import InspectOptions
from vitreous.system.machine import DTYPES, pick_precision
from vitreous.weights.bundle import Bundle

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_SHOWN_IMAGES = 8  # most images that a figure shows


@dataclass(frozen=True)
class InputImage:
    """An input image of the model: `pixels` (C, *image) before normalisation, `rgb_image` for display, `raw` as
    stored."""

    name: str
    rgb_image: Image.Image
    pixels: Tensor
    raw: bytes | np.ndarray | Path | Clip = b""


@dataclass(frozen=True)
class FigureResult:
    """A drawn figure and its data.

    `name`: stem of its files; `arrays`: content of its NPZ; `table`: header and rows of its CSV, if any; `animation`:
    the bytes of a GIF, if any.
    """

    name: str
    title: str
    caption: str
    figure: Figure
    _: KW_ONLY
    arrays: dict[str, np.ndarray]
    table: tuple[Sequence[str], Sequence[Sequence[Any]]] | None = None
    animation: bytes | None = None


@dataclass(frozen=True)
class FigureContext:
    """The model, the input images and the dataset from which figures are drawn."""

    run: str
    bundle: Bundle
    options: InspectOptions
    preprocess: Preprocess  # the bundle's preprocessing, at --image-size
    _: KW_ONLY
    device: str
    images: tuple[InputImage, ...]
    listener: ProgressListener

    @cached_property
    def model(self) -> Model:
        """Return the model on its device, in the selected precision and evaluation mode."""
        return self.bundle.model.to(self.device, DTYPES[pick_precision(self.options.precision, self.device)]).eval()

    @cached_property
    def data(self) -> tuple[str, Data]:
        """Open the dataset of --data, or that of the run, and return its path and content. Raises UsageError if there
        is none."""
        return open_run_data(self.run, self.options.data, self.options.split or "val", labelled=False)

    @cached_property
    def split(self) -> Split:
        """Return the split of --split; if it is not set, the first available one of `val`, `test` and `train`."""
        splits = self.data[1].splits
        if self.options.split is not None:
            return self.data[1].split(self.options.split)
        return splits.get("val") or splits.get("test") or splits["train"]

    @property
    def grid(self) -> tuple[int, ...]:
        """Return the number of patches along each axis of an image."""
        return tuple(i // p for i, p in zip(self.preprocess.image, self.model.config.patch, strict=True))

    def to_model_input(self, pixels: Tensor) -> Tensor:
        """Normalise (B, C, *image) pixels into the model's input on its device."""
        parameter = next(self.model.parameters())
        return self.preprocess.normalise(pixels.to(self.device)).to(parameter.dtype)

    def take_images(self, count: int) -> list[InputImage]:
        """Return the input images or, if there are none, `count` random readable images of the split, chosen by the
        seed.

        Raises DataError if none is readable.
        """
        input_images = list(self.images) or [image for _, image in islice(self.iterate_readable(self.split), count)]
        if not input_images:
            raise DataError("no image can be read", "run `vitreous data check` to list the errors")
        return input_images

    def iterate_readable(self, split: Split) -> Iterator[tuple[int, InputImage]]:
        """Yield index and image of each readable sample of a split, in a random order determined by the seed."""
        for sample in draw_permutation(len(split), self.options.seed, 0).tolist():
            try:
                yield sample, load_input_image(open_sample(split, sample), split.name(sample), self.preprocess)
            except DataError:
                continue

    def iterate_batches(self, input_images: Sequence[InputImage], label: str = "images") -> Iterator[Tensor]:
        """Yield the model's input (B, C, *image) for images, `batch_size` at a time, and report progress as `label`."""
        for low in range(0, len(input_images), self.options.batch_size):
            batch = input_images[low : low + self.options.batch_size]
            yield self.to_model_input(torch.stack([image.pixels for image in batch]))
            self.listener.progress(label, low + len(batch), len(input_images))

    def resolve_layers(self, depth: int) -> list[int]:
        """Return the indices of the selected blocks, by default all of `depth`; -1 is the last.

        Raises UsageError for a block that does not exist.
        """
        invalid = [layer for layer in self.options.layers if not -depth <= layer < depth]
        if invalid:
            hint = f"use --layers 0 to {depth - 1}, or -1 for the last; figures count from 1"
            raise UsageError(f"--layers {invalid[0]}: the model has {depth} blocks", hint)
        return sorted({layer % depth for layer in self.options.layers}) or list(range(depth))


def open_input_images(images: Sequence[str | os.PathLike[str]], preprocess: Preprocess) -> Iterator[InputImage]:
    """Open files, and all images below folders. Raises DataError for an unreadable image and for a folder without
    images."""
    for name in images:
        path = Path(name)
        if path.is_dir():
            files = preprocess.find_files(os.fspath(path))
            if not files:
                raise DataError(f"no {preprocess.noun} in {escape_unprintable(path)}", preprocess.folder_hint)
            yield from (load_input_image(Path(file), escape_unprintable(file), preprocess) for file in files)
        else:
            yield load_input_image(path, escape_unprintable(path), preprocess)


def load_input_image(raw: bytes | np.ndarray | Path | Clip, name: str, preprocess: Preprocess) -> InputImage:
    """Decode stored bytes, (H, W, C) pixels, a file or a clip into an input image. Raises DataError if it fails."""
    pixels = preprocess.to_tensor(preprocess.decode(raw, name))
    return InputImage(name, to_rgb_image(pixels), pixels, raw)
