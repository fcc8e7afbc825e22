"""The verb `inspect`: figures of a model's weights, features and attention, as images, arrays and one page."""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import numpy as np
import torch
from PIL import Image

from vitreous.config import apply_keyword_options
from vitreous.data.modalities.base import Preprocess
from vitreous.errors import UsageError, suggest_nearest
from vitreous.inference.open_model import open_bundle
from vitreous.progress import NullListener, ProgressListener
from vitreous.reports.figures.subject import (
    MAX_SHOWN_IMAGES,
    FigureContext,
    FigureResult,
    InspectOptions,
    open_input_images,
)
from vitreous.reports.pages.formats import render_template
from vitreous.reports.pages.thumbnails import MIN_SMOOTH_SIDE, encode_data_uri, shrink_image
from vitreous.reports.readings import slugify_name
from vitreous.system.disk import write_text_atomic
from vitreous.system.machine import describe_emulation, pick_device
from vitreous.system.tables import write_csv_file
from vitreous.tasks.documents import FigureFiles, InspectionDocument
from vitreous.weights.bundle import Bundle

if TYPE_CHECKING:
    from vitreous.keywords import InspectKeywords


class FigureKind(NamedTuple):
    """A figure of `inspect`.

    `module` is the module of `reports/figures` that draws it. `default`: it is drawn if no figure is named.
    `of_pictures`: it shows the input images. `styled`: it is a chart in `CHART_STYLE`. `modality`: it is for models of
    images, clips, volumes, signals, or all.
    """

    module: str
    default: bool = False
    of_pictures: bool = False
    styled: bool = False
    modality: str = "images"


FIGURES = {
    "filters": FigureKind("features", default=True, styled=True),
    "positions": FigureKind("positions", default=True, styled=True),
    "distance": FigureKind("attention", default=True, modality="all"),
    "clips": FigureKind("clips", default=True, of_pictures=True, modality="clips"),
    "slices": FigureKind("slices", default=True, of_pictures=True, modality="volumes"),
    "curves": FigureKind("slices", default=True, of_pictures=True, modality="signals"),
    "rollout": FigureKind("attention", default=True, of_pictures=True),
    "attention": FigureKind("attention", of_pictures=True),
    "gradient": FigureKind("attention", of_pictures=True),
    "segments": FigureKind("attention", of_pictures=True),
    "fourier": FigureKind("layers", styled=True),
    "features": FigureKind("features", of_pictures=True, styled=True),
    "nearest": FigureKind("features", of_pictures=True, styled=True),
    "reconstruction": FigureKind("reconstruction", of_pictures=True),
    "similarity": FigureKind("layers", styled=True, modality="all"),
    "cost": FigureKind("layers", styled=True, modality="all"),
}
TOP_CLASSES = 3  # top classes listed per image


