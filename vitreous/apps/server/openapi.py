"""The description of the interface, as OpenAPI 3.1, for programs that make or test clients."""

from __future__ import annotations

from typing import Any

from vitreous.apps.server.sample_request import MAX_JSON_SEED, MAX_SAMPLE_IMAGES
from vitreous.apps.server.settings import ServerLimits
from vitreous.generation.settings import MAX_GUIDANCE

ERROR_DESCRIPTIONS = {
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

#: parameters of the query string: schema and description
QUERY_PARAMETERS: dict[str, tuple[dict[str, Any], str]] = {
    "top": ({"type": "integer", "minimum": 1}, "classes to name at most"),
    "threshold": (
        {"type": "number", "minimum": 0, "maximum": 1},
        "name classes of a probability above it, or objects of a score from it on, alone",
    ),
    "tiles": ({"enum": ["false", "true"]}, "answer a picture larger than the model's at its own resolution"),
    "kind": ({"enum": ["raw", "rollout"]}, "what heads look at in a block, or what blocks up to it mix together"),
    "layer": ({"type": "string"}, "a block, from 0, or all"),
    "head": ({"type": "string"}, "a head, from 0, or mean, max, min or all; a rollout: how heads become one"),
    "query": ({"type": "string"}, "answer, or ROW,COLUMN of a patch, of clips SLOT,ROW,COLUMN, all from 0"),
    "format": (
        {"enum": ["json", "png", "gif"]},
        "numbers, or a picture: with the answer over it, of clips a GIF, or of classes in colours",
    ),
    "count": ({"type": "integer", "minimum": 1, "maximum": 50}, "how many"),
}

#: addresses that take pictures: summary, schema of the answer, parameters
POST_ENDPOINTS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "/v1/predict": ("Classes and probabilities, or values, of pictures", "Predictions", ("top", "threshold")),
    "/v1/embed": ("What the head reads of pictures", "Embeddings", ()),
    "/v1/segment": ("The class of each pixel of one picture", "Segments", ("format",)),
    "/v1/detect": ("The objects on one picture", "Objects", ("threshold", "tiles", "format")),
    "/v1/attention": (
        "What the model looks at in one picture", "Attention", ("kind", "layer", "head", "query", "format")
    ),
    "/v1/frames": ("The frames of one clip that the model sees, below one another", "image/png", ()),
    "/v1/neighbours": ("The training images most like one picture", "Neighbours", ("count",)),
}  # fmt: skip
#: the body of POST /v1/sample: values that may be left out, or null
SAMPLE_FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "class": ({"type": ["string", "null"]}, "a class of the model; else images are of the classes in turn"),
    "count": ({"type": ["integer", "null"], "minimum": 1, "maximum": MAX_SAMPLE_IMAGES}, "images, 1 if left out"),
    "guidance": (
        {"type": ["number", "null"], "minimum": 0, "maximum": MAX_GUIDANCE},
        "how far answers are moved away from those for no class; 1: not at all",
    ),
    "steps": ({"type": ["integer", "null"], "minimum": 1}, "of the sampler; GET /v1/model has their number and limit"),
    "seed": (
        {"type": ["integer", "null"], "minimum": 0, "maximum": MAX_JSON_SEED},
        "what noise is drawn from, 0 if left out",
    ),
    "to_seed": (
        {"type": ["integer", "null"], "minimum": 0, "maximum": MAX_JSON_SEED},
        "go from the image of `seed` to that of this one in `count` images of a class",
    ),
    "sampler": ({"type": ["string", "null"]}, "one of those of GET /v1/model"),
}
#: addresses that take nothing: summary, and schema or content type of the answer
GET_ENDPOINTS = {
    "/v1/positions": ("How alike the position embeddings are", "Positions"),
    "/v1/filters": ("The filters that read the picture", "image/png"),
    "/v1/model": ("The model", "Model"),
    "/healthz": ("The process is alive", "Status"),
    "/readyz": ("Whether it answers", "Status"),
    "/metrics": ("Counters for Prometheus", "text/plain"),
}

