"""JSON responses, and the headers that every response has."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from vitreous.apps.server.refusal import Refusal

CONTENT_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    b"media-src 'self' blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
SECURITY = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (b"permissions-policy", b"camera=(self), microphone=(), geolocation=()"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"content-security-policy", CONTENT_POLICY),
)


def json_response(document: dict[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON document that no cache keeps."""
    text = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Response(
        text.encode("utf-8", "backslashreplace"),
        status,
        {"cache-control": "no-store", **(headers or {})},
        "application/json; charset=utf-8",
    )


def refusal_response(refusal: Refusal, request_id: str) -> Response:
    """A refusal as a client gets it: `{"error": {code, message, hint, request_id}}`."""
    retry = {"retry-after": str(refusal.retry)} if refusal.retry else {}
    return json_response({"error": refusal.describe(request_id)}, refusal.status, refusal.headers | retry)
