"""Parsing of requests: query string and images.

Images are the fields of multipart/form-data that have a file name (RFC 7578), or the body itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from vitreous.apps.server.model import ServedModel
from vitreous.apps.server.openapi import POST_ENDPOINTS
from vitreous.apps.server.responses import Refusal, shorten_text
from vitreous.apps.server.service import RequestInfo, Service
from vitreous.apps.server.settings import ServerLimits
from vitreous.inference.card import Card

MAX_PARTS = 64  # maximum fields of a form with a file, and maximum fields without one
MAX_FIELD_BYTES = 2**16  # maximum bytes of a form field without a file
MAX_NAME_LENGTH = 255  # maximum characters of a file name
HEAVY_REQUEST_COST = 4  # approximate cost of a request for attention or tiles, in images


@dataclass(frozen=True)
class Upload:
    """One uploaded image: its file name, if any, and its bytes."""

    name: str | None
    content: memoryview


class FormParser(MultiPartParser):
    """Starlette's form parser with files in memory only. It detects truncated forms (`is_complete`).

    Raises Refusal, 415, for a transfer encoding such as base64.
    """

    spool_max_size = 2**40
    is_complete = False

    def on_headers_finished(self) -> None:
        """Check the headers of a form field. Raises Refusal, 415, for a transfer encoding."""
        for name, value in self._current_part.item_headers:
            if name == b"content-transfer-encoding" and value.strip().lower() not in (b"binary", b"8bit", b"7bit"):
                hint = "send the image bytes without encoding"
                raise Refusal(415, "unsupported_media", "transfer encodings are not supported", hint)
        super().on_headers_finished()

    def on_end(self) -> None:
        """Record that the last boundary of the form was read."""
        self.is_complete = True


def get_request_context(request: Request) -> tuple[Service, RequestInfo]:
    """Return the service and the state of this request."""
    return request.scope["service"], request.scope["info"]


def read_parameters(request: Request) -> dict[str, str]:
    """Parse the query string. Raises Refusal, 422, for invalid syntax, and for unknown or duplicate parameters."""
    text, path = request.scope["query_string"], request.scope["path"]
    allowed = POST_ENDPOINTS[path][2] if path in POST_ENDPOINTS else ()
    try:
        pairs = parse_qsl(text.decode("ascii"), keep_blank_values=True, strict_parsing=bool(text), max_num_fields=20)
    except (ValueError, UnicodeDecodeError):
        message, hint = "invalid query string", "use ?name=value&name=value"
        raise Refusal(422, "bad_parameter", message, hint) from None
    parameters: dict[str, str] = {}
    for name, value in pairs:
        if name not in allowed:
            hint = f"use {', '.join(allowed)}" if allowed else "this endpoint has no parameters"
            raise Refusal(422, "bad_parameter", f"unknown parameter {shorten_text(name)}", hint)
        if name in parameters:
            raise Refusal(422, "bad_parameter", f"duplicate parameter {name}", "send it once")
        parameters[name] = value
    return parameters


def describe_model_version(served: ServedModel) -> dict[str, str]:
    """Return name and version of the model, which every response contains."""
    return {"name": served.predictor.card.name, "version": served.predictor.card.version}


def require_single_upload(uploads: list[Upload]) -> Upload:
    """Return the only image of a request. Raises Refusal, 400, for none or several."""
    if len(uploads) != 1:
        raise Refusal(400, "bad_request", f"expected 1 image, got {len(uploads)}", "send exactly one image")
    return uploads[0]


def parse_int(name: str, text: str, minimum: int, maximum: int) -> int:
    """Parse an integer in a range. Raises Refusal, 422, with the parameter, its value and the range."""
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and minimum <= int(text) <= maximum):
        raise Refusal(
            422, "bad_parameter", f"invalid {name}={text[:40]!r}", f"use an integer from {minimum} to {maximum}"
        )
    return int(text)


def parse_fraction(name: str, text: str) -> float:
    """Parse a number from 0 to 1. Raises Refusal, 422, with the parameter, its value and the range."""
    try:
        value = float(text) if text.isascii() and len(text) < 40 else -1.0
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise Refusal(422, "bad_parameter", f"invalid {name}={text[:40]!r}", "use a number from 0 to 1")
    return value


def parse_choice(name: str, parameters: Mapping[str, str], choices: tuple[str, ...]) -> str:
    """Return the parameter `name`, which must be one of `choices`; the first is the default. Raises Refusal, 422."""
    choice = parameters.get(name, choices[0])
    if choice not in choices:
        raise Refusal(422, "bad_parameter", f"invalid {name}={choice[:40]}", f"use {' or '.join(choices)}")
    return choice


def format_endpoint(card: Card) -> str:
    """Format the endpoint of a model for a hint, such as `POST /v1/predict`."""
    return f"POST /v1/{card.task.endpoint}"


def require_endpoint(served: ServedModel, endpoint: str, problem: str) -> None:
    """Raise Refusal, 404, with the message `problem`, if the model does not support `endpoint`."""
    if not served.capabilities[endpoint]:
        raise Refusal(404, "not_available", problem, f"use {format_endpoint(served.predictor.card)}")


def require_image_input(card: Card) -> None:
    """Raise Refusal, 404, for a generative model, which has no image input."""
    if not card.task.reads_images:
        raise Refusal(
            404, "not_available", "this is a generative model without image input", f"use {format_endpoint(card)}"
        )


async def read_uploads(request: Request, limits: ServerLimits) -> list[Upload]:
    """Read the images of a request, in order.

    Raises Refusal: 400 for an invalid form or no image, 413 for too many images, 415 for an unsupported content type.
    """
    media_type = request.headers.get("content-type", "").split(";", 1)[0].strip().lower()
    if media_type == "multipart/form-data":
        uploads = await read_form(request)
        if not uploads:
            raise Refusal(400, "bad_request", "no image in the form", "send the image as a field with a file name")
        if len(uploads) > limits.images:
            raise Refusal(413, "too_large", f"{len(uploads)} images in one request", f"send at most {limits.images}")
        return uploads
    if media_type.startswith(("image/", "video/")) or media_type == "application/octet-stream":
        body = await request.body()
        if not body:
            raise Refusal(400, "bad_request", "empty body", "send the image as the body")
        return [Upload(None, memoryview(body))]
    message = f"unsupported content type {shorten_text(media_type)}" if media_type else "no content type"
    raise Refusal(
        415, "unsupported_media", message, "send multipart/form-data, an image as image/*, or a clip as video/*"
    )


async def read_form(request: Request) -> list[Upload]:
    """Read the files of a form. Raises Refusal, 400, for an invalid or truncated form."""
    return [upload for _, upload in await read_parts(request) if isinstance(upload, Upload)]


async def read_parts(request: Request) -> list[tuple[str, Upload | str]]:
    """Read the fields of a form as (name, file or text). Raises Refusal, 400, for an invalid or truncated form."""
    limits = {"max_files": MAX_PARTS, "max_fields": MAX_PARTS, "max_part_size": MAX_FIELD_BYTES}
    parser = FormParser(request.headers, request.stream(), **limits)
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise Refusal(
            400, "bad_multipart", f"invalid form: {error.message}", "use an HTTP library to build it"
        ) from None
    if not parser.is_complete:
        raise Refusal(400, "bad_multipart", "the form ends before its last boundary", "send the complete form")
    form_fields: list[tuple[str, Upload | str]] = []
    for field, value in form.multi_items():
        # for a file field without a file, a browser sends an empty field without a file name
        if isinstance(value, UploadFile) and (value.size or value.filename):
            name = re.split(r"[/\\]", value.filename or "")[-1][:MAX_NAME_LENGTH]
            form_fields.append((field, Upload(name, memoryview(await value.read()))))
        elif isinstance(value, str):
            form_fields.append((field, value))
    await form.close()
    return form_fields
