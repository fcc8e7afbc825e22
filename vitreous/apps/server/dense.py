"""Handlers of the addresses that say what is where on a picture."""

from __future__ import annotations

from base64 import b64encode

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from vitreous.apps.server.requests import (
    WEIGHT,
    context,
    model_name,
    only_one,
    parse_share,
    parse_word,
    read_parameters,
    read_uploads,
    require_endpoint,
)
from vitreous.apps.server.responses import Refusal, json_response
from vitreous.data.annotations.drawing import class_colours, picture_of_map, png_of
from vitreous.inference.class_maps import picture_of, shares_of
from vitreous.inference.objects import THRESHOLD, draw_over, objects_of
from vitreous.tasks.detections import Detections
from vitreous.tasks.detections import detect as detect_objects
from vitreous.tasks.tiles import class_map, starts

TILES = 256  # of a picture, at most


async def segment(request: Request) -> Response:
    """The class of each pixel of one image. Raises Refusal, 404, for a model of classes of images, 413 for an image of
    too many tiles."""
    (service, info), parameters = context(request), read_parameters(request)
    served, card = service.served, service.served.predictor.card
    require_endpoint(served, "segment", "this model gives no class to pixels")
    form = parse_word("format", parameters, ("json", "png"))
    upload, image = only_one(await read_uploads(request, service.limits)), card.preprocess.plane
    with service.admit_images(info, min(WEIGHT, service.queue)):
        pixels, _ = await service.decoders.decode(upload.content, served.decode_settings, full_size=True)
        check_tiles(pixels, image)
        logits = served.predictor.engine.logits
        classes = await service.batcher.compute(
            lambda pixels: class_map(logits, pixels, image), pixels, info.deadline, alone=True
        )
    colours = class_colours(card.task.classes)
    if form == "png":
        return Response(png_of(picture_of_map(classes, colours)), media_type="image/png")
    shares = [{"class": name, "share": share} for name, share in shares_of(classes, card.task.classes).items()]
    numbers = b64encode(png_of(picture_of_map(classes, colours, palette=False))).decode()
    answer = {"size": list(classes.shape), "shares": shares, "map": "data:image/png;base64," + numbers}
    return json_response({"request_id": info.id, "model": model_name(served), **answer})


async def detect(request: Request) -> Response:
    """The objects on one image. Raises Refusal, 404, for a model that finds none, 413 for an image of too many
    tiles."""
    (service, info), parameters = context(request), read_parameters(request)
    served, card = service.served, service.served.predictor.card
    require_endpoint(served, "detect", "this model finds no objects")
    form = parse_word("format", parameters, ("json", "png"))
    tiles = parse_word("tiles", parameters, ("false", "true")) == "true"
    threshold = parse_share("threshold", parameters["threshold"]) if "threshold" in parameters else THRESHOLD
    upload, engine = only_one(await read_uploads(request, service.limits)), served.predictor.engine

    def compute(pixels: np.ndarray) -> tuple[Detections, bytes]:
        detections = detect_objects(engine.objects, pixels, card.preprocess, tiles, threshold)
        if form == "json":
            return detections, b""
        return detections, png_of(draw_over(picture_of(pixels), detections, card.task.classes))

    with service.admit_images(info, min(WEIGHT, service.queue)):
        pixels, _ = await service.decoders.decode(upload.content, served.decode_settings, full_size=True)
        if tiles:
            check_tiles(pixels, card.preprocess.plane)
        detections, png = await service.batcher.compute(compute, pixels, info.deadline, alone=True)
    if form == "png":
        return Response(png, media_type="image/png")
    objects = [{"segmentation": None, **one} for one in objects_of(detections, card.task.classes)]
    answer = {"size": list(detections.size), "objects": objects}
    return json_response({"request_id": info.id, "model": model_name(served), **answer})


def check_tiles(pixels: np.ndarray, image: tuple[int, int]) -> None:
    """Raise Refusal, 413, for (C, H, W) pixels of more than `TILES` tiles of a model's size."""
    count = len(starts(pixels.shape[1], image[0])) * len(starts(pixels.shape[2], image[1]))
    if count > TILES:
        size = f"{pixels.shape[2]} x {pixels.shape[1]} pixels are {count} tiles of {image[1]} x {image[0]}"
        raise Refusal(413, "too_large", size, f"at most {TILES} are answered: scale it down, or use `predict`")
