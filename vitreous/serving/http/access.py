"""Who may ask: names that the server goes by, pages that may use it, and the token. A page of another site must not
reach it."""

from __future__ import annotations

import hmac
from dataclasses import dataclass

from vitreous.serving.http.messages import Refusal, Request, short

LOCAL = ("127.0.0.1", "localhost", "[::1]")


@dataclass(frozen=True)
class Access:
    """The host names that a request may be for, and the token that it must bring, if any."""

    hosts: frozenset[str] = frozenset(LOCAL)
    token: bytes | None = None

    def judge(self, request: Request, open_to_all: bool) -> None:
        """Raise Refusal: 400 without a host, 403 for another host or origin, 401 without the token."""
        host = request.headers.get(b"host", b"").decode("latin-1").lower()
        if not host:
            raise Refusal(400, "bad_request", "no header Host", "let an HTTP library make the request")
        if name_of(host) not in self.hosts:
            way = f"use {', '.join(sorted(self.hosts))}, or start it with --host-name"
            raise Refusal(403, "forbidden_host", f"this server is not called {short(host)}", way)
        origin = request.headers.get(b"origin")
        if origin is not None and origin.decode("latin-1").lower() not in (f"http://{host}", f"https://{host}"):
            raise Refusal(
                403,
                "forbidden_origin",
                f"a page of {short(origin.decode('latin-1'))} asks",
                "use the server's own page",
            )
        if self.token is None or open_to_all:
            return
        scheme, _, given = request.headers.get(b"authorization", b"").partition(b" ")
        if not hmac.compare_digest(given.strip(), self.token) or scheme.lower() != b"bearer":
            extra = b"WWW-Authenticate: Bearer\r\n"
            raise Refusal(
                401, "unauthorised", "the token is missing or wrong", "send Authorization: Bearer TOKEN", extra=extra
            )


def name_of(host: str) -> str:
    """A host without its port."""
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdigit() else host