COMMON_FIELDS = {"request_id": "string", "model": {"name": "string", "version": "string"}}
IMAGE_ERROR_SCHEMA = ({"code": "string", "message": "string"}, None)
WEIGHTS_SCHEMA = {
    "type": "array",
    "description": "[h][w], of clips [t][h][w], with an axis before it for all layers and one after that for all heads",
}
CLASSES_SCHEMA = [{"class": "string", "probability": "number"}]
VALUES_SCHEMA = {"type": "object", "additionalProperties": {"type": "number"}, "description": "by target, in its unit"}
OBJECT_SCHEMA = {"label": "string"} | dict.fromkeys(("score", "left", "top", "right", "bottom"), "number")
#: documents, as `expand_schema` takes them
DOCUMENT_SCHEMAS: dict[str, dict[str, Any]] = {
    "Error": {"error": {"code": "string", "message": "string", "hint": "string", "request_id": "string"}},
    "Status": {"status": "string"},
    "Predictions": COMMON_FIELDS | {"predictions": [("ClassPrediction", "ValuePrediction")]},
    "ClassPrediction": {
        "name": ("string", None),
        "classes": CLASSES_SCHEMA,
        "unsure": "boolean",
        "error": IMAGE_ERROR_SCHEMA,
    },
    "ValuePrediction": {"name": ("string", None), "values": VALUES_SCHEMA, "error": IMAGE_ERROR_SCHEMA},
    "Embeddings": COMMON_FIELDS
    | {"width": "integer"}
    | {"embeddings": [{"name": ("string", None), "embedding": ["number"], "error": IMAGE_ERROR_SCHEMA}]},
    "Segments": COMMON_FIELDS
    | {"size": ["integer"], "shares": [{"class": "string", "share": "number"}], "map": "string"},
    "Objects": COMMON_FIELDS
    | {"size": ["integer"], "objects": [{**OBJECT_SCHEMA, "segmentation": ("RunLengths", None)}]},
    "RunLengths": {"size": ["integer"], "counts": ["integer"]},
    "Attention": COMMON_FIELDS
    | {
        "kind": "string",
        "grid": ["integer"],
        "weights": WEIGHTS_SCHEMA,
        "prefix_weights": {"type": "array"},
        "box": ["number"],
    },
    "Samples": COMMON_FIELDS
    | {"images": [{"class": ("string", None), "number": "integer", "image": "string"}], "size": ["integer"]}
    | {"columns": "integer", "settings": "Settings", "seconds": "number"},
    "Settings": {"class": ("string", None), "sampler": "string", "precision": "string", "guidance": "number"}
    | dict.fromkeys(("count", "steps", "seed"), "integer")
    | {"to_seed": ("integer", None)},
    "Neighbours": COMMON_FIELDS
    | {"neighbours": [{"label": "string", "name": "string", "similarity": "number", "thumbnail": ("string", None)}]},
    "Positions": {"grid": ["integer"], "kind": "string", "range": ["number"], "similarity": [["number"]]},
    "Model": {"name": "string", "version": "string", "task": "string", "image": ["integer"], "channels": "integer"}
    | {"classes": ["string"], "targets": ["string"]}
    | dict.fromkeys(("layers", "heads", "prefix"), ("integer", None))
    | {"pool": ("string", None), "sampling": ("Sampling", None), "limits": "Limits"},
    "Sampling": {"process": "string", "samplers": {"type": "object"}, "inpaint": "boolean"}
    | {"defaults": {"type": "object"}, "limits": {"type": "object"}},
    "Limits": dict.fromkeys(("bytes", "pixels", "images", "queue", "flight"), "integer"),
}
DEADLINE_PARAMETER = (
    "header",
    "X-Deadline-Ms",
    {"type": "integer", "minimum": 1, "maximum": 600_000},
    "milliseconds to answer in",
)
BINARY_SCHEMA = {"type": "string", "format": "binary"}
IMAGE_SUBTYPES = ("jpeg", "png", "webp", "gif", "bmp", "tiff", "avif", "heic")
VIDEO_SUBTYPES = ("mp4", "webm", "x-matroska", "quicktime", "x-msvideo", "mpeg")


def build_openapi_document(limits: ServerLimits, root_path: str = "") -> dict[str, Any]:
    """All addresses, what they take and what they answer; they are below `root_path`."""
    paths = {path: {"post": describe_post(*row)} for path, row in POST_ENDPOINTS.items()}
    paths["/v1/sample"] = {"post": describe_sample()}
    paths |= {
        path: {"get": {"summary": text, "responses": describe_responses(kind)}}
        for path, (text, kind) in GET_ENDPOINTS.items()
    }
    description = (
        f"Pictures of up to {limits.bytes:,} bytes and {limits.pixels:,} pixels, up to {limits.images} in one request."
    )
    schemas = {name: expand_schema(fields) for name, fields in DOCUMENT_SCHEMAS.items()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "vitreous", "version": "1", "description": description},
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"token": []}],
    }


