"""The OpenAPI 3.1 description of the HTTP API."""

from __future__ import annotations

from typing import Any

from vitreous.apps.server.sample_request import MAX_JSON_SEED, MAX_SAMPLE_IMAGES
from vitreous.apps.server.settings import ServerLimits
from vitreous.generation.settings import MAX_GUIDANCE

ERROR_DESCRIPTIONS = {
    "400": "invalid request, invalid form or no image",
    "401": "the token is missing or wrong",
    "403": "wrong host name, or cross-origin request",
    "405": "method not allowed",
    "408": "the request arrived too slowly",
    "413": "too large, or too many images",
    "415": "unsupported body type",
    "422": "invalid parameter or image",
    "429": "the queue is full: retry after the seconds in the header Retry-After",
    "503": "starting, shutting down, or failed: see the code",
    "504": "the deadline expired",
}

#: parameters of the query string by name: schema and description
QUERY_PARAMETERS: dict[str, tuple[dict[str, Any], str]] = {
    "top": ({"type": "integer", "minimum": 1}, "maximum number of classes"),
    "threshold": (
        {"type": "number", "minimum": 0, "maximum": 1},
        "return only classes with a higher probability, or objects with at least this score",
    ),
    "tiles": ({"enum": ["false", "true"]}, "process a large image in tiles, at full resolution"),
    "kind": ({"enum": ["raw", "rollout"]}, "attention of the heads in a block, or attention rollout up to the block"),
    "layer": ({"type": "string"}, "block index from 0, or all"),
    "head": ({"type": "string"}, "head index from 0, or mean, max, min or all; for a rollout, the fusion of heads"),
    "query": (
        {"type": "string"},
        "prediction (the pooled output), or ROW,COLUMN of a patch (clips: SLOT,ROW,COLUMN), from 0",
    ),
    "format": (
        {"enum": ["json", "png", "gif"]},
        "JSON, or an image: with the prediction as overlay, a GIF for clips, or a colour map of classes",
    ),
    "count": ({"type": "integer", "minimum": 1, "maximum": 50}, "number of images"),
}

#: endpoints that take images by path: summary, schema or content type of the response, names of parameters
POST_ENDPOINTS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "/v1/predict": ("Predict classes and probabilities, or values, for images", "Predictions", ("top", "threshold")),
    "/v1/embed": ("Compute features of images (the inputs of the head)", "Embeddings", ()),
    "/v1/segment": ("Predict the class of each pixel of one image", "Segments", ("format",)),
    "/v1/detect": ("Detect objects in one image", "Objects", ("threshold", "tiles", "format")),
    "/v1/attention": (
        "Compute attention maps of one image", "Attention", ("kind", "layer", "head", "query", "format")
    ),
    "/v1/frames": ("Return the model's input frames of one clip, stacked vertically", "image/png", ()),
    "/v1/neighbours": ("Find the training images nearest to one image", "Neighbours", ("count",)),
}  # fmt: skip
#: the body of POST /v1/sample: optional values, which may be null
SAMPLE_FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "class": ({"type": ["string", "null"]}, "a class of the model; by default images cycle through the classes"),
    "count": ({"type": ["integer", "null"], "minimum": 1, "maximum": MAX_SAMPLE_IMAGES}, "images (default: 1)"),
    "guidance": (
        {"type": ["number", "null"], "minimum": 0, "maximum": MAX_GUIDANCE},
        "classifier-free guidance scale; 1 for none",
    ),
    "steps": ({"type": ["integer", "null"], "minimum": 1}, "sampling steps; GET /v1/model has default and maximum"),
    "seed": ({"type": ["integer", "null"], "minimum": 0, "maximum": MAX_JSON_SEED}, "seed of the noise (default: 0)"),
    "to_seed": (
        {"type": ["integer", "null"], "minimum": 0, "maximum": MAX_JSON_SEED},
        "interpolate from the noise of `seed` to that of this seed, in `count` images of a class",
    ),
    "sampler": ({"type": ["string", "null"]}, "one of the samplers in GET /v1/model"),
}
#: the field `settings` of the form of POST /v1/zero_shot
ZERO_SHOT_FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "labels": ({"type": "array", "items": {"type": "string"}, "minItems": 1}, "classes as texts, at most 200"),
    "templates": (
        {"type": ["array", "string", "null"], "items": {"type": "string"}},
        "prompts of a label: none, photo, this-is, openai, openai-7, or texts with {}",
    ),
    "multilabel": ({"type": ["boolean", "null"]}, "independent scores (sigmoid) instead of a softmax over all labels"),
}
#: endpoints without input by path: summary, and schema or content type of the response
GET_ENDPOINTS = {
    "/v1/positions": ("Cosine similarity of the position embeddings", "Positions"),
    "/v1/filters": ("Filters of the patch embedding", "image/png"),
    "/v1/model": ("Description of the model", "Model"),
    "/healthz": ("Liveness of the process", "Status"),
    "/readyz": ("Readiness of the model", "Status"),
    "/metrics": ("Prometheus metrics", "text/plain"),
}

