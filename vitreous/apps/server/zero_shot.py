"""Handler of the endpoint for zero-shot classification: an image and labels, for models with a text encoder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from vitreous.apps.server.requests import (
    MAX_FIELD_BYTES,
    Upload,
    describe_model_version,
    get_request_context,
    read_parameters,
    read_parts,
    require_endpoint,
    require_single_upload,
)
from vitreous.apps.server.responses import Refusal, json_response, shorten_text
from vitreous.data.prompts import PLACEHOLDER, check_label_texts, resolve_templates
from vitreous.errors import UsageError, VitreousError
from vitreous.inference.zero_shot import TextEmbedder
from vitreous.weights.zero_shot import ZeroShotLabels

MAX_LABELS, MAX_LABEL_LENGTH = 200, 200  # labels of a request, and characters of a label or template
MAX_PROMPTS = 2000  # labels times templates of a request
SETTINGS_HINT = 'send an image file, and settings such as {"labels": ["cat", "dog"]} as a JSON field'


@dataclass(frozen=True)
class ZeroShotRequest:
    """The content of a request: one image and the labels."""

    upload: Upload
    zero_shot: ZeroShotLabels


async def handle_zero_shot(request: Request) -> Response:
    """Compute the probability of each label for one image. Raises Refusal: 404 for a model without a text encoder, 422
    for invalid labels or templates."""
    (service, info), _ = get_request_context(request), read_parameters(request)
    served = service.served
    require_endpoint(served, "zero_shot", "this model has no text encoder")
    embedder, engine = served.predictor.text_embedder, served.predictor.engine
    content = await read_zero_shot_request(request)
    check_request_size(content.zero_shot, embedder)
    with service.admit_images(info, 1):
        # invalid labels are refused before the image is decoded
        await service.batcher.compute(
            lambda labels: try_embed_labels(embedder, labels), content.zero_shot, info.deadline, alone=True
        )
        pixels, _ = await service.decoders.decode(content.upload.content, served.decode_settings)
        features = await service.batcher.compute(engine.features, pixels, info.deadline)
        scores = await service.batcher.compute(
            lambda feature: embedder.score_images(feature[None], content.zero_shot)[0],
            features,
            info.deadline,
            alone=True,
        )
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    classes = [{"class": content.zero_shot.labels[index], "probability": float(scores[index])} for index in order]
    templates = list(content.zero_shot.resolve(embedder.model.config))
    document = {"classes": classes, "templates": templates, "multilabel": content.zero_shot.multilabel}
    return json_response({"request_id": info.id, "model": describe_model_version(served), **document})


def try_embed_labels(embedder: TextEmbedder, zero_shot: ZeroShotLabels) -> VitreousError | None:
    """Compute and cache the embeddings of labels. Returns the error for labels that the model does not support: the
    batcher counts raised exceptions as failures of the model."""
    try:
        embedder.embed_labels(zero_shot)
    except VitreousError as error:
        return error
    return None


async def read_zero_shot_request(request: Request) -> ZeroShotRequest:
    """Read a request: a form with one image file and a JSON object in the field `settings`, with `labels`, and
    optionally `templates` and `multilabel`. Raises Refusal: 415 for another content type, 400 for another form, 422 for
    invalid settings."""
    media_type = request.headers.get("content-type", "").split(";", 1)[0].strip().lower()
    if media_type != "multipart/form-data":
        raise Refusal(415, "unsupported_media", "the body is not a form", SETTINGS_HINT)
    parts = await read_parts(request)
    uploads = [value for name, value in parts if isinstance(value, Upload) and name != "settings"]
    others = [(name, value) for name, value in parts if not isinstance(value, Upload) or name == "settings"]
    if [name for name, _ in others] != ["settings"]:
        raise Refusal(400, "bad_request", "the form needs one image and one field `settings`", SETTINGS_HINT)
    upload, settings = require_single_upload(uploads), others[0][1]
    body = settings.encode() if isinstance(settings, str) else bytes(settings.content)
    if len(body) > MAX_FIELD_BYTES:
        raise Refusal(413, "too_large", "the settings are too large", f"send at most {MAX_FIELD_BYTES:,} bytes")
    return ZeroShotRequest(upload, parse_zero_shot_settings(body))


def parse_zero_shot_settings(body: bytes) -> ZeroShotLabels:
    """Parse the JSON of `settings`. Raises Refusal: 400 for a body that is not a JSON object, 422 for unknown keys,
    values of another type, invalid labels, and labels or templates that are too many or too long."""
    try:
        fields: Any = json.loads(body)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise Refusal(400, "bad_request", "settings is not a JSON object", SETTINGS_HINT)
    if unknown := sorted(fields.keys() - {"labels", "templates", "multilabel"}):
        raise Refusal(
            422, "bad_parameter", f"unknown key {shorten_text(unknown[0])}", "use labels, templates, multilabel"
        )
    labels: Any = fields.get("labels")
    templates: Any = fields.get("templates") or []
    templates = [templates] if isinstance(templates, str) else templates
    multilabel = fields.get("multilabel") or False
    for name, value in (("labels", labels), ("templates", templates)):
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise Refusal(422, "bad_parameter", f"{name} is not an array of texts", SETTINGS_HINT)
        if len(value) > MAX_LABELS or any(len(text) > MAX_LABEL_LENGTH for text in value):
            hint = f"send at most {MAX_LABELS} of at most {MAX_LABEL_LENGTH} characters"
            raise Refusal(422, "bad_parameter", f"{name} are too many or too long", hint)
    if not isinstance(multilabel, bool):
        raise Refusal(422, "bad_parameter", "multilabel is not true or false", "use true or false")
    stripped = tuple(text.strip() for text in labels)
    try:
        check_label_texts(stripped, multilabel)
        resolve_templates(templates or PLACEHOLDER)
    except UsageError as error:
        raise Refusal(422, "bad_parameter", error.message, error.hint.replace("--", "")) from None
    return ZeroShotLabels(stripped, tuple(templates), multilabel)


def check_request_size(zero_shot: ZeroShotLabels, embedder: TextEmbedder) -> None:
    """Raise Refusal, 422, for more than `MAX_PROMPTS` prompts."""
    count = len(zero_shot.labels) * len(zero_shot.resolve(embedder.model.config))
    if count > MAX_PROMPTS:
        problem = f"{len(zero_shot.labels)} labels with these templates are {count:,} prompts"
        raise Refusal(422, "bad_parameter", problem, f"use at most {MAX_PROMPTS:,}: fewer labels, or fewer templates")
