"""The verb `inspect`: figures of what a model has learned and what it looks at, as pictures, as numbers, and on one
page."""

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
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitreous.config import apply_options
from vitreous.data.decoding.decode import is_image
from vitreous.data.keys import permutation
from vitreous.data.layouts.folder import list_images
from vitreous.data.preprocess import Preprocess
from vitreous.data.split import Data, Split
from vitreous.disk import write_text
from vitreous.errors import DataError, UsageError, nearest, printable
from vitreous.evaluation.calibration import probabilities
from vitreous.machine import DTYPES, pick_device, pick_precision, warning
from vitreous.models.names import name_of
from vitreous.models.zoo import Model
from vitreous.progress import Listener, NullListener
from vitreous.reports.opening import data_for, open_bundle
from vitreous.reports.pages.thumbnails import rgb_image
from vitreous.tables import write_table
from vitreous.weights.bundle import Bundle

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Kind(NamedTuple):
    """A figure: the module that makes it, whether it is made where none is named, and whether it shows the pictures
    that were named."""

    module: str
    usual: bool = False
    of_pictures: bool = False


FIGURES = {
    "filters": Kind("vitreous.reports.figures.filters", usual=True),
    "positions": Kind("vitreous.reports.figures.positions", usual=True),
    "distance": Kind("vitreous.reports.figures.distance", usual=True),
    "rollout": Kind("vitreous.reports.figures.rollout", usual=True, of_pictures=True),
    "attention": Kind("vitreous.reports.figures.attention", of_pictures=True),
    "gradient": Kind("vitreous.reports.figures.gradient", of_pictures=True),
    "segments": Kind("vitreous.reports.figures.segments", of_pictures=True),
    "fourier": Kind("vitreous.reports.figures.fourier"),
    "features": Kind("vitreous.reports.figures.features", of_pictures=True),
    "nearest": Kind("vitreous.reports.figures.nearest", of_pictures=True),
    "similarity": Kind("vitreous.reports.figures.similarity"),
    "cost": Kind("vitreous.reports.figures.cost"),
}
SEEN = 8  # images shown where only some of a data set can be
BEST = 3  # classes named of a picture


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
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    batch_size: int = 8
    seed: int = 0


@dataclass(frozen=True)
class Picture:
    """One image as the model sees it: `shown` (H, W) RGB, and `pixels` (C, *image) as they are before they are
    normalised; `raw` is what is stored of it, for a model that sees it otherwise."""

    name: str
    shown: Image.Image
    pixels: Tensor
    raw: bytes | np.ndarray | Path = b""


@dataclass(frozen=True)
class Made:
    """A figure with what it is made of. `name` is the stem of its files; the caption says what is seen, in which units,
    and where it comes from. `table`: a head and rows, for a CSV, where numbers read better so."""

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
        """The pictures that were named; where none were, `count` of the split, always the same ones. Unreadable ones
        are passed over."""
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
        """Numbers of the blocks asked for, from 0, all of `depth` where none were; -1 is the last. Raises
        UsageError."""
        wrong = [layer for layer in self.looking.layers if not -depth <= layer < depth]
        if wrong:
            hint = f"--layers counts from 0 to {depth - 1}, or from -1 backwards; figures count from 1 to {depth}"
            raise UsageError(f"--layers {wrong[0]}: the model has {depth} blocks", hint)
        return sorted({layer % depth for layer in self.looking.layers}) or list(range(depth))


def inspect(
    run: str | os.PathLike[str],
    images: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
    out: str | os.PathLike[str] | None = None,
    looking: Looking | None = None,
    listener: Listener | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Make figures of a model: files, and a document that names them with what they show.

    `images` are files or folders of them, or one; figures of a data set take those of the run. `options` are the fields
    of `Looking`, as on the command line: `figures=["rollout"]`, `device="cpu"`. Every figure becomes OUT/NAME.png with
    its numbers in NAME.npz (and NAME.csv). OUT/index.html begins with the images named and the model's answers, and
    shows all figures. `out` is RUN/inspect, or inspect-NAME beside other weights.
    Raises UsageError for an unknown option, and for a figure that the model does not have; with `all` it is left out,
    and said why.
    """
    chosen: Looking = apply_options("inspect", options, looking or Looking(), known=("images", "out", "listener"))[0]
    images, listener = [images] if isinstance(images, (str, os.PathLike)) else images, listener or NullListener()
    names = asked(chosen, bool(images))
    bundle = open_bundle(run, headless=True, note=listener.note)
    device = pick_device(chosen.device)
    if slow := warning(chosen.precision, device):
        listener.note(slow)
    preprocess = resized(bundle, chosen)
    bundle.model.any_size = True  # --image-size asks for it
    scene = Scene(os.fspath(run), bundle, chosen, preprocess, device, tuple(pictures_of(images, preprocess)), listener)
    folder = Path(out) if out is not None else home(Path(run))
    began, made, refused = time.perf_counter(), [], {}
    answered = answers(scene)
    for name in names:
        try:
            for one in import_module(FIGURES[name].module).make(scene):
                made.append(keep(one, folder))
                listener.note(f"{one.title}: {folder / one.name}.png")
        except UsageError as error:
            if not chosen.all:
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
        "answers": answered,
        "figures": made,
        "refused": refused,
        "out": os.fspath(folder),
        "page": os.fspath(folder / "index.html"),
        "wall_seconds": time.perf_counter() - began,
    }
    write_album(folder, document, [(one.shown, one.name) for one in scene.pictures[:SEEN]])
    write_text(folder / "inspect.json", json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    return document


def asked(looking: Looking, pictures: bool = False) -> list[str]:
    """The figures asked for, or the usual ones; of those, with `pictures` named, the ones that show them come first.

    Raises UsageError for an unknown one.
    """
    for name in looking.figures:
        if name not in FIGURES:
            raise UsageError(f"no figure {name}", nearest(name, FIGURES) or f"there are {', '.join(FIGURES)}")
    if looking.figures and not looking.all:
        return list(dict.fromkeys(looking.figures))
    names = [name for name, kind in FIGURES.items() if kind.usual or looking.all]
    return sorted(names, key=lambda name: not FIGURES[name].of_pictures) if pictures else names


def answers(scene: Scene) -> list[dict[str, Any]]:
    """The likeliest classes of the first pictures named, as `predict --json` writes them; of a model without a head,
    none.

    In float32: to be asked before `scene.model` is, which casts the weights to the precision of the figures.
    """
    bundle, rows = scene.bundle, []
    pictures = list(scene.pictures[:SEEN])
    if not bundle.classes:
        return [{"path": one.name, "classes": []} for one in pictures]
    model = bundle.model.to(scene.device).eval()
    with torch.no_grad():
        for one in pictures:
            logits = model(scene.preprocess.normalise(one.pixels[None].to(scene.device)))
            rows.append(probabilities(logits.double().cpu().numpy() / bundle.temperature, bundle.loss)[0])
    best = [np.argsort(-row, kind="stable")[:BEST] for row in rows]
    named = [
        [{"class": bundle.classes[i], "probability": float(row[i])} for i in some]
        for row, some in zip(rows, best, strict=True)
    ]
    return [{"path": one.name, "classes": classes} for one, classes in zip(pictures, named, strict=True)]


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
    return Picture(name, rgb_image(pixels), pixels, raw)


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