COMMON_FIELDS = {"request_id": "string", "model": {"name": "string", "version": "string"}}
IMAGE_ERROR_SCHEMA = ({"code": "string", "message": "string"}, None)
WEIGHTS_SCHEMA = {
    "type": "array",
    "description": "[h][w], for clips [t][h][w], with a leading axis for all layers and then one for all heads",
}
CLASSES_SCHEMA = [{"class": "string", "probability": "number"}]
VALUES_SCHEMA = {"type": "object", "additionalProperties": {"type": "number"}, "description": "by target, in its unit"}
OBJECT_SCHEMA = {"label": "string"} | dict.fromkeys(("score", "left", "top", "right", "bottom"), "number")
#: JSON documents by name, in the shorthand of `expand_schema`
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
    | {"size": ["integer"], "class_shares": [{"class": "string", "share": "number"}], "class_map": "string"},
    "Objects": COMMON_FIELDS
    | {"size": ["integer"], "objects": [{**OBJECT_SCHEMA, "segmentation": ("RunLengths", None)}]},
    "RunLengths": {"size": ["integer"], "counts": ["integer"]},
    "Attention": COMMON_FIELDS
    | {
        "kind": "string",
        "layer": ("integer", "string"),
        "head": ("integer", "string"),
        "query": ("string", ["integer"]),
        "grid": ["integer"],
        "layers": "integer",
        "heads": "integer",
        "prefix_tokens": "integer",
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
    "ZeroShot": COMMON_FIELDS | {"classes": CLASSES_SCHEMA, "templates": ["string"], "multilabel": "boolean"},
    "Positions": {"grid": ["integer"], "kind": "string", "range": ["number"], "similarity": [["number"]]},
    "Model": {"name": "string", "version": "string", "task": "string", "image_size": ["integer"], "channels": "integer"}
    | {"classes": ["string"], "class_colours": [["integer"]], "targets": ["string"], "multilabel": "boolean"}
    | {"patch_size": (["integer"], None), "grid": (["integer"], None), "pool": ("string", None)}
    | dict.fromkeys(("parameters", "layers", "heads", "prefix_tokens"), ("integer", None))
    | dict.fromkeys(("precision", "engine", "vitreous"), "string")
    | {"temperature": "number", "provenance": {"type": "object"}, "capabilities": {"type": "object"}}
    | {"sampling": ("Sampling", None), "limits": "Limits"},
    "Sampling": {"process": "string", "samplers": {"type": "object"}, "inpaint": "boolean"}
    | {"defaults": {"type": "object"}, "limits": {"type": "object"}},
    "Limits": dict.fromkeys(("bytes", "pixels", "images", "queue", "in_flight_bytes"), "integer"),
}
DEADLINE_PARAMETER = (
    "header",
    "X-Deadline-Ms",
    {"type": "integer", "minimum": 1, "maximum": 600_000},
    "deadline of the response in milliseconds",
)
BINARY_SCHEMA = {"type": "string", "format": "binary"}
IMAGE_SUBTYPES = ("jpeg", "png", "webp", "gif", "bmp", "tiff", "avif", "heic")
VIDEO_SUBTYPES = ("mp4", "webm", "x-matroska", "quicktime", "x-msvideo", "mpeg")


