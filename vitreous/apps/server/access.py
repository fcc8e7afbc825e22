"""Access control: the server's host names, the origins of pages, and the token."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass

from vitreous.apps.server.refusal import Refusal, shorten

LOCAL = ("127.0.0.1", "localhost", "[::1]")


@dataclass(frozen=True)
class Access:
    """The host names that a request may be for, and the token that it must bring, if any."""

    hosts: frozenset[str] = frozenset(LOCAL)
    token: bytes | None = None

    def check(self, headers: Mapping[bytes, bytes], needs_token: bool) -> None:
        """Raises Refusal: 400 without a host, 403 for another host or origin, 401 without the token."""
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if not host:
            raise Refusal(400, "bad_request", "no header Host", "let an HTTP library make the request")
        if strip_port(host) not in self.hosts:
            hint = f"use {', '.join(sorted(self.hosts))}, or start it with --host-name"
            raise Refusal(403, "forbidden_host", f"this server is not called {shorten(host)}", hint)
        origin = headers.get(b"origin", b"").decode("latin-1")
        if b"origin" in headers and origin.lower() not in (f"http://{host}", f"https://{host}"):
            raise Refusal(403, "forbidden_origin", f"a page of {shorten(origin)} asks", "use the server's own page")
        if self.token is None or not needs_token:
            return
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        if not hmac.compare_digest(token.strip(), self.token) or scheme.lower() != b"bearer":
            challenge, hint = {"www-authenticate": "Bearer"}, "send Authorization: Bearer TOKEN"
            raise Refusal(401, "unauthorised", "the token is missing or wrong", hint, headers=challenge)


def strip_port(host: str) -> str:
    """A host without its port."""
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdigit() else host
