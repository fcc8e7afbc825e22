"""Reading a request: its query string, and its images.

Images are the parts of multipart/form-data that have a file name (RFC 7578), or the body itself.
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

MAX_PARTS = 64  # with and without a file, each
MAX_FIELD_BYTES = 2**16  # bytes of a part without a file
MAX_NAME_LENGTH = 255  # characters of a file name that are used
HEAVY_REQUEST_COST = 4  # pictures that looking at attention, or a picture in tiles, costs as much as, about


@dataclass(frozen=True)
class Upload:
    """One image as it was sent: its name, if it has one, and its bytes."""

    name: str | None
    content: memoryview


class FormParser(MultiPartParser):
    """Starlette's parser with files in memory only, aware of forms that lack their end.

    Raises Refusal, 415, for a part in base64 and the like.
    """

    spool_max_size = 2**40
    complete = False

    def on_headers_finished(self) -> None:
        """The headers of a part are read."""
        for name, value in self._current_part.item_headers:
            if name == b"content-transfer-encoding" and value.strip().lower() not in (b"binary", b"8bit", b"7bit"):
                hint = "send the bytes of the picture as they are"
                raise Refusal(415, "unsupported_media", "a part in a transfer encoding", hint)
        super().on_headers_finished()

    def on_end(self) -> None:
        """The last boundary is read."""
        self.complete = True


def get_request_context(request: Request) -> tuple[Service, RequestInfo]:
    """The service, and what it knows of this request."""
    return request.scope["service"], request.scope["info"]


def read_parameters(request: Request) -> dict[str, str]:
    """The query string as names and values. Raises Refusal, 422, for what is unreadable, unknown or given twice."""
    text, path = request.scope["query_string"], request.scope["path"]
    known = POST_ENDPOINTS[path][2] if path in POST_ENDPOINTS else ()
    try:
        pairs = parse_qsl(text.decode("ascii"), keep_blank_values=True, strict_parsing=bool(text), max_num_fields=20)
    except (ValueError, UnicodeDecodeError):
        message, hint = "the query string cannot be read", "write ?name=value&name=value"
        raise Refusal(422, "bad_parameter", message, hint) from None
    parameters: dict[str, str] = {}
    for name, value in pairs:
        if name not in known:
            hint = f"there are {', '.join(known)}" if known else "there are none here"
            raise Refusal(422, "bad_parameter", f"unknown parameter {shorten_text(name)}", hint)
        if name in parameters:
            raise Refusal(422, "bad_parameter", f"{name} is given twice", "give it once")
        parameters[name] = value
    return parameters


def describe_model_version(served: ServedModel) -> dict[str, str]:
    """The model, in every answer."""
    return {"name": served.predictor.card.name, "version": served.predictor.card.version}


def require_single_upload(uploads: list[Upload]) -> Upload:
    """The one image of a request. Raises Refusal, 400."""
    if len(uploads) != 1:
        raise Refusal(400, "bad_request", f"{len(uploads)} pictures", "send exactly one")
    return uploads[0]


def parse_int(name: str, text: str, least: int, most: int) -> int:
    """A whole number in a range. Raises Refusal, 422, naming the parameter, the value and what is allowed."""
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and least <= int(text) <= most):
        raise Refusal(422, "bad_parameter", f"{name}={text[:40]!r}", f"{name} is a whole number from {least} to {most}")
    return int(text)


def parse_share(name: str, text: str) -> float:
    """A number from 0 to 1. Raises Refusal, 422."""
    try:
        value = float(text) if text.isascii() and len(text) < 40 else -1.0
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise Refusal(422, "bad_parameter", f"{name}={text[:40]!r}", f"{name} is a number from 0 to 1")
    return value


def parse_choice(name: str, parameters: Mapping[str, str], words: tuple[str, ...]) -> str:
    """One of some words, the first where nothing is said. Raises Refusal, 422."""
    word = parameters.get(name, words[0])
    if word not in words:
        raise Refusal(422, "bad_parameter", f"{name}={word[:40]} cannot be", f"{name} is {' or '.join(words)}")
    return word


def format_endpoint(card: Card) -> str:
    """The address that a model answers at."""
    return f"POST /v1/{card.task.endpoint}"


def require_endpoint(served: ServedModel, endpoint: str, problem: str) -> None:
    """Raise Refusal, 404, with the `problem`, for a model that another address answers for."""
    if not served.can[endpoint]:
        raise Refusal(404, "not_available", problem, format_endpoint(served.predictor.card))


def require_image_input(card: Card) -> None:
    """Raise Refusal, 404, for a model that makes images, where one is needed that reads them."""
    if not card.task.reads_images:
        raise Refusal(404, "not_available", "this model makes images, and reads none", format_endpoint(card))


async def read_uploads(request: Request, limits: ServerLimits) -> list[Upload]:
    """The images of a request, in order.

    Raises Refusal: 400 for a bad form or none, 413 for too many images, 415 for another type of body.
    """
    media_type = request.headers.get("content-type", "").split(";", 1)[0].strip().lower()
    if media_type == "multipart/form-data":
        uploads = await read_form(request)
        if not uploads:
            raise Refusal(400, "bad_request", "no picture in the form", "send it as a part with a file name")
        if len(uploads) > limits.images:
            raise Refusal(413, "too_large", f"{len(uploads)} pictures in one request", f"send at most {limits.images}")
        return uploads
    if media_type.startswith(("image/", "video/")) or media_type == "application/octet-stream":
        body = await request.body()
        if not body:
            raise Refusal(400, "bad_request", "an empty body", "send the picture as the body")
        return [Upload(None, memoryview(body))]
    message = f"a body of type {shorten_text(media_type)}" if media_type else "a body without a content type"
    raise Refusal(
        415, "unsupported_media", message, "send multipart/form-data, or a picture as image/*, a clip as video/*"
    )


async def read_form(request: Request) -> list[Upload]:
    """The files of a form. Raises Refusal as `read_parts`."""
    return [part for _, part in await read_parts(request) if isinstance(part, Upload)]


async def read_parts(request: Request) -> list[tuple[str, Upload | str]]:
    """The parts of a form by their names, files and text. Raises Refusal, 400, for a form that cannot be read or lacks
    its end."""
    limits = {"max_files": MAX_PARTS, "max_fields": MAX_PARTS, "max_part_size": MAX_FIELD_BYTES}
    parser = FormParser(request.headers, request.stream(), **limits)
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise Refusal(
            400, "bad_multipart", f"a form that cannot be read: {error.message}", "let an HTTP library make it"
        ) from None
    if not parser.complete:
        raise Refusal(400, "bad_multipart", "the form ends before its last boundary", "send it whole")
    parts: list[tuple[str, Upload | str]] = []
    for field, part in form.multi_items():
        # a browser sends an empty part without a name for a field in which no file was chosen
        if isinstance(part, UploadFile) and (part.size or part.filename):
            name = re.split(r"[/\\]", part.filename or "")[-1][:MAX_NAME_LENGTH]
            parts.append((field, Upload(name, memoryview(await part.read()))))
        elif isinstance(part, str):
            parts.append((field, part))
    await form.close()
    return parts
