"""What each address answers. A handler returns a response, or work that becomes one."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Awaitable
from importlib.resources import files
from typing import Any

import numpy as np

from vitreous.serving.http.messages import Refusal, Request, Response, answer
from vitreous.serving.http.model import Served
from vitreous.serving.http.multipart import Upload, uploads
from vitreous.serving.http.site import Route, Site

WEIGHT = 4  # pictures that looking at attention costs as much as, about
TYPES = {
    "html": b"text/html; charset=utf-8",
    "css": b"text/css; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "svg": b"image/svg+xml",
    "png": b"image/png",
    "ico": b"image/x-icon",
}
FRESH = b"Cache-Control: no-cache\r\n"  # a reload of the page is a reload of its parts


def table() -> dict[str, Route]:
    """Every address: those of the interface, and one for each file of the page."""
    found = {
        "/v1/predict": Route("predict", "POST", predict, asks=True),
        "/v1/embed": Route("embed", "POST", embed, asks=True),
        "/v1/attention": Route("attention", "POST", attention, asks=True),
        "/v1/neighbours": Route("neighbours", "POST", neighbours, asks=True),
        "/v1/positions": Route("positions", "GET", positions),
        "/v1/filters": Route("filters", "GET", filters),
        "/v1/model": Route("model", "GET", model),
        "/healthz": Route("healthz", "GET", healthz, free=True),
        "/readyz": Route("readyz", "GET", readyz, free=True),
        "/metrics": Route("metrics", "GET", metrics),
        "/openapi.json": Route("openapi", "GET", openapi),
    }
    for file in files("vitreous.serving.page").iterdir():
        kind = file.name.rpartition(".")[2]
        if file.is_file() and kind in TYPES:
            path = "/" if file.name == "index.html" else f"/static/{file.name}"
            found[path] = Route(
                "page" if path == "/" else "static", "GET", fixed(file.read_bytes(), TYPES[kind]), free=True
            )
    return found


def fixed(content: bytes, kind: bytes):
    """A handler that always answers the same."""
    response = Response(200, content, kind, FRESH)
    return lambda site, request: response


def healthz(site: Site, request: Request) -> Response:
    """The process is alive."""
    return answer({"status": "alive"})


def readyz(site: Site, request: Request) -> Response:
    """Whether it answers questions."""
    return answer(
        {"status": site.state},
        200 if site.state == "ready" else 503,
        b"" if site.state == "ready" else b"Retry-After: 5\r\n",
    )


def metrics(site: Site, request: Request) -> Response:
    """Counters."""
    return Response(200, site.told().encode(), b"text/plain; version=0.0.4; charset=utf-8")


def openapi(site: Site, request: Request) -> Response:
    """The description of all this."""
    from vitreous.serving.http.openapi import document

    kept = site.served.cache
    if "openapi" not in kept:
        kept["openapi"] = answer(document(site.limits))
    return kept["openapi"]


def model(site: Site, request: Request) -> Response:
    """What answers. It is put into words once: 30 questions at a time cost as much as a picture otherwise."""
    request.parameters(())
    limits, kept = site.limits, site.served.cache
    if "model" not in kept:
        told = {
            "bytes": limits.bytes,
            "pixels": limits.pixels,
            "images": limits.images,
            "queue": site.queue,
            "flight": limits.flight,
        }
        kept["model"] = answer({**site.served.describe(), "limits": told})
    return kept["model"]


def named(served: Served) -> dict[str, str]:
    """The model, in every answer."""
    return {"name": served.predictor.card.name, "version": served.predictor.card.version}


def predict(site: Site, request: Request) -> Awaitable[Response]:
    """Names and probabilities."""
    served, said = site.served, request.parameters(("top", "threshold"))
    card = served.predictor.card
    top = whole("top", said["top"], 1, len(card.classes)) if "top" in said else None
    threshold = share("threshold", said["threshold"]) if "threshold" in said else None
    asked = served.predictor.asked(top, threshold)

    def told(name: str | None, p: np.ndarray) -> dict[str, Any]:
        found = asked.answer(card, p, "")
        classes = [{"class": n, "probability": v} for n, v in zip(found.names, found.probabilities, strict=True)]
        return {"name": name, "classes": classes, "unsure": found.unsure, "error": None}

    return several(site, request, served, served.probabilities, "predictions", told, {"classes": [], "unsure": False})


def embed(site: Site, request: Request) -> Awaitable[Response]:
    """Features."""
    served = site.served
    request.parameters(())
    if not served.embeds:
        raise Refusal(404, "not_available", "this model tells no features", "serve the run that it was exported from")

    def told(name: str | None, features: np.ndarray) -> dict[str, Any]:
        return {"name": name, "embedding": [float(f"{v:.8g}") for v in features.tolist()], "error": None}

    return several(site, request, served, served.features, "embeddings", told, {"embedding": []})


async def several(
    site: Site, request: Request, served: Served, work: Any, key: str, told: Any, empty: dict[str, Any]
) -> Response:
    """Decode the pictures of a request, ask about those that can be read, and tell of all of them in their order."""
    found = uploads(request, site.limits)
    with site.room(request, len(found)):
        one = [asyncio.ensure_future(single(site, request, served, work, upload)) for upload in found]
        upload_names = [upload.name for upload in found]
        del found
        try:
            rows = await asyncio.gather(*one)
        except BaseException:
            for task in one:
                task.cancel()
            raise
        bad = [row for row in rows if isinstance(row, Refusal)]
        if len(bad) == len(rows):
            raise bad[0]
        answers = []
        for name, row in zip(upload_names, rows, strict=True):
            if isinstance(row, Refusal):
                answers.append({"name": name, **empty, "error": {"code": row.name, "message": row.message}})
            else:
                answers.append(told(name, row))
        document = {"request_id": request.id, "model": named(served), key: answers}
        if key == "embeddings":
            document["width"] = max(len(each["embedding"]) for each in answers)
        return answer(document)


async def single(site: Site, request: Request, served: Served, work: Any, upload: Upload) -> Any:
    """One picture's answer, or the Refusal of that picture alone."""
    try:
        pixels = await site.decoders.decode(upload.content, served.settings)
    except Refusal as refusal:
        return refusal
    return await site.batcher.ask(work, pixels, request.deadline)


