"""What a run without labels learned, in pictures: restored images, attention of the last block, nearest images.

Computed once, when the run ends, and kept in the run's folder; its page reads it from there.
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
from vitreous.evaluation.knn import neighbours
from vitreous.inference.open_model import open_bundle
from vitreous.inspection.attention import attention
from vitreous.inspection.features import pooled
from vitreous.progress import Listener
from vitreous.reports.figures.attention import reader
from vitreous.reports.figures.features import class_of, training_features
from vitreous.reports.figures.reconstruction import load_objective, restore
from vitreous.reports.figures.subject import InspectOptions, Picture, Scene, see_picture
from vitreous.reports.pages.thumbnails import ENLARGED, SMALL, data_uri, enlarge, heat_map, scale_map, shrink
from vitreous.system.disk import write_text
from vitreous.system.machine import pick_device
from vitreous.training.folder import Folder

LEARNED = "learned.json"
IMAGES, ATTENDED, QUERIES, NEAR = 8, 4, 6, 6  # images restored, attended to, compared; and the nearest of each
COUNT = 64  # eight times as many training images are looked through
HEADS = 12  # shown of the last block


def write_learned(folder: Folder, listener: Listener) -> None:
    """Write RUN/learned.json for the page of a run without labels; what cannot be made is noted and left out."""
    run = folder.run()
    try:
        options = InspectOptions(device=run.device, precision="fp32", count=COUNT)
        bundle = open_bundle(folder.path, headless=True)
        scene = Scene(
            str(folder.path),
            bundle,
            options=options,
            preprocess=bundle.preprocess,
            device=pick_device(run.device),
            pictures=(),
            listener=listener,
        )
        pictures = [one for _, one in zip(range(IMAGES), (p for _, p in scene.readable(scene.split)), strict=False)]
        parts: dict[str, Any] = {"small": max(bundle.preprocess.image) < SMALL, "split": split_name(scene)}
        makers: dict[str, Callable[[], Any]] = {
            "restored": lambda: restored_images(scene, pictures),
            "attention": lambda: attention_maps(scene, pictures[:ATTENDED]),
            "nearest": lambda: nearest_images(scene),
        }
        for name, make in makers.items():
            parts[name] = part_of(make) if pictures else None
        write_text(folder.path / LEARNED, json.dumps(parts))
    except (OSError, VitreousError) as error:
        listener.note(f"no pictures of what the model learned: {error}")


def part_of(make: Callable[[], Any]) -> Any:
    """Return what is made, or None for what the model or the data do not have."""
    try:
        return make()
    except (UsageError, DataError):
        return None


def split_name(scene: Scene) -> str:
    """Return the name of the split that images are taken from."""
    return next(name for name, split in scene.data[1].splits.items() if split is scene.split)


def restored_images(scene: Scene, pictures: Sequence[Picture]) -> dict[str, Any]:
    """Return images, what the encoder sees of them, and what is restored.

    Raises UsageError for a run that restores nothing.
    """
    objective = load_objective(scene.run).to(scene.device)
    rows = [
        {"name": short(one), "pictures": [uri(one.shown), uri(result.seen), uri(result.restored)]}
        for one, result in zip(pictures, restore(objective, scene.preprocess, pictures), strict=True)
    ]
    return {"rows": rows, "caption": objective.config.restoration()}


def attention_maps(scene: Scene, pictures: Sequence[Picture]) -> dict[str, Any]:
    """Return images with the attention of each head of the last block. Raises UsageError for a model without."""
    depth = scene.model.config.depth
    rows, prefix = [], scene.model.config.prefix
    for one in pictures:
        weights = attention(scene.model, scene.input(one.pixels[None]), [depth - 1])[depth - 1][0, :HEADS, prefix:]
        maps = weights.unflatten(1, scene.grid).cpu()
        maps = (tile_frames(maps) if maps.ndim == 4 else maps).numpy()
        image, large = shrink(one.shown), enlarge(shrink(one.shown), ENLARGED)
        drawn = [data_uri(heat_map(large, scale_map(values))) for values in maps]
        rows.append({"name": short(one), "pictures": [uri(image), *drawn]})
    return {"rows": rows, "reader": reader(scene), "block": depth, "heads": len(rows[0]["pictures"]) - 1}


def nearest_images(scene: Scene) -> dict[str, Any]:
    """Return images with the training images of most similar features.

    Raises UsageError without others to compare with.
    """
    data = scene.data[1]
    train = data.splits["train"]
    labelled = is_labelled(train) and is_labelled(scene.split)
    chosen = [pair for _, pair in zip(range(QUERIES), scene.readable(scene.split), strict=False)]
    samples, known = training_features(scene, train, len(chosen) if scene.split is train else 0)
    features = torch.cat([pooled(scene.model, images).cpu() for images in scene.batches([one for _, one in chosen])])
    cosines, places = neighbours(known.numpy(), features.numpy(), min(NEAR, len(known)))
    rows = []
    for (sample, query), values, near in zip(chosen, cosines.tolist(), np.array(samples)[places].tolist(), strict=True):
        images = [see_picture(open_sample(train, one), train.name(one), scene.preprocess) for one in near]
        labels = [class_of(data, train, one) if labelled else "" for one in near]
        shown = [
            {"picture": uri(image.shown), "cosine": value, "label": label, "name": short(image)}
            for image, value, label in zip(images, values, labels, strict=True)
        ]
        label = class_of(data, scene.split, sample) if labelled else ""
        rows.append({"name": short(query), "picture": uri(query.shown), "label": label, "near": shown})
    return {"rows": rows, "images": len(samples)}


def short(picture: Picture) -> str:
    """Return the last part of an image's name."""
    return PurePath(picture.name).name


def uri(image: Image.Image) -> str:
    """Return an image for the page, small, as a data URI."""
    return data_uri(shrink(image))


def read_learned(path: Path) -> dict[str, Any]:
    """Read what `write_learned` wrote into a run's folder; empty where there is nothing."""
    file = path / LEARNED
    return json.loads(file.read_text("utf-8")) if file.is_file() else {}
