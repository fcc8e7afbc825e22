"""Images that show the features of a self-supervised run: reconstructions, attention of the last block, nearest
images.

They are computed once, at the end of the run, and stored in RUN/learned.json, which the run's page reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from PIL import Image

from vitreous.data.layouts.video import open_sample
from vitreous.data.rgb_images import tile_frames
from vitreous.data.split import is_labelled
from vitreous.errors import DataError, UsageError, VitreousError
from vitreous.evaluation.knn import find_nearest_neighbours
from vitreous.inference.open_model import open_bundle
from vitreous.inspection.attention import compute_attention_maps
from vitreous.inspection.features import extract_pooled_features
from vitreous.progress import ProgressListener
from vitreous.reports.figures.attention import describe_readout
from vitreous.reports.figures.features import compute_candidate_features, get_class_title
from vitreous.reports.figures.reconstruction import load_restoring_objective, restore_images
from vitreous.reports.figures.subject import FigureContext, InputImage, InspectOptions, load_input_image
from vitreous.reports.pages.thumbnails import (
    MIN_MAP_SIDE,
    MIN_SMOOTH_SIDE,
    encode_data_uri,
    enlarge_pixels,
    overlay_heat_map,
    scale_attention_map,
    shrink_image,
)
from vitreous.system.disk import write_text_atomic
from vitreous.system.machine import pick_device
from vitreous.training.folder import RunFolder

LEARNED_FILE = "learned.json"
# images to reconstruct, to show with attention, and to search neighbours for; neighbours of each image
MAX_RESTORED_IMAGES, MAX_ATTENTION_IMAGES, MAX_QUERY_IMAGES, NEAREST_IMAGES = 8, 4, 6, 6
CANDIDATE_COUNT = 64  # `--count` of the search: neighbours come from 8 x 64 training images
MAX_SHOWN_HEADS = 12  # heads of the last block whose attention is shown


def write_learned_images(folder: RunFolder, listener: ProgressListener) -> None:
    """Write RUN/learned.json for the page of a self-supervised run.

    A section that the model or the data do not support is null. If the file cannot be computed or written, this is
    logged and not raised.
    """
    run = folder.run()
    try:
        options = InspectOptions(device=run.device, precision="fp32", count=CANDIDATE_COUNT)
        bundle = open_bundle(folder.path, headless=True)
        context = FigureContext(
            str(folder.path),
            bundle,
            options=options,
            preprocess=bundle.preprocess,
            device=pick_device(run.device),
            images=(),
            listener=listener,
        )
        input_images = [
            image
            for _, image in zip(
                range(MAX_RESTORED_IMAGES),
                (candidate for _, candidate in context.iterate_readable(context.split)),
                strict=False,
            )
        ]
        sections: dict[str, Any] = {
            "is_small": max(bundle.preprocess.image) < MIN_SMOOTH_SIDE,
            "split": get_image_split_name(context),
        }
        makers: dict[str, Callable[[], Any]] = {
            "reconstructions": lambda: make_restored_images(context, input_images),
            "attention": lambda: make_attention_maps(context, input_images[:MAX_ATTENTION_IMAGES]),
            "neighbours": lambda: find_nearest_images(context),
        }
        for name, make in makers.items():
            sections[name] = make_or_none(make) if input_images else None
        write_text_atomic(folder.path / LEARNED_FILE, json.dumps(sections))
    except (OSError, VitreousError) as error:
        listener.note(f"no images of learned features: {error}")


def make_or_none(make: Callable[[], Any]) -> Any:
    """Return the section that `make` computes; None if it raises UsageError or DataError, since model or data do not
    support it."""
    try:
        return make()
    except (UsageError, DataError):
        return None


def get_image_split_name(context: FigureContext) -> str:
    """Return the name of the split whose images are shown."""
    return next(name for name, split in context.data[1].splits.items() if split is context.split)


def make_restored_images(context: FigureContext, input_images: Sequence[InputImage]) -> dict[str, Any]:
    """Return the section of reconstructions: for each image three data URIs, and a caption.

    The data URIs are the image, the encoder input and the reconstruction. Raises UsageError for a run whose objective
    does not reconstruct images.
    """
    objective = load_restoring_objective(context.run).to(context.device)
    rows = [
        {
            "name": get_short_name(image),
            "images": [
                encode_thumbnail_uri(image.rgb_image),
                encode_thumbnail_uri(result.encoder_input),
                encode_thumbnail_uri(result.restored),
            ],
        }
        for image, result in zip(input_images, restore_images(objective, context.preprocess, input_images), strict=True)
    ]
    return {"rows": rows, "caption": objective.config.describe_restoration()}


def make_attention_maps(context: FigureContext, input_images: Sequence[InputImage]) -> dict[str, Any]:
    """Return the section of attention: each image, and its attention map for each head of the last block.

    Images are data URIs. Raises UsageError for a model without attention.
    """
    depth = context.model.config.depth
    rows, prefix = [], context.model.config.prefix
    for input_image in input_images:
        weights = compute_attention_maps(context.model, context.to_model_input(input_image.pixels[None]), [depth - 1])[
            depth - 1
        ][0, :MAX_SHOWN_HEADS, prefix:]
        maps = weights.unflatten(1, context.grid).cpu()
        maps = (tile_frames(maps) if maps.ndim == 4 else maps).numpy()
        image, enlarged = (
            shrink_image(input_image.rgb_image),
            enlarge_pixels(shrink_image(input_image.rgb_image), MIN_MAP_SIDE),
        )
        overlays = [encode_data_uri(overlay_heat_map(enlarged, scale_attention_map(values))) for values in maps]
        rows.append({"name": get_short_name(input_image), "images": [encode_thumbnail_uri(image), *overlays]})
    return {"rows": rows, "readout": describe_readout(context), "block": depth, "heads": len(rows[0]["images"]) - 1}


def find_nearest_images(context: FigureContext) -> dict[str, Any]:
    """Return the section of nearest images: each query image, and the training images with the most similar features.

    Images are data URIs. Raises UsageError if there are no other images to compare with.
    """
    data = context.data[1]
    train = data.splits["train"]
    labelled = is_labelled(train) and is_labelled(context.split)
    queries = [pair for _, pair in zip(range(MAX_QUERY_IMAGES), context.iterate_readable(context.split), strict=False)]
    samples, candidate_features = compute_candidate_features(
        context, train, len(queries) if context.split is train else 0
    )
    features = torch.cat(
        [
            extract_pooled_features(context.model, images).cpu()
            for images in context.iterate_batches([item for _, item in queries])
        ]
    )
    cosines, neighbour_indices = find_nearest_neighbours(
        candidate_features.numpy(), features.numpy(), min(NEAREST_IMAGES, len(candidate_features))
    )
    rows = []
    for (sample, query), values, neighbour_samples in zip(
        queries, cosines.tolist(), np.array(samples)[neighbour_indices].tolist(), strict=True
    ):
        images = [
            load_input_image(open_sample(train, item), train.name(item), context.preprocess)
            for item in neighbour_samples
        ]
        labels = [get_class_title(data, train, item) if labelled else "" for item in neighbour_samples]
        neighbours = [
            {
                "image": encode_thumbnail_uri(image.rgb_image),
                "cosine": value,
                "label": label,
                "name": get_short_name(image),
            }
            for image, value, label in zip(images, values, labels, strict=True)
        ]
        label = get_class_title(data, context.split, sample) if labelled else ""
        rows.append(
            {
                "name": get_short_name(query),
                "image": encode_thumbnail_uri(query.rgb_image),
                "label": label,
                "neighbours": neighbours,
            }
        )
    return {"rows": rows, "candidates": len(samples)}


def get_short_name(image: InputImage) -> str:
    """Return the file name of an image."""
    return PurePath(image.name).name


def encode_thumbnail_uri(image: Image.Image) -> str:
    """Downscale an image for the page, and encode it as a data URI."""
    return encode_data_uri(shrink_image(image))


def read_learned_images(path: Path) -> dict[str, Any]:
    """Read the sections that `write_learned_images` stored in a run's folder `path`; an empty dict if there are
    none."""
    file = path / LEARNED_FILE
    return json.loads(file.read_text("utf-8")) if file.is_file() else {}
