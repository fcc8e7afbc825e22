"""Settings of the server: limits per request and in total, access control, and the address to listen on.

It does not import Starlette, so that options can be checked without the extra `serve`.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field

from vitreous.apps.server.responses import Refusal, shorten_text

MAX_IMAGE_PIXELS = 25_000_000
MAX_BODY_BYTES = 20 * 2**20
MIN_QUEUE = 8  # minimum default of `queue`, in images: some are decoded while others are computed
LOCAL_HOSTS = ("127.0.0.1", "localhost", "[::1]")


@dataclass(frozen=True)
class ServerLimits:
    """Limits of the server. Sizes are in bytes, times in seconds; `queue` and `images` (per request) are numbers of
    images.

    `queue` counts every image from the complete arrival of its request until its response is sent, so it bounds the
    waiting time. 0 is the number of images computed per second, at least `MIN_QUEUE`. `in_flight_bytes` limits request
    bodies in memory, over all connections. `decode_seconds` is CPU time per image; its wall time may be far longer on a
    busy machine.
    """

    bytes: int = MAX_BODY_BYTES
    pixels: int = MAX_IMAGE_PIXELS
    images: int = 16
    queue: int = 0
    _: KW_ONLY
    in_flight_bytes: int = 4 * MAX_BODY_BYTES
    connections: int = 2048
    head: int = 32 * 2**10
    headers: int = 100
    head_seconds: float = 9.5
    idle_seconds: float = 30.0
    body_seconds: float = 5.0
    body_rate: float = 10_000.0
    decode_seconds: float = 3.0
    decode_memory: int = 2**30
    deadline: float = 30.0
    drain_seconds: float = 9.0


@dataclass(frozen=True)
class AccessControl:
    """The host names under which the server may be requested, and the required token, if any.

    `accepts_addresses`: whether IP addresses are accepted as hosts too. They are safe: a foreign page can bind only a
    host name to the address of this server (DNS rebinding).
    """

    hosts: frozenset[str] = frozenset(LOCAL_HOSTS)
    token: bytes | None = None
    accepts_addresses: bool = False

    def check(self, headers: Mapping[bytes, bytes], needs_token: bool) -> None:
        """Check host, origin and token of a request. Raises Refusal: 400 without a Host header, 403 for an unknown host
        or another origin, 401 for a missing or wrong token."""
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if not host:
            raise Refusal(400, "bad_request", "no Host header", "use an HTTP library")
        name = strip_port(host)
        if name not in self.hosts and not (self.accepts_addresses and is_ip_address(name)):
            hint = f"use {', '.join(sorted(self.hosts))}, or start the server with --host-name"
            raise Refusal(403, "forbidden_host", f"unknown host name {shorten_text(host)}", hint)
        origin = headers.get(b"origin", b"").decode("latin-1")
        if b"origin" in headers and origin.lower() not in (f"http://{host}", f"https://{host}"):
            raise Refusal(
                403, "forbidden_origin", f"cross-origin request from {shorten_text(origin)}", "use this server's page"
            )
        if self.token is None or not needs_token:
            return
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        if not hmac.compare_digest(token.strip(), self.token) or scheme.lower() != b"bearer":
            challenge, hint = {"www-authenticate": "Bearer"}, "send Authorization: Bearer TOKEN"
            raise Refusal(401, "unauthorised", "the token is missing or wrong", hint, headers=challenge)


def is_ip_address(host: str) -> bool:
    """Return whether a host is an IPv4 address, or an IPv6 address in brackets."""
    try:
        address = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return (address.version == 6) == host.startswith("[")


def strip_port(host: str) -> str:
    """Remove the port from the value of a Host header."""
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdigit() else host


@dataclass(frozen=True)
class ServerSettings:
    """The address to listen on, limits and access control.

    Args:
        decoders: processes that decode images; 0 is one per core, at least two.
        quiet: log no requests.
        command: the command that starts a decoding process; () is the default command of this package.
        root_path: the path of this server at a reverse proxy, such as `/vit`, "" for none; requests are accepted with
            and without it.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    limits: ServerLimits = field(default_factory=ServerLimits)
    access: AccessControl = field(default_factory=AccessControl)
    _: KW_ONLY
    decoders: int = 0
    quiet: bool = False
    command: tuple[str, ...] = ()
    root_path: str = ""
