"""A request as it arrived, and what is sent back. Every refusal is a JSON document with a code for
programs."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl

from vitreous.errors import VitreousError, printable

SECURITY = (
    b"X-Content-Type-Options: nosniff\r\nReferrer-Policy: no-referrer\r\nX-Frame-Options: DENY\r\n"
    b"Permissions-Policy: camera=(self), microphone=(), geolocation=()\r\n"
    b"Cross-Origin-Resource-Policy: same-origin\r\nCross-Origin-Opener-Policy: same-origin\r\n"
    b"Content-Security-Policy: default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
    b"connect-src 'self'; media-src 'self' blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'\r\n"
)
JSON = b"application/json; charset=utf-8"


@dataclass
class Request:
    """A request: its head when it is made, its body when `whole`. Times are the event loop's, in seconds.

    `headers` have lower-case names; `gone` says that whoever asked has left.
    """

    method: str
    target: bytes
    path: str
    headers: dict[bytes, bytes]
    id: str
    began: float
    deadline: float
    query: bytes = b""
    body: bytearray = field(default_factory=bytearray)
    length: int | None = None
    whole: bool = False
    gone: bool = False
    keep: bool = True
    client: str = ""
    route: str = "none"
    images: int = 0

    def parameters(self, known: tuple[str, ...]) -> dict[str, str]:
        """The query string as names and values. Raises Refusal for what cannot be read, is unknown,
        or is said twice."""
        try:
            pairs = parse_qsl(
                self.query.decode("ascii"), keep_blank_values=True, strict_parsing=bool(self.query), max_num_fields=20
            )
        except (ValueError, UnicodeDecodeError):
            raise Refusal(
                422, "bad_parameter", "the query string cannot be read", "write ?name=value&name=value"
            ) from None
        found: dict[str, str] = {}
        for name, value in pairs:
            if name not in known:
                ways = f"there are {', '.join(known)}" if known else "there are none here"
                raise Refusal(422, "bad_parameter", f"unknown parameter {short(name)}", ways)
            if name in found:
                raise Refusal(422, "bad_parameter", f"{name} is given twice", "give it once")
            found[name] = value
        return found


@dataclass(frozen=True)
class Response:
    """A status, a body, and headers beyond those that every answer has."""

    status: int
    body: bytes
    kind: bytes = JSON
    extra: bytes = b""

    def encoded(self, request_id: str, keep: bool, date: bytes, head_only: bool = False) -> bytes:
        """As it goes over the wire."""
        head = (
            b"HTTP/1.1 %d %s\r\nContent-Type: %s\r\nContent-Length: %d\r\nDate: %s\r\n"
            b"X-Request-Id: %s\r\nConnection: %s\r\n%s%s\r\n"
            % (
                self.status,
                _PHRASES.get(self.status, b"Status"),
                self.kind,
                len(self.body),
                date,
                request_id.encode(),
                b"keep-alive" if keep else b"close",
                self.extra,
                SECURITY,
            )
        )
        return head if head_only else head + self.body


_PHRASES = {status.value: status.phrase.encode() for status in HTTPStatus}


def answer(document: dict[str, Any], status: int = 200, extra: bytes = b"") -> Response:
    """A JSON document as a response."""
    text = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Response(status, text.encode("utf-8", "backslashreplace"), JSON, b"Cache-Control: no-store\r\n" + extra)


class Refusal(VitreousError):
    """Why a request is not answered: an HTTP status, and a code that stays the same. `retry`: seconds until it
    is worth asking again."""

    def __init__(
        self, status: int, code: str, message: str, hint: str = "", retry: int = 0, extra: bytes = b""
    ) -> None:
        super().__init__(message, hint)
        self.status, self.name, self.retry, self.extra = status, code, retry, extra

    def response(self, request_id: str) -> Response:
        """As a client gets it."""
        said = {"code": self.name, "message": self.message, "hint": self.hint, "request_id": request_id}
        extra = self.extra + (b"Retry-After: %d\r\n" % self.retry if self.retry else b"")
        return answer({"error": said}, self.status, extra)


def short(text: str) -> str:
    """A client's words as one line of at most 60 characters."""
    return printable(text if len(text) <= 60 else text[:57] + "...")