def inspect(
    run: str | os.PathLike[str],
    images: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
    out: str | os.PathLike[str] | None = None,
    settings: InspectOptions | None = None,
    listener: ProgressListener | None = None,
    **options: Unpack[InspectKeywords],
) -> InspectionDocument:
    """Draw figures of a model into files, and return a document that lists and describes them.

    `images` is a file, a folder, or a list of both; figures that need a dataset use the run's. `options` are the fields
    of `InspectOptions`, as on the command line: `figures=["rollout"]`, `device="cpu"`. Every figure is written as
    OUT/NAME.png with its arrays in NAME.npz (and NAME.csv). OUT/index.html shows the images, the model's predictions
    and all figures. `out` defaults to RUN/inspect, or to inspect-NAME in the current folder for other weights.

    Raises UsageError for an unknown option, and for a requested figure that the model does not support. If no figures
    are requested, or with `all`, unsupported figures are skipped and the reason is logged.
    """
    known_keywords = ("images", "out", "listener")
    inspect_options: InspectOptions = apply_keyword_options(
        "inspect", dict(options), settings or InspectOptions(), extra_names=known_keywords
    )[0]
    images, listener = [images] if isinstance(images, (str, os.PathLike)) else images, listener or NullListener()
    check_figure_names(inspect_options.figures)
    bundle = drop_adapter(open_bundle(run, headless=True, note=listener.note), listener)
    names = choose_figures(inspect_options, bool(images), bundle.preprocess.noun)
    device = pick_device(inspect_options.device)
    if emulation_note := describe_emulation(inspect_options.precision, device):
        listener.note(emulation_note)
    if not bundle.preprocess.stacks:
        listener.note("figures use one grid: images are squashed to the model's image size, or to --image-size")
        bundle = replace(bundle, preprocess=bundle.preprocess.with_one_size())
    preprocess = resize_preprocess(bundle, inspect_options)
    bundle.model.any_size = True  # required by --image-size
    context = FigureContext(
        os.fspath(run),
        bundle,
        options=inspect_options,
        preprocess=preprocess,
        device=device,
        images=tuple(open_input_images(images, preprocess)),
        listener=listener,
    )
    folder = Path(out) if out is not None else default_inspect_folder(Path(run))
    start_time, predictions = time.perf_counter(), predict_top_classes(context)
    figures, skipped, drawings = make_figures(context, names, folder)
    document: InspectionDocument = {
        "run": os.fspath(run),
        "model": bundle.model.config.name(),
        "image_size": list(preprocess.image),
        "images": [image.name for image in context.images],
        "predictions": predictions,
        "figures": figures,
        "skipped": skipped,
        "out": os.fspath(folder),
        "page": os.fspath(folder / "index.html"),
        "wall_seconds": time.perf_counter() - start_time,
    }
    write_figure_page(
        folder, document, drawings, [(image.rgb_image, image.name) for image in context.images[:MAX_SHOWN_IMAGES]]
    )
    write_text_atomic(folder / "inspect.json", json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    return document


def drop_adapter(bundle: Bundle, listener: ProgressListener) -> Bundle:
    """Replace a ViT with an adapter by the ViT alone, and log this. Other bundles are returned unchanged."""
    backbone = bundle.model.inspected_backbone()
    if backbone is bundle.model:
        return bundle
    listener.note("figures show the ViT without its adapter")
    return replace(bundle, model=backbone.eval())


def make_figures(
    context: FigureContext, names: Sequence[str], folder: Path
) -> tuple[list[FigureFiles], dict[str, str], dict[str, str]]:
    """Draw and write figures.

    Returns the files of each figure, the reason for each skipped figure, and the page markup of each figure by name.
    Raises UsageError if no figure can be drawn, and for the first requested figure that cannot be drawn.
    """
    from matplotlib import rc_context

    from vitreous.reports.figures.drawing import CHART_STYLE
    from vitreous.reports.pages.plots import INK_STYLE

    written, skipped, drawings = list[FigureFiles](), dict[str, str](), dict[str, str]()
    for name in names:
        figure_kind = FIGURES[name]
        try:
            make = getattr(import_module(f"vitreous.reports.figures.{figure_kind.module}"), f"make_{name}")
            with rc_context(INK_STYLE | (CHART_STYLE if figure_kind.styled else {})):
                for figure in make(context):
                    written.append(write_figure(figure, folder))
                    drawing = render_figure_svg(figure)
                    write_text_atomic(folder / f"{figure.name}.svg", drawing)
                    drawings[figure.name] = drawing if figure.animation is None else render_animation_markup(figure)
                    context.listener.note(f"{figure.title}: {folder / figure.name}.png")
        except UsageError as error:
            if context.options.figures and not context.options.all:
                raise
            skipped[name] = error.message
            context.listener.note(f"no {name}: {error.message}")
    if not written:
        raise UsageError(f"no figure can be drawn for {context.run}: " + "; ".join(skipped.values()))
    return written, skipped, drawings


def check_figure_names(names: Sequence[str]) -> None:
    """Raise UsageError for an unknown figure."""
    for name in names:
        if name not in FIGURES:
            raise UsageError(f"unknown figure {name}", suggest_nearest(name, FIGURES) or f"use {', '.join(FIGURES)}")


def choose_figures(settings: InspectOptions, has_images: bool = False, modality: str = "images") -> list[str]:
    """Return the names of the requested figures or, if there are none, of the default figures of a modality.

    With `has_images`, default figures that show the input images come first. Raises UsageError for a figure of another
    modality.
    """
    names = [name for name, figure_kind in FIGURES.items() if figure_kind.modality in (modality, "all")]
    if settings.figures and not settings.all:
        if unavailable := [name for name in settings.figures if name not in names]:
            raise UsageError(
                f"figure {unavailable[0]} is not available for models of {modality}", f"use {', '.join(names)}"
            )
        return list(dict.fromkeys(settings.figures))
    names = [name for name in names if FIGURES[name].default or settings.all]
    return sorted(names, key=lambda name: not FIGURES[name].of_pictures) if has_images else names


def predict_top_classes(context: FigureContext) -> list[Mapping[str, object]]:
    """Return the top classes of the first input images, as in `predict --json`.

    A model without a head gives an empty list of classes. Predictions are computed in float32: call this function
    before `context.model` casts the weights to the precision of the figures.
    """
    bundle, predictions = context.bundle, list[Mapping[str, object]]()
    model = bundle.model.to(context.device).eval()
    for image in context.images[:MAX_SHOWN_IMAGES]:
        classes = []
        if bundle.classes:
            with torch.no_grad():
                logits = model(context.preprocess.normalise(image.pixels[None].to(context.device)))
            probabilities = bundle.task.activate(logits.double().cpu().numpy())[0]
            best = np.argsort(-probabilities, kind="stable")[:TOP_CLASSES]
            classes = [{"class": bundle.classes[i], "probability": float(probabilities[i])} for i in best]
        predictions.append({"path": image.name, "classes": classes})
    return predictions


def resize_preprocess(bundle: Bundle, settings: InspectOptions) -> Preprocess:
    """Return the bundle's preprocessing at --image-size, or unchanged if it is not set.

    --image-size is one number, or height and width; for volumes depth, height and width. Raises UsageError for a size
    that is not a multiple of the patch size, and for another number of values.
    """
    if not settings.image_size:
        return bundle.preprocess
    axes = bundle.preprocess.resized_axes
    size = settings.image_size * axes if len(settings.image_size) == 1 else settings.image_size
    patch = bundle.model.config.patch[-axes:]
    if len(size) != axes:
        raise UsageError(
            f"--image-size has {len(size)} values, but {bundle.preprocess.noun} have {axes} axes",
            f"set one value, or {axes}" if axes > 1 else "set one value",
        )
    if any(length < 1 or length % p for length, p in zip(size, patch, strict=False)):
        raise UsageError(
            f"--image-size {' '.join(map(str, settings.image_size))} is not divisible by patch size {patch[0]}"
        )
    return replace(bundle.preprocess, image=(*bundle.preprocess.image[:-axes], *size))


def default_inspect_folder(run: Path) -> Path:
    """Return the default output folder: RUN/inspect, or for other weights inspect-NAME in the current folder."""
    return run / "inspect" if run.is_dir() else Path(f"inspect-{slugify_name(run.stem)[:60] or 'image'}")


def write_figure(figure: FigureResult, folder: Path) -> FigureFiles:
    """Write a figure as PNG, its arrays as NPZ and, if it has them, its animation and table; return the file names with
    title and caption."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / figure.name
    figure.figure.savefig(f"{stem}.png", dpi=150, bbox_inches="tight", metadata={"Software": None})
    arrays: dict[str, Any] = figure.arrays
    np.savez_compressed(f"{stem}.npz", **arrays)
    files: FigureFiles = {
        "name": figure.name,
        "title": figure.title,
        "caption": figure.caption,
        "png": f"{figure.name}.png",
        "svg": f"{figure.name}.svg",
        "npz": f"{figure.name}.npz",
    }
    if figure.animation is not None:
        Path(f"{stem}.gif").write_bytes(figure.animation)
        files["gif"] = f"{figure.name}.gif"
    if figure.table is not None:
        write_csv_file(f"{stem}.csv", *figure.table)
        files["csv"] = f"{figure.name}.csv"
    return files


def render_figure_svg(figure: FigureResult) -> str:
    """Convert a figure to SVG markup; text and axes have the page's text colour."""
    from vitreous.reports.pages.plots import figure_to_svg_markup

    return figure_to_svg_markup(figure.figure, figure.title, dpi=150, bbox_inches="tight")


def render_animation_markup(figure: FigureResult) -> str:
    """Return an `img` element that embeds the GIF of an animated figure."""
    from markupsafe import Markup

    data = base64.b64encode(figure.animation or b"").decode()
    return Markup('<img src="data:image/gif;base64,{}" alt="{}">').format(data, figure.title)


def write_figure_page(
    folder: Path,
    document: InspectionDocument,
    drawings: Mapping[str, str],
    input_images: Sequence[tuple[Image.Image, str]] = (),
) -> None:
    """Write FOLDER/index.html from the document of `inspect`.

    The page starts with `input_images`, pairs of image and name, and their predictions. `drawings` maps the name of
    each figure to its markup.
    """
    image_entries = [
        {
            "name": Path(name).name,
            "image": encode_data_uri(shrink_image(image)),
            "small": max(image.size) < MIN_SMOOTH_SIDE,
            **prediction,
        }
        for (image, name), prediction in zip(input_images, document["predictions"], strict=True)
    ]
    write_text_atomic(
        folder / "index.html", render_template("album.html", **document, drawings=drawings, input_images=image_entries)
    )
