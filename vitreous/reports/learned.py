"""Images of what a self-supervised run learned: reconstructions, attention of the last block, nearest images.

Computed once, at the end of the run, and stored in its folder, from which its page reads them.
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
MAX_RESTORED_IMAGES, MAX_ATTENTION_IMAGES, MAX_QUERY_IMAGES, NEAREST_IMAGES = (
    8,
    4,
    6,
    6,
)  # numbers of reconstructed, attended and compared images, and neighbours of each
CANDIDATE_COUNT = 64  # eight times as many training images are searched
MAX_SHOWN_HEADS = 12  # heads of the last block


def write_learned_images(folder: RunFolder, listener: ProgressListener) -> None:
    """Write RUN/learned.json for the page of a self-supervised run. Sections that cannot be computed are logged and
    omitted."""
    run = folder.run()
    try:
        options = InspectOptions(device=run.device, precision="fp32", count=CANDIDATE_COUNT)
        bundle = open_bundle(folder.path, headless=True)
        scene = FigureContext(
            str(folder.path),
            bundle,
            options=options,
            preprocess=bundle.preprocess,
            device=pick_device(run.device),
            pictures=(),
            listener=listener,
        )
        pictures = [
            one for _, one in zip(range(MAX_RESTORED_IMAGES), (p for _, p in scene.readable(scene.split)), strict=False)
        ]
        parts: dict[str, Any] = {
            "is_small": max(bundle.preprocess.image) < MIN_SMOOTH_SIDE,
            "split": get_image_split_name(scene),
        }
        makers: dict[str, Callable[[], Any]] = {
            "reconstructions": lambda: make_restored_images(scene, pictures),
            "attention": lambda: make_attention_maps(scene, pictures[:MAX_ATTENTION_IMAGES]),
            "neighbours": lambda: find_nearest_images(scene),
        }
        for name, make in makers.items():
            parts[name] = make_or_none(make) if pictures else None
        write_text_atomic(folder.path / LEARNED_FILE, json.dumps(parts))
    except (OSError, VitreousError) as error:
        listener.note(f"no images of learned features: {error}")


def make_or_none(make: Callable[[], Any]) -> Any:
    """Call `make`, and return None if the model or the data do not support it."""
    try:
        return make()
    except (UsageError, DataError):
        return None


def get_image_split_name(scene: FigureContext) -> str:
    """Return the name of the split that supplies the images."""
    return next(name for name, split in scene.data[1].splits.items() if split is scene.split)


def make_restored_images(scene: FigureContext, pictures: Sequence[InputImage]) -> dict[str, Any]:
    """Return images, their encoder input, and their reconstruction.

    Raises UsageError for a run that reconstructs nothing.
    """
    objective = load_restoring_objective(scene.run).to(scene.device)
    rows = [
        {
            "name": get_short_name(one),
            "images": [
                encode_thumbnail_uri(one.shown),
                encode_thumbnail_uri(result.seen),
                encode_thumbnail_uri(result.restored),
            ],
        }
        for one, result in zip(pictures, restore_images(objective, scene.preprocess, pictures), strict=True)
    ]
    return {"rows": rows, "caption": objective.config.describe_restoration()}


def make_attention_maps(scene: FigureContext, pictures: Sequence[InputImage]) -> dict[str, Any]:
    """Return images with the attention of each head of the last block. Raises UsageError for a model without
    attention."""
    depth = scene.model.config.depth
    rows, prefix = [], scene.model.config.prefix
    for one in pictures:
        weights = compute_attention_maps(scene.model, scene.input(one.pixels[None]), [depth - 1])[depth - 1][
            0, :MAX_SHOWN_HEADS, prefix:
        ]
        maps = weights.unflatten(1, scene.grid).cpu()
        maps = (tile_frames(maps) if maps.ndim == 4 else maps).numpy()
        image, large = shrink_image(one.shown), enlarge_pixels(shrink_image(one.shown), MIN_MAP_SIDE)
        drawn = [encode_data_uri(overlay_heat_map(large, scale_attention_map(values))) for values in maps]
        rows.append({"name": get_short_name(one), "images": [encode_thumbnail_uri(image), *drawn]})
    return {"rows": rows, "readout": describe_readout(scene), "block": depth, "heads": len(rows[0]["images"]) - 1}


def find_nearest_images(scene: FigureContext) -> dict[str, Any]:
    """Return images with the training images of most similar features.

    Raises UsageError if there are no other images to compare with.
    """
    data = scene.data[1]
    train = data.splits["train"]
    labelled = is_labelled(train) and is_labelled(scene.split)
    chosen = [pair for _, pair in zip(range(MAX_QUERY_IMAGES), scene.readable(scene.split), strict=False)]
    samples, known = compute_candidate_features(scene, train, len(chosen) if scene.split is train else 0)
    features = torch.cat(
        [extract_pooled_features(scene.model, images).cpu() for images in scene.batches([one for _, one in chosen])]
    )
    cosines, places = find_nearest_neighbours(known.numpy(), features.numpy(), min(NEAREST_IMAGES, len(known)))
    rows = []
    for (sample, query), values, near in zip(chosen, cosines.tolist(), np.array(samples)[places].tolist(), strict=True):
        images = [load_input_image(open_sample(train, one), train.name(one), scene.preprocess) for one in near]
        labels = [get_class_title(data, train, one) if labelled else "" for one in near]
        shown = [
            {"image": encode_thumbnail_uri(image.shown), "cosine": value, "label": label, "name": get_short_name(image)}
            for image, value, label in zip(images, values, labels, strict=True)
        ]
        label = get_class_title(data, scene.split, sample) if labelled else ""
        rows.append(
            {
                "name": get_short_name(query),
                "image": encode_thumbnail_uri(query.shown),
                "label": label,
                "neighbours": shown,
            }
        )
    return {"rows": rows, "candidates": len(samples)}


def get_short_name(picture: InputImage) -> str:
    """Return the file name of an image."""
    return PurePath(picture.name).name


def encode_thumbnail_uri(image: Image.Image) -> str:
    """Encode a thumbnail for the page as a data URI."""
    return encode_data_uri(shrink_image(image))


def read_learned_images(path: Path) -> dict[str, Any]:
    """Read the output of `write_learned_images` from a run's folder; empty if there is none."""
    file = path / LEARNED_FILE
    return json.loads(file.read_text("utf-8")) if file.is_file() else {}
