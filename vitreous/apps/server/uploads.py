"""The images of a request: the parts of multipart/form-data that have a file name (RFC 7578), or the body itself."""

from __future__ import annotations

import re
from dataclasses import dataclass

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from vitreous.apps.server.limits import Limits
from vitreous.apps.server.refusal import Refusal, shorten

MAX_PARTS = 64  # with and without a file, each
MAX_FIELD = 2**16  # bytes of a part without a file
MAX_NAME = 255  # characters of a file name that are used


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


async def read_uploads(request: Request, limits: Limits) -> list[Upload]:
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
    message = f"a body of type {shorten(media_type)}" if media_type else "a body without a content type"
    raise Refusal(
        415, "unsupported_media", message, "send multipart/form-data, or a picture as image/*, a clip as video/*"
    )


async def read_form(request: Request) -> list[Upload]:
    """The files of a form. Raises Refusal as `read_parts`."""
    return [part for _, part in await read_parts(request) if isinstance(part, Upload)]


async def read_parts(request: Request) -> list[tuple[str, Upload | str]]:
    """The parts of a form by their names, files and text. Raises Refusal, 400, for a form that cannot be read or lacks
    its end."""
    limits = {"max_files": MAX_PARTS, "max_fields": MAX_PARTS, "max_part_size": MAX_FIELD}
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
            name = re.split(r"[/\\]", part.filename or "")[-1][:MAX_NAME]
            parts.append((field, Upload(name, memoryview(await part.read()))))
        elif isinstance(part, str):
            parts.append((field, part))
    await form.close()
    return parts
