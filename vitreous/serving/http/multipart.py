"""The pictures in a request's body: the parts of multipart/form-data that have a file name (RFC 7578), or the body
itself.

The body is in memory, whole and within its limit, so a part is a slice of it, and nothing touches a disk.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser

from vitreous.serving.http.limits import Limits
from vitreous.serving.http.messages import Refusal, Request, short

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

MOST_PARTS = 64  # fields of a form without a file among them
NAME = 255  # characters of a file name that are kept


@dataclass(frozen=True)
class Upload:
    """One picture as it was sent: its name, if it has one, and its bytes."""

    name: str | None
    content: memoryview


def uploads(request: Request, limits: Limits) -> list[Upload]:
    """The pictures of a request, in order. Raises Refusal: 400 for what is no multipart, 413 for too many, 415 for
    another type."""
    kind = request.headers.get(b"content-type", b"").decode("latin-1")
    essence = kind.split(";", 1)[0].strip().lower()
    body = memoryview(request.body)
    if essence == "multipart/form-data":
        found = [upload for upload in parts(body, boundary(kind), limits) if upload is not None]
        if not found:
            raise Refusal(400, "bad_request", "no picture in the form", "send it as a part with a file name")
        if len(found) > limits.images:
            raise Refusal(413, "too_large", f"{len(found)} pictures in one request", f"send at most {limits.images}")
        return found
    if essence.startswith("image/") or essence == "application/octet-stream":
        if not len(body):
            raise Refusal(400, "bad_request", "an empty body", "send the picture as the body")
        return [Upload(None, body)]
    message = f"a body of type {short(essence)}" if essence else "a body without a content type"
    raise Refusal(415, "unsupported_media", message, "send multipart/form-data, or a picture as image/*")


def boundary(kind: str) -> bytes:
    """What separates the parts, from the header Content-Type. Raises Refusal where there is none or it cannot be one
    (RFC 2046)."""
    found = re.search(r';\s*boundary=(?:"([^"]{1,70})"|([^\s;",]{1,70}))\s*(?:;|$)', kind, re.IGNORECASE)
    text = (found[1] or found[2]) if found else ""
    if not re.fullmatch(r"[0-9A-Za-z'()+_,\-./:=? ]{0,69}[0-9A-Za-z'()+_,\-./:=?]", text):
        raise Refusal(
            400, "bad_multipart", "multipart without a boundary that can be used", "let an HTTP library make the form"
        )
    return text.encode("ascii")


def parts(body: memoryview, mark: bytes, limits: Limits) -> list[Upload | None]:
    """The parts between the marks, None for those without a file name. Raises Refusal for what python-multipart cannot
    read."""
    form = Form(body, limits)
    parser = MultipartParser(mark, form.callbacks(), max_header_size=limits.part_head)
    try:
        parser.write(bytes(body))
    except FormParserError:
        raise Refusal(400, "bad_multipart", "a form that cannot be read", "let an HTTP library make it") from None
    if not form.whole:
        raise Refusal(400, "bad_multipart", "the form ends before its last boundary", "send it whole")
    return form.found


class Form:
    """Hears the parser, which is given the body as one piece, so that content lies at the same place in it."""

    def __init__(self, body: memoryview, limits: Limits) -> None:
        self.body, self.limits = body, limits
        self.found: list[Upload | None] = []
        self.whole = False

    def callbacks(self) -> MultipartCallbacks:
        """What the parser calls."""
        return {
            "on_part_begin": self.begin,
            "on_header_field": self.of_field,
            "on_header_value": self.of_value,
            "on_header_end": self.header,
            "on_part_data": self.data,
            "on_part_end": self.end,
            "on_end": self.over,
        }

    def begin(self) -> None:
        """A part. Raises Refusal for too many."""
        if len(self.found) == MOST_PARTS:
            raise Refusal(
                400, "bad_multipart", f"more than {MOST_PARTS} parts", f"send at most {self.limits.images} pictures"
            )
        self.field, self.value = b"", b""
        self.name: str | None = None
        self.low = self.high = 0

    def of_field(self, data: bytes, start: int, end: int) -> None:
        """A piece of a header's name."""
        self.field += data[start:end]

    def of_value(self, data: bytes, start: int, end: int) -> None:
        """A piece of its value."""
        self.value += data[start:end]

    def header(self) -> None:
        """It is whole. Raises Refusal for a part in base64 and the like."""
        field, value = self.field.strip().lower(), self.value.decode("utf-8", "replace")
        if field == b"content-disposition":
            self.name = file_name(f";{value.partition(';')[2]}")
        if field == b"content-transfer-encoding" and value.strip().lower() not in ("binary", "8bit", "7bit"):
            raise Refusal(
                415, "unsupported_media", "a part in a transfer encoding", "send the bytes of the picture as they are"
            )
        self.field, self.value = b"", b""

    def data(self, data: bytes, start: int, end: int) -> None:
        """A piece of the content, which follows the one before."""
        if not self.high:
            self.low = start
        self.high = end

    def end(self) -> None:
        """The part is whole."""
        empty = self.low == self.high  # what a browser sends for a field in which no file was chosen
        self.found.append(
            None
            if self.name is None or (empty and not self.name)
            else Upload(self.name, self.body[self.low : self.high])
        )

    def over(self) -> None:
        """The last boundary."""
        self.whole = True


def file_name(disposition: str) -> str | None:
    """The `filename` of a Content-Disposition, the last part of its path; None where there is none."""
    found = re.search(r';\s*filename=(?:"((?:[^"\\]|\\.)*)"|([^\s;"]*))', disposition, re.IGNORECASE)
    if not found:
        return None
    text = re.sub(r"\\(.)", r"\1", found[1]) if found[1] is not None else found[2]
    return re.split(r"[/\\]", text)[-1][:NAME]