def expand_schema(short: Any) -> dict[str, Any]:
    """JSON schema: of an object all of whose fields are required, from a dict; of an array from a list of one; of
    alternatives from a tuple, with None for null; of a type or of another document from its name. A dict with a `type`
    is a schema."""
    if short is None:
        return {"type": "null"}
    if isinstance(short, str):
        return {"$ref": f"#/components/schemas/{short}"} if short in DOCUMENT_SCHEMAS else {"type": short}
    if isinstance(short, tuple):
        return {"anyOf": [expand_schema(one) for one in short]}
    if isinstance(short, list):
        return {"type": "array", "items": expand_schema(short[0])}
    if "type" in short:
        return short
    properties = {name: expand_schema(one) for name, one in short.items()}
    return {"type": "object", "properties": properties, "required": list(properties)}


def describe_post(summary: str, kind: str, names: tuple[str, ...]) -> dict[str, Any]:
    """An address that takes pictures."""
    parameters = [("query", name, *QUERY_PARAMETERS[name]) for name in names] + [DEADLINE_PARAMETER]
    images = {"type": "array", "items": BINARY_SCHEMA, "minItems": 1}
    types = {"application/octet-stream": BINARY_SCHEMA} | {f"image/{name}": BINARY_SCHEMA for name in IMAGE_SUBTYPES}
    types |= {f"video/{name}": BINARY_SCHEMA for name in VIDEO_SUBTYPES}
    types["multipart/form-data"] = expand_schema({"image": images})
    answers = describe_responses(kind)
    if kind in ("Attention", "Segments", "Objects"):
        answers["200"]["content"]["image/png"] = {"schema": BINARY_SCHEMA}
    if kind == "Attention":
        answers["200"]["content"]["image/gif"] = {"schema": BINARY_SCHEMA}
    return {
        "summary": summary,
        "parameters": [describe_parameter(*one) for one in parameters],
        "requestBody": {"required": True, "content": {name: {"schema": schema} for name, schema in types.items()}},
        "responses": answers,
    }


def describe_parameter(place: str, name: str, schema: dict[str, Any], text: str) -> dict[str, Any]:
    """A parameter that may be left out."""
    return {"name": name, "in": place, "required": False, "schema": schema, "description": text}


def describe_sample() -> dict[str, Any]:
    """The address that makes images."""
    properties = {name: {**schema, "description": text} for name, (schema, text) in SAMPLE_FIELDS.items()}
    body = {"type": "object", "properties": properties, "additionalProperties": False}
    form = {"type": "object", "properties": {"image": BINARY_SCHEMA, "mask": BINARY_SCHEMA, "settings": body}}
    form |= {"required": ["image", "mask"], "additionalProperties": False}
    answers = describe_responses("Samples")
    answers["200"]["content"] |= {
        "image/png": {"schema": BINARY_SCHEMA},
        "application/x-ndjson": {"schema": {"type": "string"}},
    }
    return {
        "summary": "Images of a model that makes them: documents, one grid, or lines with previews, as Accept asks",
        "parameters": [describe_parameter(*DEADLINE_PARAMETER)],
        "requestBody": {
            "required": True,
            "description": "settings; or a form of an image that stays as it is where its mask is black, and settings",
            "content": {"application/json": {"schema": body}, "multipart/form-data": {"schema": form}},
        },
        "responses": answers,
    }


def describe_responses(kind: str) -> dict[str, Any]:
    """The answer, a document or a content type, and the refusals."""
    content = {kind: {"schema": {"type": "string"}}} if "/" in kind else describe_json_content(kind)
    answers = {"200": {"description": "the answer", "content": content}}
    refusals = {**ERROR_DESCRIPTIONS, "404": "this model has none"}
    answers |= {
        code: {"description": text, "content": describe_json_content("Error")} for code, text in refusals.items()
    }
    if kind == "Status":
        answers["503"] = {"description": "not now", "content": describe_json_content("Status")}
    return answers


def describe_json_content(name: str) -> dict[str, Any]:
    """The content of a response that is a document."""
    return {"application/json": {"schema": expand_schema(name)}}
