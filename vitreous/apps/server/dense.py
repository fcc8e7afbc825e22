"""Handlers of the endpoints for semantic segmentation and object detection."""

from __future__ import annotations

from base64 import b64encode

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from vitreous.apps.server.requests import (
    HEAVY_REQUEST_COST,
    describe_model_version,
    get_request_context,
    parse_choice,
    parse_fraction,
    read_parameters,
    read_uploads,
    require_endpoint,
    require_single_upload,
)
from vitreous.apps.server.responses import Refusal, json_response
from vitreous.data.annotations.drawing import class_map_to_image, create_class_colours, encode_png
from vitreous.inference.class_maps import class_pixel_shares, pixels_to_rgb
from vitreous.inference.objects import DEFAULT_THRESHOLD, detections_to_dicts, draw_detections
from vitreous.tasks.detections import Detections
from vitreous.tasks.detections import detect_objects as detect_objects
from vitreous.tasks.tiles import list_tile_starts, predict_class_map

MAX_TILES = 256  # maximum tiles of an image


async def handle_segment(request: Request) -> Response:
    """Predict the class of each pixel of one image. Raises Refusal: 404 if the model is not a segmentation model, 413
    if the image has too many tiles."""
    (service, info), parameters = get_request_context(request), read_parameters(request)
    served, card = service.served, service.served.predictor.card
    require_endpoint(served, "segment", "this is not a segmentation model")
    response_format = parse_choice("format", parameters, ("json", "png"))
    upload, image = require_single_upload(await read_uploads(request, service.limits)), card.preprocess.plane
    with service.admit_images(info, min(HEAVY_REQUEST_COST, service.queue_limit)):
        pixels, _ = await service.decoders.decode(upload.content, served.decode_settings, full_size=True)
        check_tiles(pixels, image)
        logits = served.predictor.engine.logits
        classes = await service.batcher.compute(
            lambda pixels: predict_class_map(logits, pixels, image), pixels, info.deadline, alone=True
        )
    colours = create_class_colours(card.task.classes)
    if response_format == "png":
        return Response(encode_png(class_map_to_image(classes, colours)), media_type="image/png")
    shares = [{"class": name, "share": share} for name, share in class_pixel_shares(classes, card.task.classes).items()]
    encoded_map = b64encode(encode_png(class_map_to_image(classes, colours, palette=False))).decode()
    document = {
        "size": list(classes.shape),
        "class_shares": shares,
        "class_map": "data:image/png;base64," + encoded_map,
    }
    return json_response({"request_id": info.id, "model": describe_model_version(served), **document})


async def handle_detect(request: Request) -> Response:
    """Detect the objects in one image. Raises Refusal: 404 if the model is not a detector, 413 if the image has too
    many tiles."""
    (service, info), parameters = get_request_context(request), read_parameters(request)
    served, card = service.served, service.served.predictor.card
    require_endpoint(served, "detect", "this is not a detector")
    response_format = parse_choice("format", parameters, ("json", "png"))
    tiles = parse_choice("tiles", parameters, ("false", "true")) == "true"
    threshold = parse_fraction("threshold", parameters["threshold"]) if "threshold" in parameters else DEFAULT_THRESHOLD
    upload, engine = require_single_upload(await read_uploads(request, service.limits)), served.predictor.engine

    def compute_detections(pixels: np.ndarray) -> tuple[Detections, bytes]:
        """Detect the objects in pixels (C, H, W), in the computing thread. Also return a PNG with them, if
        requested."""
        detections = detect_objects(engine.objects, pixels, card.preprocess, tiles, threshold)
        if response_format == "json":
            return detections, b""
        return detections, encode_png(draw_detections(pixels_to_rgb(pixels), detections, card.task.classes))

    with service.admit_images(info, min(HEAVY_REQUEST_COST, service.queue_limit)):
        pixels, _ = await service.decoders.decode(upload.content, served.decode_settings, full_size=True)
        if tiles:
            check_tiles(pixels, card.preprocess.plane)
        detections, png = await service.batcher.compute(compute_detections, pixels, info.deadline, alone=True)
    if response_format == "png":
        return Response(png, media_type="image/png")
    objects = [{"segmentation": None, **fields} for fields in detections_to_dicts(detections, card.task.classes)]
    document = {"size": list(detections.size), "objects": objects}
    return json_response({"request_id": info.id, "model": describe_model_version(served), **document})


def check_tiles(pixels: np.ndarray, image: tuple[int, int]) -> None:
    """Raise Refusal, 413, if (C, H, W) pixels have more than `MAX_TILES` tiles of the model's image size."""
    count = len(list_tile_starts(pixels.shape[1], image[0])) * len(list_tile_starts(pixels.shape[2], image[1]))
    if count > MAX_TILES:
        problem = f"{pixels.shape[2]} x {pixels.shape[1]} pixels need {count} tiles of {image[1]} x {image[0]}"
        raise Refusal(
            413, "too_large", problem, f"use at most {MAX_TILES} tiles: scale the image down, or use `vitreous predict`"
        )
