"""The description of the interface, as OpenAPI 3.1, for programs that make or test clients."""

from __future__ import annotations

from typing import Any

from vitreous.serving.http.limits import Limits

TEXT, NUMBER, WHOLE, YES = {"type": "string"}, {"type": "number"}, {"type": "integer"}, {"type": "boolean"}
REFUSED = {
    "400": "no request, no form or no picture",
    "401": "the token is missing or wrong",
    "403": "another host, or a page of another site",
    "405": "another method",
    "408": "it came too slowly",
    "413": "too large, or too many pictures",
    "415": "another kind of body",
    "422": "a parameter or a picture that cannot be",
    "429": "the queue is full: ask again after Retry-After seconds",
    "503": "starting, shutting down, or failed: see the code",
    "504": "not answered before the deadline",
}


def openapi_document(limits: Limits) -> dict[str, Any]:
    """All addresses, what they take and what they answer."""
    top = query("top", {**WHOLE, "minimum": 1}, "classes to name at most")
    threshold = query(
        "threshold", {**NUMBER, "minimum": 0, "maximum": 1}, "name classes of a probability above it alone"
    )
    looks = [
        query(
            "kind", {"enum": ["raw", "rollout"]}, "what heads look at in a block, or what blocks up to it mix together"
        ),
        query("layer", TEXT, "a block, from 0, or all"),
        query("head", TEXT, "a head, from 0, or mean, max, min or all; a rollout: how heads become one"),
        query("query", TEXT, "answer, or ROW,COLUMN of a patch, both from 0"),
        query("format", {"enum": ["json", "png"]}, "numbers, or the picture with the map over it"),
    ]
    count = query("count", {**WHOLE, "minimum": 1, "maximum": 50}, "how many")
    paths = {
        "/v1/predict": asks("Classes and probabilities of pictures", "Predictions", [top, threshold]),
        "/v1/embed": asks("What the head reads of pictures", "Embeddings", []),
        "/v1/attention": asks("What the model looks at in one picture", "Attention", looks),
        "/v1/neighbours": asks("The training images most like one picture", "Neighbours", [count]),
        "/v1/positions": tells("How alike the position embeddings are", "Positions"),
        "/v1/filters": tells("The filters that read the picture", "image/png"),
        "/v1/model": tells("The model", "Model"),
        "/healthz": tells("The process is alive", "Status"),
        "/readyz": tells("Whether it answers", "Status"),
        "/metrics": tells("Counters for Prometheus", "text/plain"),
    }
    description = (
        f"Pictures of up to {limits.bytes:,} bytes and {limits.pixels:,} pixels, up to {limits.images} in one request."
    )
    return {
        "openapi": "3.1.0",
        "info": {"title": "vitreous", "version": "1", "description": description},
        "paths": paths,
        "components": {"schemas": schemas(), "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"token": []}],
    }


def query(name: str, schema: dict[str, Any], text: str) -> dict[str, Any]:
    """A parameter."""
    return {"name": name, "in": "query", "required": False, "schema": schema, "description": text}


def ref(name: str) -> dict[str, str]:
    """A schema by its name."""
    return {"$ref": f"#/components/schemas/{name}"}


def responses(kind: str) -> dict[str, Any]:
    """What comes back: a schema's name, or a content type."""
    content = {kind: {"schema": TEXT}} if "/" in kind else {"application/json": {"schema": ref(kind)}}
    wrong = {
        code: {"description": text, "content": {"application/json": {"schema": ref("Error")}}}
        for code, text in REFUSED.items()
    }
    return {"200": {"description": "the answer", "content": content}, **wrong}


def tells(summary: str, kind: str) -> dict[str, Any]:
    """An address to read."""
    answers = responses(kind)
    answers["404"] = {"description": "this model has none", "content": {"application/json": {"schema": ref("Error")}}}
    if kind == "Status":
        answers["503"] = {"description": "not now", "content": {"application/json": {"schema": ref("Status")}}}
    return {"get": {"summary": summary, "responses": answers}}


def asks(summary: str, kind: str, parameters: list[dict[str, Any]]) -> dict[str, Any]:
    """An address to send pictures to."""
    picture = {"type": "string", "format": "binary"}
    files = {
        "type": "object",
        "properties": {"image": {"type": "array", "items": picture, "minItems": 1}},
        "required": ["image"],
    }
    body = {"multipart/form-data": {"schema": files}, "application/octet-stream": {"schema": picture}}
    body |= {
        f"image/{name}": {"schema": picture} for name in ("jpeg", "png", "webp", "gif", "bmp", "tiff", "avif", "heic")
    }
    limit = {**WHOLE, "minimum": 1, "maximum": 600_000}
    deadline = {
        "name": "X-Deadline-Ms",
        "in": "header",
        "required": False,
        "schema": limit,
        "description": "milliseconds to answer in",
    }
    answers = responses(kind)
    if kind == "Attention":
        answers["200"]["content"]["image/png"] = {"schema": picture}
    answers["404"] = {"description": "this model has none", "content": {"application/json": {"schema": ref("Error")}}}
    request = {"required": True, "content": body}
    return {
        "post": {
            "summary": summary,
            "parameters": [*parameters, deadline],
            "requestBody": request,
            "responses": answers,
        }
    }


def thing(**fields: Any) -> dict[str, Any]:
    """An object, all fields of which are there."""
    return {"type": "object", "properties": fields, "required": list(fields)}


def many(items: Any) -> dict[str, Any]:
    """A list."""
    return {"type": "array", "items": items}


def maybe(schema: dict[str, Any]) -> dict[str, Any]:
    """This or null."""
    return {"anyOf": [schema, {"type": "null"}]}


def schemas() -> dict[str, Any]:
    """What the documents hold."""
    model, error = thing(name=TEXT, version=TEXT), maybe(thing(code=TEXT, message=TEXT))
    prediction = thing(
        name=maybe(TEXT), classes=many(thing(**{"class": TEXT, "probability": NUMBER})), unsure=YES, error=error
    )
    embedding = thing(name=maybe(TEXT), embedding=many(NUMBER), error=error)
    neighbour = thing(label=TEXT, name=TEXT, similarity=NUMBER, thumbnail=maybe(TEXT))
    common = {"request_id": TEXT, "model": model}
    weights = {
        "type": "array",
        "description": "[h][w], with an axis before it for all layers and one after that for all heads",
    }
    sizes = {"layers": maybe(WHOLE), "heads": maybe(WHOLE), "prefix": maybe(WHOLE), "pool": maybe(TEXT)}
    return {
        "Error": thing(error=thing(code=TEXT, message=TEXT, hint=TEXT, request_id=TEXT)),
        "Status": thing(status=TEXT),
        "Predictions": thing(**common, predictions=many(prediction)),
        "Embeddings": thing(**common, width=WHOLE, embeddings=many(embedding)),
        "Attention": thing(
            **common, kind=TEXT, grid=many(WHOLE), weights=weights, prefix_weights={"type": "array"}, box=many(NUMBER)
        ),
        "Neighbours": thing(**common, neighbours=many(neighbour)),
        "Positions": thing(grid=many(WHOLE), kind=TEXT, range=many(NUMBER), similarity=many(many(NUMBER))),
        "Model": thing(
            name=TEXT,
            version=TEXT,
            classes=many(TEXT),
            image=many(WHOLE),
            channels=WHOLE,
            **sizes,
            limits=ref("Limits"),
        ),
        "Limits": thing(bytes=WHOLE, pixels=WHOLE, images=WHOLE, queue=WHOLE, flight=WHOLE),
    }
