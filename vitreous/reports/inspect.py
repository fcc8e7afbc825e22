"""The verb `inspect`: figures of what a model has learned and what it looks at, as pictures, as numbers, and on one page."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitreous.data.decoding.decode import is_image
from vitreous.data.keys import permutation
from vitreous.data.layouts.folder import list_images
from vitreous.data.preprocess import Preprocess
from vitreous.data.split import Data, Split
from vitreous.disk import write_text
from vitreous.errors import DataError, UsageError, nearest, printable
from vitreous.machine import DTYPES, pick_device, pick_precision, warning
from vitreous.models.names import name_of
from vitreous.models.zoo import Model
from vitreous.reports.opening import data_for, open_bundle
from vitreous.tables import write_table
from vitreous.training.session import Listener, Silent
from vitreous.weights.bundle import Bundle

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: figure -> (the module that makes it, whether it is made where none is named)
FIGURES = {
    "filters": ("vitreous.reports.figures.filters", True),
    "positions": ("vitreous.reports.figures.positions", True),
    "distance": ("vitreous.reports.figures.distance", True),
    "rollout": ("vitreous.reports.figures.rollout", True),
    "attention": ("vitreous.reports.figures.attention", False),
    "gradient": ("vitreous.reports.figures.gradient", False),
    "segments": ("vitreous.reports.figures.segments", False),
    "fourier": ("vitreous.reports.figures.fourier", False),
    "features": ("vitreous.reports.figures.features", False),
    "nearest": ("vitreous.reports.figures.nearest", False),
    "similarity": ("vitreous.reports.figures.similarity", False),
    "cost": ("vitreous.reports.figures.cost", False),
}
SEEN = 8  # images shown where only some of a data set can be


@dataclass(frozen=True)
class Looking:
    """What to look at and how, in the words of the command line; `cli.inspect` says what each means."""

    figures: tuple[str, ...] = ()
    all: bool = False
    data: str | None = None
    split: str | None = None
    count: int = 128
    image_size: tuple[int, ...] = ()
    layers: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()
    fusion: Literal["mean", "max", "min"] = "mean"
    residual: float = 0.5
    discard: float = 0.0
    mass: float = 0.6
    of_class: str | None = None
    other: str | None = None
    batch_sizes: tuple[int, ...] = ()
    device: str = "auto"
    precision: str = "auto"
    batch_size: int = 8
    seed: int = 0


@dataclass(frozen=True)
class Picture:
    """One image as the model sees it: `shown` (H, W) RGB, and `pixels` (C, *image) as they are before they are normalised; `raw` is
    what is stored of it, for a model that sees it otherwise."""

    name: str
    shown: Image.Image
    pixels: Tensor
    raw: bytes | np.ndarray | Path = b""


@dataclass(frozen=True)
class Made:
    """A figure with what it is made of. `name` is the stem of its files; the caption says what is seen, in which units, and where it
    comes from. `table`: a head and rows, for a CSV, where numbers read better so."""

    name: str
    title: str
    caption: str
    figure: Figure
    numbers: dict[str, np.ndarray]
    table: tuple[Sequence[str], Sequence[Sequence[Any]]] | None = None


@dataclass(frozen=True)
class Scene:
    """A model, the pictures named and the data it can be shown: what the figures are made from."""

    run: str
    bundle: Bundle
    looking: Looking
    preprocess: Preprocess  # the bundle's, at --image-size
    device: str
    pictures: tuple[Picture, ...]
    listener: Listener

    @cached_property
    def model(self) -> Model:
        """The model on its device, in the precision asked for, in evaluation mode."""
        return self.bundle.model.to(self.device, DTYPES[pick_precision(self.looking.precision, self.device)]).eval()

    @cached_property
    def data(self) -> tuple[str, Data]:
        """The data set, and its name: --data, or the run's own. Raises UsageError where there is none."""
        return data_for(self.run, self.looking.data, self.looking.split or "val")

    @cached_property
    def split(self) -> Split:
        """The images to look at: those of --split; else of `val`, or what there is."""
        splits = self.data[1].splits
        if self.looking.split is not None:
            return self.data[1].split(self.looking.split)
        return splits.get("val") or splits.get("test") or splits["train"]

    def input(self, pixels: Tensor) -> Tensor:
        """(B, C, *image) pixels -> the model's input, on its device."""
        own = next(self.model.parameters())
        return self.preprocess.normalise(pixels.to(self.device)).to(own.dtype)

    def some(self, count: int, split: Split | None = None) -> list[Picture]:
        """The pictures that were named; where none were, `count` of the split, always the same ones. Unreadable ones are passed over."""
        if self.pictures and split is None:
            return list(self.pictures)
        split = self.split if split is None else split
        found: list[Picture] = []
        for sample in permutation(len(split), self.looking.seed, 0):
            if len(found) == count:
                break
            try:
                found.append(picture(split.raw(int(sample)), split.name(int(sample)), self.preprocess))
            except DataError:
                continue
        if not found:
            raise DataError("no image can be read", "`vitreous data check` tells why")
        return found

    def batches(self, pictures: Sequence[Picture], label: str = "look") -> Iterator[Tensor]:
        """The model's input of pictures, `batch_size` at a time."""
        for low in range(0, len(pictures), self.looking.batch_size):
            part = pictures[low : low + self.looking.batch_size]
            yield self.input(torch.stack([one.pixels for one in part]))
            self.listener.progress(label, low + len(part), len(pictures))

    def layers(self, depth: int) -> list[int]:
        """Numbers of the blocks asked for, from 0, all of `depth` where none were; -1 is the last. Raises UsageError."""
        wrong = [layer for layer in self.looking.layers if not -depth <= layer < depth]
        if wrong:
            raise UsageError(f"no block {wrong[0]}: the model has {depth}", f"--layers counts from 0 to {depth - 1}, or from -1 backwards")
        return sorted({layer % depth for layer in self.looking.layers}) or list(range(depth))


