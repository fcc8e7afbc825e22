"""Responses: JSON documents, refusals (error responses), and the headers of every response.

Starlette is imported when a response is made, so that `Refusal` can be imported without the extra `serve`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vitreous.errors import VitreousError, escape_unprintable

if TYPE_CHECKING:
    from starlette.responses import Response

CONTENT_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    b"media-src 'self' blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
SECURITY_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (b"permissions-policy", b"camera=(self), microphone=(), geolocation=()"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"content-security-policy", CONTENT_POLICY),
)


class Refusal(VitreousError):
    """An exception that becomes an error response, with an HTTP status and a stable `code` for programs.

    `retry` is the number of seconds for the header Retry-After, 0 for none.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        hint: str = "",
        *,
        retry: int = 0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, hint)
        self.status, self.name, self.retry, self.headers = status, code, retry, dict(headers or {})

    def to_json(self, request_id: str) -> dict[str, str]:
        """Return the content of the key `error` in the JSON response."""
        return {"code": self.name, "message": self.message, "hint": self.hint, "request_id": request_id}


def shorten_text(text: str) -> str:
    """Shorten text of a client to one printable line of at most 60 characters."""
    return escape_unprintable(text if len(text) <= 60 else text[:57] + "...")


def json_response(document: dict[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Make a JSON response that clients must not cache."""
    from starlette.responses import Response

    text = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Response(
        text.encode("utf-8", "backslashreplace"),
        status,
        {"cache-control": "no-store", **(headers or {})},
        "application/json; charset=utf-8",
    )


def refusal_response(refusal: Refusal, request_id: str) -> Response:
    """Make the response of a refusal: `{"error": {code, message, hint, request_id}}`."""
    retry = {"retry-after": str(refusal.retry)} if refusal.retry else {}
    return json_response({"error": refusal.to_json(request_id)}, refusal.status, refusal.headers | retry)
