"""The verb `inspect`: figures of what a model has learned and what it looks at, as pictures, as numbers, and on one
page."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from vitreous.config import apply_options
from vitreous.data.preprocess import Preprocess
from vitreous.disk import write_text
from vitreous.errors import UsageError, nearest
from vitreous.evaluation.calibration import probabilities
from vitreous.machine import pick_device, warning
from vitreous.models.names import name_of
from vitreous.progress import Listener, NullListener
from vitreous.reports.opening import open_bundle
from vitreous.reports.pages.album import write_album
from vitreous.reports.readings import slug
from vitreous.reports.scene import SEEN, FigureResult, InspectOptions, Scene, open_pictures
from vitreous.tables import write_table
from vitreous.weights.bundle import Bundle


class Kind(NamedTuple):
    """A figure: the module that makes it, whether it is made by default, and whether it shows the pictures named."""

    module: str
    default: bool = False
    of_pictures: bool = False


FIGURES = {
    "filters": Kind("vitreous.reports.figures.filters", default=True),
    "positions": Kind("vitreous.reports.figures.positions", default=True),
    "distance": Kind("vitreous.reports.figures.distance", default=True),
    "rollout": Kind("vitreous.reports.figures.rollout", default=True, of_pictures=True),
    "attention": Kind("vitreous.reports.figures.attention", of_pictures=True),
    "gradient": Kind("vitreous.reports.figures.gradient", of_pictures=True),
    "segments": Kind("vitreous.reports.figures.segments", of_pictures=True),
    "fourier": Kind("vitreous.reports.figures.fourier"),
    "features": Kind("vitreous.reports.figures.features", of_pictures=True),
    "nearest": Kind("vitreous.reports.figures.nearest", of_pictures=True),
    "similarity": Kind("vitreous.reports.figures.similarity"),
    "cost": Kind("vitreous.reports.figures.cost"),
}
BEST = 3  # classes named of a picture


def inspect(
    run: str | os.PathLike[str],
    images: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
    out: str | os.PathLike[str] | None = None,
    settings: InspectOptions | None = None,
    listener: Listener | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Make figures of a model: files, and a document that names them with what they show.

    `images` are files or folders of them, or one; figures of a data set take those of the run. `options` are the fields
    of `InspectOptions`, as on the command line: `figures=["rollout"]`, `device="cpu"`. Every figure becomes
    OUT/NAME.png with its numbers in NAME.npz (and NAME.csv). OUT/index.html shows the images named, the model's answers
    and all figures. `out` is RUN/inspect, or inspect-NAME beside other weights.

    Raises UsageError for an unknown option, and for a figure that the model does not have; with `all` the figure is
    left out and the reason noted.
    """
    known = ("images", "out", "listener")
    chosen: InspectOptions = apply_options("inspect", options, settings or InspectOptions(), known=known)[0]
    images, listener = [images] if isinstance(images, (str, os.PathLike)) else images, listener or NullListener()
    names = choose_figures(chosen, bool(images))
    bundle = open_bundle(run, headless=True, note=listener.note)
    device = pick_device(chosen.device)
    if slow := warning(chosen.precision, device):
        listener.note(slow)
    preprocess = resize_preprocess(bundle, chosen)
    bundle.model.any_size = True  # --image-size asks for it
    scene = Scene(
        os.fspath(run), bundle, chosen, preprocess, device, tuple(open_pictures(images, preprocess)), listener
    )
    folder = Path(out) if out is not None else default_folder(Path(run))
    started, answers = time.perf_counter(), likeliest_classes(scene)
    figures, refused = make_figures(scene, names, folder)
    document = {
        "run": os.fspath(run),
        "model": name_of(bundle.model.config),
        "image_size": list(preprocess.image),
        "images": [one.name for one in scene.pictures],
        "answers": answers,
        "figures": figures,
        "refused": refused,
        "out": os.fspath(folder),
        "page": os.fspath(folder / "index.html"),
        "wall_seconds": time.perf_counter() - started,
    }
    write_album(folder, document, [(one.shown, one.name) for one in scene.pictures[:SEEN]])
    write_text(folder / "inspect.json", json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    return document


def make_figures(scene: Scene, names: Sequence[str], folder: Path) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Make and write figures: what is where, and why others could not be written, which is allowed with `all` alone.

    Raises UsageError where none can be written.
    """
    written, refused = [], {}
    for name in names:
        try:
            for one in import_module(FIGURES[name].module).make(scene):
                written.append(write_figure(one, folder))
                scene.listener.note(f"{one.title}: {folder / one.name}.png")
        except UsageError as error:
            if not scene.options.all:
                raise
            refused[name] = error.message
            scene.listener.note(f"no {name}: {error.message}")
    if not written:
        raise UsageError(f"no figure can be written of {scene.run}: " + "; ".join(refused.values()))
    return written, refused


def choose_figures(settings: InspectOptions, pictures: bool = False) -> list[str]:
    """The figures asked for, or the usual ones; of those, with `pictures` named, the ones that show them come first.

    Raises UsageError for an unknown one.
    """
    for name in settings.figures:
        if name not in FIGURES:
            raise UsageError(f"no figure {name}", nearest(name, FIGURES) or f"there are {', '.join(FIGURES)}")
    if settings.figures and not settings.all:
        return list(dict.fromkeys(settings.figures))
    names = [name for name, kind in FIGURES.items() if kind.default or settings.all]
    return sorted(names, key=lambda name: not FIGURES[name].of_pictures) if pictures else names


def likeliest_classes(scene: Scene) -> list[dict[str, Any]]:
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
    return [
        {"path": one.name, "classes": [{"class": bundle.classes[i], "probability": float(row[i])} for i in indices]}
        for one, row, indices in zip(pictures, rows, best, strict=True)
    ]


def resize_preprocess(bundle: Bundle, settings: InspectOptions) -> Preprocess:
    """The bundle's preprocessing, for images of --image-size: one number, or a height and a width."""
    if not settings.image_size:
        return bundle.preprocess
    size = settings.image_size * 2 if len(settings.image_size) == 1 else settings.image_size
    patch = bundle.model.config.patch
    if len(size) != 2 or any(length < 1 or length % p for length, p in zip(size, patch, strict=False)):
        raise UsageError(
            f"--image-size {' '.join(map(str, settings.image_size))} is not a multiple of patch {patch[0]}"
        )
    return replace(bundle.preprocess, image=(size[0], size[1]))


def default_folder(run: Path) -> Path:
    """Where figures go: into the run, or beside weights that are not one."""
    return run / "inspect" if run.is_dir() else Path(f"inspect-{slug(run.stem)[:60] or 'image'}")


def write_figure(figure: FigureResult, folder: Path) -> dict[str, Any]:
    """Write a figure's files, and say what is where."""
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / figure.name
    figure.figure.savefig(f"{place}.png", dpi=150, bbox_inches="tight", metadata={"Software": None})
    np.savez_compressed(f"{place}.npz", **figure.numbers)  # type: ignore[arg-type]
    files = {"png": f"{figure.name}.png", "npz": f"{figure.name}.npz"}
    if figure.table is not None:
        write_table(f"{place}.csv", *figure.table)
        files["csv"] = f"{figure.name}.csv"
    return {"name": figure.name, "title": figure.title, "caption": figure.caption, **files}