def inspect(
    run: str | os.PathLike[str],
    images: Sequence[str | os.PathLike[str]] = (),
    out: str | os.PathLike[str] | None = None,
    looking: Looking | None = None,
    listener: Listener | None = None,
) -> dict[str, Any]:
    """Make figures of a model: files, and a document that names them with what they show.

    `images` are files or folders of them; figures of a data set take those of the run. Every figure becomes OUT/NAME.png with its
    numbers in NAME.npz (and NAME.csv), and OUT/index.html shows them all; `out` is RUN/inspect, or inspect-NAME beside other weights.
    Raises UsageError for a figure that the model does not have; with `looking.all` it is left out, and said why.
    """
    looking, listener = looking or Looking(), listener or Silent()
    names = asked(looking)
    bundle = open_bundle(run, headless=True)
    device = pick_device(looking.device)
    if slow := warning(looking.precision, device):
        listener.note(slow)
    preprocess = resized(bundle, looking)
    scene = Scene(os.fspath(run), bundle, looking, preprocess, device, tuple(pictures_of(images, preprocess)), listener)
    folder = Path(out) if out is not None else home(Path(run))
    began, made, refused = time.perf_counter(), [], {}
    for name in names:
        try:
            for one in import_module(FIGURES[name][0]).make(scene):
                made.append(keep(one, folder))
                listener.note(f"{one.title}: {folder / one.name}.png")
        except UsageError as error:
            if not looking.all:
                raise
            refused[name] = error.message
            listener.note(f"no {name}: {error.message}")
    if not made:
        raise UsageError(f"no figure can be made of {run}: " + "; ".join(refused.values()))
    from vitreous.reports.pages.album import write_album

    document = {
        "run": os.fspath(run),
        "model": name_of(bundle.model.config),
        "image_size": list(preprocess.image),
        "images": [one.name for one in scene.pictures],
        "figures": made,
        "refused": refused,
        "out": os.fspath(folder),
        "page": os.fspath(folder / "index.html"),
        "wall_seconds": time.perf_counter() - began,
    }
    write_album(folder, document)
    write_text(folder / "inspect.json", json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    return document


def asked(looking: Looking) -> list[str]:
    """The figures asked for. Raises UsageError for an unknown one."""
    for name in looking.figures:
        if name not in FIGURES:
            raise UsageError(f"no figure {name}", nearest(name, FIGURES) or f"there are {', '.join(FIGURES)}")
    if looking.all:
        return list(FIGURES)
    return list(dict.fromkeys(looking.figures)) or [name for name, (_, usual) in FIGURES.items() if usual]


def resized(bundle: Bundle, looking: Looking) -> Preprocess:
    """The bundle's preprocessing, for images of --image-size: one number, or a height and a width."""
    if not looking.image_size:
        return bundle.preprocess
    size = looking.image_size * 2 if len(looking.image_size) == 1 else looking.image_size
    patch = bundle.model.config.patch
    if len(size) != 2 or any(length < 1 or length % p for length, p in zip(size, patch, strict=False)):
        raise UsageError(f"--image-size {' '.join(map(str, looking.image_size))} is not a multiple of patch {patch[0]}")
    return replace(bundle.preprocess, image=(size[0], size[1]))


def pictures_of(images: Sequence[str | os.PathLike[str]], preprocess: Preprocess) -> Iterator[Picture]:
    """The images named, folders as what is below them. Raises DataError for what cannot be read."""
    for name in images:
        path = Path(name)
        if path.is_dir():
            found = [p for p in list_images(path) if is_image(p)]
            if not found:
                raise DataError(f"no images in {printable(path)}")
            yield from (picture(p, printable(p), preprocess) for p in found)
        else:
            yield picture(path, printable(path), preprocess)


def picture(raw: bytes | np.ndarray | Path, name: str, preprocess: Preprocess) -> Picture:
    """What is stored -> what the model sees of it. Raises DataError."""
    pixels = preprocess.pixels(preprocess.decoded(raw, name))
    return Picture(name, coloured(pixels), pixels, raw)


def coloured(pixels: Tensor) -> Image.Image:
    """(C, *image) pixels -> an RGB picture: the first three channels, or the first as grey; floats from the least to the greatest."""
    bands = pixels[:3] if len(pixels) >= 3 else pixels[:1].expand(3, *pixels.shape[1:])
    if pixels.dtype != torch.uint8:
        low, high = bands.min(), bands.max()
        bands = ((bands - low) / (high - low).clamp(min=1e-9) * 255).to(torch.uint8)
    return Image.fromarray(bands.permute(1, 2, 0).contiguous().numpy())


def stem(name: str) -> str:
    """A picture's name as part of a file's: `photos/my dog.jpg` -> `my-dog`."""
    return re.sub(r"[^A-Za-z0-9]+", "-", Path(name).stem).strip("-")[:60] or "image"


def home(run: Path) -> Path:
    """Where figures go: into the run, or beside weights that are not one."""
    return run / "inspect" if run.is_dir() else Path(f"inspect-{stem(str(run))}")


def keep(made: Made, folder: Path) -> dict[str, Any]:
    """Write a figure's files, and say what is where."""
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / made.name
    made.figure.savefig(f"{place}.png", dpi=150, bbox_inches="tight", metadata={"Software": None})
    np.savez_compressed(f"{place}.npz", **made.numbers)  # type: ignore[arg-type]
    files = {"png": f"{made.name}.png", "npz": f"{made.name}.npz"}
    if made.table is not None:
        write_table(f"{place}.csv", *made.table)
        files["csv"] = f"{made.name}.csv"
    return {"name": made.name, "title": made.title, "caption": made.caption, **files}