def build_openapi_document(limits: ServerLimits, root_path: str = "") -> dict[str, Any]:
    """Build the OpenAPI document of all endpoints, which are below `root_path`."""
    paths = {path: {"post": describe_post(*endpoint)} for path, endpoint in POST_ENDPOINTS.items()}
    paths["/v1/sample"] = {"post": describe_sample()}
    paths["/v1/zero_shot"] = {"post": describe_zero_shot()}
    paths |= {
        path: {"get": {"summary": text, "responses": describe_responses(response_type)}}
        for path, (text, response_type) in GET_ENDPOINTS.items()
    }
    description = (
        f"Images of up to {limits.bytes:,} bytes and {limits.pixels:,} pixels, up to {limits.images} in one request."
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


def expand_schema(shorthand: Any) -> dict[str, Any]:
    """Expand a shorthand to a JSON schema. A dict is an object whose fields are all required, a list of one item an
    array, a tuple a choice, and None is null. A string is a JSON type or the name of another document. A dict with a
    `type` is already a schema."""
    if shorthand is None:
        return {"type": "null"}
    if isinstance(shorthand, str):
        return {"$ref": f"#/components/schemas/{shorthand}"} if shorthand in DOCUMENT_SCHEMAS else {"type": shorthand}
    if isinstance(shorthand, tuple):
        return {"anyOf": [expand_schema(item) for item in shorthand]}
    if isinstance(shorthand, list):
        return {"type": "array", "items": expand_schema(shorthand[0])}
    if "type" in shorthand:
        return shorthand
    properties = {name: expand_schema(item) for name, item in shorthand.items()}
    return {"type": "object", "properties": properties, "required": list(properties)}


def describe_post(summary: str, response_type: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Describe an endpoint that takes images; `names` are its query parameters."""
    parameters = [("query", name, *QUERY_PARAMETERS[name]) for name in names] + [DEADLINE_PARAMETER]
    images = {"type": "array", "items": BINARY_SCHEMA, "minItems": 1}
    types = {"application/octet-stream": BINARY_SCHEMA} | {f"image/{name}": BINARY_SCHEMA for name in IMAGE_SUBTYPES}
    types |= {f"video/{name}": BINARY_SCHEMA for name in VIDEO_SUBTYPES}
    types["multipart/form-data"] = expand_schema({"image": images})
    responses = describe_responses(response_type)
    if response_type in ("Attention", "Segments", "Objects"):
        responses["200"]["content"]["image/png"] = {"schema": BINARY_SCHEMA}
    if response_type == "Attention":
        responses["200"]["content"]["image/gif"] = {"schema": BINARY_SCHEMA}
    return {
        "summary": summary,
        "parameters": [describe_parameter(*parameter) for parameter in parameters],
        "requestBody": {"required": True, "content": {name: {"schema": schema} for name, schema in types.items()}},
        "responses": responses,
    }


def describe_parameter(location: str, name: str, schema: dict[str, Any], text: str) -> dict[str, Any]:
    """Describe an optional parameter, which is in the query string or a header (`location`)."""
    return {"name": name, "in": location, "required": False, "schema": schema, "description": text}


def describe_sample() -> dict[str, Any]:
    """Describe the endpoint POST /v1/sample, which generates images."""
    properties = {name: {**schema, "description": text} for name, (schema, text) in SAMPLE_FIELDS.items()}
    body = {"type": "object", "properties": properties, "additionalProperties": False}
    form_schema = {"type": "object", "properties": {"image": BINARY_SCHEMA, "mask": BINARY_SCHEMA, "settings": body}}
    form_schema |= {"required": ["image", "mask"], "additionalProperties": False}
    responses = describe_responses("Samples")
    responses["200"]["content"] |= {
        "image/png": {"schema": BINARY_SCHEMA},
        "application/x-ndjson": {"schema": {"type": "string"}},
    }
    return {
        "summary": "Generate images: JSON, a PNG grid, or JSON lines with previews, depending on Accept",
        "parameters": [describe_parameter(*DEADLINE_PARAMETER)],
        "requestBody": {
            "required": True,
            "description": "settings; or a form with settings, an image, and a mask (white areas are inpainted)",
            "content": {"application/json": {"schema": body}, "multipart/form-data": {"schema": form_schema}},
        },
        "responses": responses,
    }


def describe_zero_shot() -> dict[str, Any]:
    """Describe the endpoint POST /v1/zero_shot, which scores labels for an image."""
    properties = {name: {**schema, "description": text} for name, (schema, text) in ZERO_SHOT_FIELDS.items()}
    settings = {"type": "object", "properties": properties, "required": ["labels"], "additionalProperties": False}
    form = {"type": "object", "properties": {"image": BINARY_SCHEMA, "settings": settings}}
    form |= {"required": ["image", "settings"], "additionalProperties": False}
    return {
        "summary": "Compute the probability of each label for one image, for models with a text encoder",
        "parameters": [describe_parameter(*DEADLINE_PARAMETER)],
        "requestBody": {"required": True, "content": {"multipart/form-data": {"schema": form}}},
        "responses": describe_responses("ZeroShot"),
    }


def describe_responses(response_type: str) -> dict[str, Any]:
    """Describe the successful response (the name of a document, or a content type), and the error responses."""
    content = (
        {response_type: {"schema": {"type": "string"}}}
        if "/" in response_type
        else describe_json_content(response_type)
    )
    responses = {"200": {"description": "the response", "content": content}}
    refusals = {**ERROR_DESCRIPTIONS, "404": "not available for this model"}
    responses |= {
        code: {"description": text, "content": describe_json_content("Error")} for code, text in refusals.items()
    }
    if response_type == "Status":
        responses["503"] = {"description": "not ready", "content": describe_json_content("Status")}
    return responses


def describe_json_content(name: str) -> dict[str, Any]:
    """Describe the JSON content of a response with the document `name`."""
    return {"application/json": {"schema": expand_schema(name)}}