def attention(site: Site, request: Request) -> Awaitable[Response]:
    """What the model looks at."""
    from vitreous.serving import attention_api

    served = site.served
    bundle = with_bundle(served, "attention")
    said = request.parameters(("kind", "layer", "head", "query", "format"))
    form = said.get("format", "json")
    if form not in ("json", "png"):
        raise Refusal(422, "bad_parameter", f"format={form[:40]} cannot be", "format is json or png")
    asked = attention_api.AttentionAsked.parse(said, bundle.model)
    if form == "png" and "all" in (asked.layer, asked.head):
        raise Refusal(422, "bad_parameter", "a PNG of several maps", "ask for one layer and one head, or format=json")

    def look(pixels: np.ndarray) -> Any:
        return (
            attention_api.attention_png(bundle, pixels, asked)
            if form == "png"
            else attention_api.attention(bundle, pixels, asked)
        )

    return looked(site, request, served, look)


async def looked(site: Site, request: Request, served: Served, look: Any) -> Response:
    """Ask about one picture by itself."""
    from vitreous.serving.attention_api import box

    upload = only(uploads(request, site.limits))
    with site.room(request, min(WEIGHT, site.queue)):
        pixels, (width, height) = await site.decoders.decode_sized(upload.content, served.sized)
        found = await site.batcher.ask(alone(look), pixels, request.deadline, alone=True)
    if isinstance(found, bytes):
        return Response(200, found, b"image/png")
    seen = box(served.predictor.card.preprocess, width, height)
    return answer({"request_id": request.id, "model": named(served), **found, "box": seen})


def neighbours(site: Site, request: Request) -> Awaitable[Response]:
    """The training images most like a picture."""
    served, said = site.served, request.parameters(("count",))
    count = whole("count", said["count"], 1, 50) if "count" in said else 8
    index = served.index
    if index is None:
        raise Refusal(404, "not_available", "this run has no index", "vitreous embed RUN --index makes one")
    return nearest(site, request, served, lambda row: index.nearest(row, count))


async def nearest(site: Site, request: Request, served: Served, search: Any) -> Response:
    """Features of one picture, and what lies near them."""
    upload = only(uploads(request, site.limits))
    with site.room(request, 1):
        pixels = await site.decoders.decode(upload.content, served.settings)
        features = await site.batcher.ask(served.features, pixels, request.deadline)
        found = await site.batcher.ask(alone(search), features, request.deadline, alone=True)
    return answer({"request_id": request.id, "model": named(served), "neighbours": [shown(each) for each in found]})


def shown(found: Any) -> dict[str, Any]:
    """A neighbour as JSON has it."""
    small = "data:image/jpeg;base64," + b64encode(found.thumbnail).decode() if found.thumbnail else None
    return {
        "label": found.label,
        "name": found.name,
        "similarity": round(float(found.similarity), 6),
        "thumbnail": small,
    }


async def positions(site: Site, request: Request) -> Response:
    """How alike the position embeddings are."""
    from vitreous.serving import attention_api

    request.parameters(())
    found = await once(site, request, "positions", attention_api.positions)
    return answer(found)


async def filters(site: Site, request: Request) -> Response:
    """The filters that read the picture."""
    from vitreous.serving import attention_api

    request.parameters(())
    found = await once(site, request, "filters", attention_api.filters)
    return Response(200, found, b"image/png")


async def once(site: Site, request: Request, name: str, work: Any) -> Any:
    """What depends on the model alone: computed when it is first asked for."""
    served = site.served
    bundle = with_bundle(served, name)
    if name not in served.cache:
        served.cache[name] = await site.batcher.ask(alone(work), bundle, request.deadline, alone=True)
    return served.cache[name]


def with_bundle(served: Served, name: str) -> Any:
    """The bundle of a model that can show something. Raises Refusal."""
    if not served.can[name]:
        raise Refusal(404, "not_available", f"this model has no {name} to show", "GET /v1/model tells what it can")
    return served.predictor.bundle


def alone(work: Any) -> Any:
    """Work on one input as the batcher takes it."""
    return lambda given: [work(given[0])]


def only(found: list[Upload]) -> Upload:
    """The one picture of a request. Raises Refusal."""
    if len(found) != 1:
        raise Refusal(400, "bad_request", f"{len(found)} pictures", "send exactly one")
    return found[0]


def whole(name: str, text: str, least: int, most: int) -> int:
    """A whole number in a range. Raises Refusal, naming the parameter, the value and what is allowed."""
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and least <= int(text) <= most):
        raise Refusal(422, "bad_parameter", f"{name}={text[:40]!r}", f"{name} is a whole number from {least} to {most}")
    return int(text)


def share(name: str, text: str) -> float:
    """A number from 0 to 1. Raises Refusal likewise."""
    try:
        value = float(text) if text.isascii() and len(text) < 40 else -1.0
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise Refusal(422, "bad_parameter", f"{name}={text[:40]!r}", f"{name} is a number from 0 to 1")
    return value
