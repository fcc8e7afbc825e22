"""Handlers of the endpoints, and the table of routes."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from vitreous.apps.server.dense import handle_detect, handle_segment
from vitreous.apps.server.model import ServedModel
from vitreous.apps.server.openapi import build_openapi_document
from vitreous.apps.server.requests import (
    HEAVY_REQUEST_COST,
    Upload,
    describe_model_version,
    get_request_context,
    parse_choice,
    parse_fraction,
    parse_int,
    read_parameters,
    read_uploads,
    require_endpoint,
    require_image_input,
    require_single_upload,
)
from vitreous.apps.server.responses import Refusal, json_response
from vitreous.apps.server.sampling import handle_sample
from vitreous.apps.server.service import RequestInfo, Service
from vitreous.apps.server.zero_shot import handle_zero_shot
from vitreous.errors import UsageError

MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "png": "image/png",
    "ico": "image/x-icon",
}
PUBLIC_ROUTES = frozenset(("healthz", "readyz", "page", "static"))  # routes that need no token


def build_page_routes() -> list[Route]:
    """Build a route for each file of the web page."""
    routes = []
    for file in files("vitreous.apps.server.page").iterdir():
        suffix = file.name.rpartition(".")[2]
        if file.is_file() and suffix in MEDIA_TYPES:
            path, name = ("/", "page") if file.name == "index.html" else (f"/static/{file.name}", "static")
            # reloading the page must reload its files
            response = Response(file.read_bytes(), 200, {"cache-control": "no-cache"}, MEDIA_TYPES[suffix])
            routes.append(Route(path, response, methods=["GET"], name=name))
    return routes


async def handle_healthz(request: Request) -> Response:
    """Return that the process is alive."""
    return json_response({"status": "alive"})


async def handle_readyz(request: Request) -> Response:
    """Return whether the server is ready to serve predictions: 200, or 503 with the reason."""
    state = get_request_context(request)[0].state
    if state == "ready":
        return json_response({"status": state})
    return json_response({"status": state}, 503, {"retry-after": "5"})


async def handle_metrics(request: Request) -> Response:
    """Return the metrics in Prometheus text format."""
    return Response(
        get_request_context(request)[0].metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8"
    )


async def handle_openapi(request: Request) -> Response:
    """Return the OpenAPI description of the server."""
    service, _ = get_request_context(request)
    cache = service.served.cache
    if "openapi" not in cache:
        cache["openapi"] = json_response(build_openapi_document(service.limits, service.root_path))
    return cache["openapi"]


async def handle_model(request: Request) -> Response:
    """Return the description of the model. It is cached, since computing 30 descriptions costs as much as an image."""
    service, _ = get_request_context(request)
    read_parameters(request)
    cache = service.served.cache
    if "model" not in cache:
        limits = {name: getattr(service.limits, name) for name in ("bytes", "pixels", "images", "in_flight_bytes")}
        limits["queue"] = service.queue_limit
        cache["model"] = json_response({**service.served.describe(), "limits": limits})
    return cache["model"]


async def handle_predict(request: Request) -> Response:
    """Predict classes and probabilities, or values, for images. Raises Refusal: 404 if the model does not predict
    these, 422 for invalid parameters."""
    service, parameters = get_request_context(request)[0], read_parameters(request)
    served, card = service.served, service.served.predictor.card
    require_image_input(card)
    require_endpoint(served, "predict", f"this model {card.task.missing_outputs[0]}")
    top = parse_int("top", parameters["top"], 1, len(card.task.outputs)) if "top" in parameters else None
    threshold = parse_fraction("threshold", parameters["threshold"]) if "threshold" in parameters else None
    try:
        prediction_format = served.predictor.prediction_format(top, threshold)
    except UsageError as error:
        raise Refusal(422, "bad_parameter", error.message.removeprefix("--"), error.hint) from None

    def format_prediction(name: str | None, output: np.ndarray) -> dict[str, Any]:
        """Format the prediction for an image as its JSON entry."""
        return {"name": name, **prediction_format.to_fields(prediction_format.predict(output, "")), "error": None}

    empty_fields = prediction_format.to_fields(prediction_format.format_error("", ""))
    return await compute_image_responses(
        request,
        served,
        work=served.predictor.activations,
        key="predictions",
        describe=format_prediction,
        empty_fields=empty_fields,
    )


async def handle_embed(request: Request) -> Response:
    """Compute features of images. Raises Refusal, 404, for a model without features."""
    served = get_request_context(request)[0].served
    read_parameters(request)
    require_image_input(served.predictor.card)
    if not served.has_features:
        raise Refusal(404, "not_available", "this model has no features", "serve the run that it was exported from")

    def format_embedding(name: str | None, features: np.ndarray) -> dict[str, Any]:
        """Format the features of an image as its JSON entry."""
        return {"name": name, "embedding": [float(f"{v:.8g}") for v in features.tolist()], "error": None}

    return await compute_image_responses(
        request,
        served,
        work=served.predictor.engine.features,
        key="embeddings",
        describe=format_embedding,
        empty_fields={"embedding": []},
    )


async def compute_image_responses(
    request: Request,
    served: ServedModel,
    work: Callable[[Any], np.ndarray],
    key: str,
    describe: Callable[[str | None, np.ndarray], dict[str, Any]],
    empty_fields: dict[str, Any],
) -> Response:
    """Decode the images of a request, compute the readable ones, and return a JSON entry for each image, in order.

    `work` maps (B, C, *image) pixels to (B, ...). `describe` maps an image's name and its output to its JSON entry.
    `key` is the key of the entries, `empty_fields` are the fields of an image that cannot be read. Raises Refusal if no
    image can be read.
    """
    service, info = get_request_context(request)
    uploads = await read_uploads(request, service.limits)
    with service.admit_images(info, len(uploads)):
        names = [upload.name for upload in uploads]
        tasks = [asyncio.ensure_future(compute_image(service, info, served, work, upload)) for upload in uploads]
        del uploads
        try:
            results = await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            raise
    if all(isinstance(result, Refusal) for result in results):
        raise results[0]
    entries = [
        {"name": name, **empty_fields, "error": {"code": result.name, "message": result.message}}
        if isinstance(result, Refusal)
        else describe(name, result)
        for name, result in zip(names, results, strict=True)
    ]
    document = {"request_id": info.id, "model": describe_model_version(served), key: entries}
    if key == "embeddings":
        document["width"] = max(len(entry["embedding"]) for entry in entries)
    return json_response(document)


async def compute_image(service: Service, info: RequestInfo, served: ServedModel, work: Any, upload: Upload) -> Any:
    """Return the output of `work` for one image, or the Refusal if it cannot be decoded."""
    try:
        pixels, _ = await service.decoders.decode(upload.content, served.decode_settings)
    except Refusal as refusal:
        return refusal
    return await service.batcher.compute(work, pixels, info.deadline)


async def handle_attention(request: Request) -> Response:
    """Compute the attention of one image, as JSON or as an image. Raises Refusal: 404 for a model without attention,
    422 for invalid parameters."""
    from vitreous.apps.server import attention as attention_api

    service, info = get_request_context(request)
    served, bundle = service.served, require_bundle(service.served, "attention")
    parameters = read_parameters(request)
    image_format = "gif" if bundle.preprocess.is_animated else "png"
    response_format = parse_choice("format", parameters, ("json", image_format))
    options = attention_api.AttentionRequest.parse(parameters, bundle.model, bundle.preprocess)
    if response_format != "json" and "all" in (options.layer, options.head):
        problem = f"a {response_format.upper()} cannot contain several maps"
        raise Refusal(422, "bad_parameter", problem, "select one layer and one head, or format=json")
    render = attention_api.attention_to_json if response_format == "json" else attention_api.render_attention_image
    upload = require_single_upload(await read_uploads(request, service.limits))
    with service.admit_images(info, min(HEAVY_REQUEST_COST, service.queue_limit)):
        pixels, (width, height) = await service.decoders.decode(upload.content, served.decode_settings, with_size=True)
        result = await service.batcher.compute(
            lambda image: render(bundle, image, options), pixels, info.deadline, alone=True
        )
    if isinstance(result, bytes):
        return Response(result, media_type=f"image/{response_format}")
    box = attention_api.compute_visible_box(served.predictor.card.preprocess, width, height)
    return json_response({"request_id": info.id, "model": describe_model_version(served), **result, "box": box})


async def handle_frames(request: Request) -> Response:
    """Return the model's input frames of one clip as a PNG, stacked vertically. Raises Refusal, 404, if the model does
    not take clips."""
    from vitreous.apps.server import attention as attention_api

    service, info = get_request_context(request)
    read_parameters(request)
    require_bundle(service.served, "frames")
    upload = require_single_upload(await read_uploads(request, service.limits))
    with service.admit_images(info, 1):
        pixels, _ = await service.decoders.decode(upload.content, service.served.decode_settings)
        png = await service.batcher.compute(attention_api.render_clip_frames, pixels, info.deadline, alone=True)
    return Response(png, media_type="image/png")


async def handle_neighbours(request: Request) -> Response:
    """Find the training images nearest to one image. Raises Refusal, 404, if the run has no index."""
    (service, info), parameters = get_request_context(request), read_parameters(request)
    served = service.served
    count = parse_int("count", parameters["count"], 1, 50) if "count" in parameters else 8
    index = served.index
    if index is None:
        raise Refusal(404, "not_available", "this run has no index", "create it: vitreous embed RUN --index")
    upload = require_single_upload(await read_uploads(request, service.limits))
    with service.admit_images(info, 1):
        pixels, _ = await service.decoders.decode(upload.content, served.decode_settings)
        features = await service.batcher.compute(served.predictor.engine.features, pixels, info.deadline)
        nearest = await service.batcher.compute(
            lambda feature: index.nearest(feature, count), features, info.deadline, alone=True
        )
    neighbours = [
        {
            "label": neighbour.label,
            "name": neighbour.name,
            "similarity": round(float(neighbour.similarity), 6),
            "thumbnail": "data:image/jpeg;base64," + b64encode(neighbour.thumbnail).decode()
            if neighbour.thumbnail
            else None,
        }
        for neighbour in nearest
    ]
    return json_response({"request_id": info.id, "model": describe_model_version(served), "neighbours": neighbours})


async def handle_positions(request: Request) -> Response:
    """Return the similarities of the position embeddings. Raises Refusal, 404, for a model without them."""
    from vitreous.apps.server import attention as attention_api

    return json_response(await compute_cached(request, "positions", attention_api.compute_position_similarity))


async def handle_filters(request: Request) -> Response:
    """Return the filters of the patch embedding as a PNG. Raises Refusal, 404, for a model without them."""
    from vitreous.apps.server import attention as attention_api

    return Response(
        await compute_cached(request, "filters", attention_api.render_patch_filters), media_type="image/png"
    )


async def compute_cached(request: Request, name: str, work: Callable[[Any], Any]) -> Any:
    """Return a result that depends only on the model, computed by `work` on the first request for `name`."""
    service, info = get_request_context(request)
    read_parameters(request)
    served, bundle = service.served, require_bundle(service.served, name)
    if name not in served.cache:
        served.cache[name] = await service.batcher.compute(work, bundle, info.deadline, alone=True)
    return served.cache[name]


def require_bundle(served: ServedModel, name: str) -> Any:
    """Return the bundle of a model that supports the inspection `name`. Raises Refusal, 404, for other models."""
    if not served.capabilities[name]:
        raise Refusal(
            404, "not_available", f"this model does not support {name}", "see `capabilities` in GET /v1/model"
        )
    return served.predictor.bundle


def make_route(prefix: str, handler: Callable[[Request], Awaitable[Response]], method: str) -> Route:
    """Make the route of a handler: `handle_predict` responds to PREFIX/predict."""
    name = handler.__name__.removeprefix("handle_")
    return Route(f"{prefix}/{name}", handler, methods=[method], name=name)


ROUTES = [
    *(
        make_route("/v1", handler, "POST")
        for handler in (
            handle_predict,
            handle_embed,
            handle_segment,
            handle_detect,
            handle_sample,
            handle_attention,
            handle_frames,
            handle_neighbours,
            handle_zero_shot,
        )
    ),
    *(make_route("/v1", handler, "GET") for handler in (handle_positions, handle_filters, handle_model)),
    *(make_route("", handler, "GET") for handler in (handle_healthz, handle_readyz, handle_metrics)),
    Route("/openapi.json", handle_openapi, methods=["GET"], name="openapi"),
    *build_page_routes(),
]
