"""uvicorn's HTTP/1.1 protocol, with limits on every size and duration that a client controls.

The application checks a request when its headers are complete, and may respond before the body has arrived. The rest of
a short body is then discarded, so that the connection can be reused. With a long body, the connection closes after a
short delay, in which the client can read the response.

Pipelining is not supported. If a request arrives before the response to the previous one is sent, the connection closes
after that response.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import sys
from collections.abc import Callable
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from vitreous.apps.server.responses import SECURITY_HEADERS, Refusal, refusal_response
from vitreous.apps.server.settings import ServerLimits

MAX_DISCARDED_BYTES = 2**20  # bytes of a refused request's body that are read and discarded
LINGER_SECONDS = 2.0  # seconds for a client to read the last response of a connection
# a client has SEND_SECONDS to read a response, and 1 s more per SEND_RATE bytes
SEND_SECONDS, SEND_RATE = 10.0, 10_000.0
MAX_TINY_CHUNKS = 4096  # chunks of a body of any size; more chunks must have at least 16 bytes on average
_TARGET = re.compile(rb"/[!-~]*")
_UNREADABLE = Refusal(400, "bad_request", "this is not an HTTP/1.1 request", "use an HTTP library")

IDLE, HEAD, BODY, ANSWERING = "idle", "head", "body", "answering"


class LimitedProtocol(HttpToolsProtocol):
    """One connection with limits.

    `phase` is its state: no request (IDLE), an incomplete head or body (HEAD, BODY), or a complete request without a
    response (ANSWERING). `phase_start_time` is the start of the phase. `count_malformed` is called with the status of
    each malformed request. `refuse_full` returns a refusal and the request id if the server is full.
    """

    def __init__(
        self,
        limits: ServerLimits,
        count_malformed: Callable[[int], None],
        refuse_full: Callable[[Any], tuple[Refusal, str] | None],
        config: Config,
        *,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=False)  # type: ignore[union-attr]
        self.limits, self.count_malformed, self.refuse_full = limits, count_malformed, refuse_full
        self.phase, self.phase_start_time = HEAD, self.loop.time()
        self.head_bytes = self.header_count = self.chunks = self.body_bytes = self.discarded = 0
        self.deaf = False  # further data are not parsed as requests
        self.unread_since: float | None = None  # since when the client has not read its response

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Register a connection. Above the limit, close the connection whose phase started first, among those that are
        not waiting for a response; if there is none, close the new one."""
        if len(self.connections) >= self.limits.connections:
            closable = [
                connection
                for connection in self.connections
                if isinstance(connection, LimitedProtocol) and connection.phase != ANSWERING
            ]
            (
                min(closable, key=lambda connection: connection.phase_start_time).transport if closable else transport
            ).abort()
        super().connection_made(LingeringTransport(transport, self))  # type: ignore[arg-type]
        transport.max_size = 2**16  # type: ignore[attr-defined]  # bytes per read, so that connections take short turns

    def data_received(self, data: bytes) -> None:
        """Parse received data, or discard it if the connection takes no further requests."""
        if self.deaf:
            self.discard(len(data))
            return
        if self.phase == IDLE:
            self.phase, self.phase_start_time, self.head_bytes = HEAD, self.loop.time(), 0
        if self.phase == HEAD:
            self.head_bytes += len(data)
        super().data_received(data)
        if self.phase == HEAD and self.head_bytes > self.limits.head and not self.deaf:
            hint = f"send at most {self.limits.head} bytes"
            self.reject(Refusal(431, "too_large", "the request headers are too long", hint))

    def discard(self, size: int) -> None:
        """Count discarded bytes. Above `MAX_DISCARDED_BYTES`, stop reading and close."""
        self.discarded += size
        if self.discarded > MAX_DISCARDED_BYTES:
            self.flow.pause_reading() if self.transport.is_closing() else self.transport.close()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Start the application. If the server is full, refuse the request here, without a task."""
        full_refusal = self.refuse_full(cycle.scope) if cycle.keep_alive else None
        if full_refusal is None:
            super()._start_asgi_task(cycle, app)
            return
        self.transport.write(self.render(*full_refusal))
        cycle.response_started = cycle.response_complete = True
        self.on_response_complete()

    # callbacks of the parser; if one raises an exception, the parser calls send_400_response

    def on_message_begin(self) -> None:
        """Handle the first byte of a request. Raises Refusal for a pipelined request."""
        if self.phase in (BODY, ANSWERING):
            raise _UNREADABLE
        super().on_message_begin()
        self.header_count = self.chunks = self.body_bytes = self.discarded = 0
        if self.phase == IDLE:
            self.phase, self.phase_start_time, self.head_bytes = HEAD, self.loop.time(), 0

    def on_url(self, url: bytes) -> None:
        """Handle a chunk of the URL. Raises Refusal, 414, if the URL is too long."""
        super().on_url(url)
        if len(self.url) > self.limits.head // 4:
            raise Refusal(414, "too_large", "the URL is too long", f"use at most {self.limits.head // 4} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Handle one header. Raises Refusal, 431, if there are too many."""
        self.header_count += 1
        if self.header_count > self.limits.headers:
            raise Refusal(431, "too_large", "too many headers", f"send at most {self.limits.headers}")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the application. Raises Refusal, 400, for an upgrade, and for a request target that is not a path."""
        if self.parser.should_upgrade():  # type: ignore[union-attr]
            hint = "send a normal request"
            raise Refusal(400, "bad_request", "connection upgrades and proxy requests are not supported", hint)
        if not _TARGET.fullmatch(self.url):
            raise Refusal(400, "bad_request", "invalid URL", "request a path such as /v1/predict")
        super().on_headers_complete()
        self.phase, self.phase_start_time = BODY, self.loop.time()

    def on_chunk_header(self) -> None:
        """Count a chunk. Raises Refusal, 413, for too many small chunks: a million one-byte chunks would delay all
        other requests."""
        self.chunks += 1
        if self.chunks > MAX_TINY_CHUNKS + self.body_bytes // 16:
            raise Refusal(413, "too_large", "too many small chunks", "send larger chunks")

    def on_body(self, body: bytes) -> None:
        """Handle a chunk of the body, which is discarded if the response is already sent."""
        self.body_bytes += len(body)
        if self.cycle.response_complete:
            self.discard(len(body))
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Handle the end of a request. The connection then waits for the response, unless it is already sent."""
        super().on_message_complete()
        self.phase, self.phase_start_time = (IDLE if self.cycle.response_complete else ANSWERING), self.loop.time()

    def on_response_complete(self) -> None:
        """Handle the end of a response. The response to HEAD has no body, so its delayed head is sent here."""
        self.transport.write(b"")
        if self.phase == ANSWERING:
            self.phase = IDLE
        self.phase_start_time = self.loop.time()
        super().on_response_complete()

    # closing a connection

    def send_400_response(self, msg: str) -> None:
        """Refuse a malformed request. The parser calls this while it handles the exception of a callback."""
        error = sys.exception()
        cause = error.__context__ if error is not None else None
        self.reject(cause if isinstance(cause, Refusal) else _UNREADABLE)

    def reject(self, refusal: Refusal) -> None:
        """Take no further requests on this connection, and refuse the current one, unless it is complete or has a
        response."""
        self.deaf, cycle = True, self.cycle
        if self.phase == ANSWERING:
            cycle.keep_alive = False
        elif self.phase == BODY and cycle.response_complete:
            self.transport.close()
        elif self.phase == BODY:  # the application has the request id and responds
            cycle.scope["refusal"] = refusal  # type: ignore[typeddict-unknown-key]
            cycle.keep_alive = cycle.more_body = False
            cycle.message_event.set()
        else:
            closing = (b"connection", b"close")
            self.transport.write(self.render(refusal, secrets.token_hex(8), closing))
            self.transport.close()
            self.count_malformed(refusal.status)

    def render(self, refusal: Refusal, name: str, *extra: tuple[bytes, bytes]) -> bytes:
        """Render the complete response of a refusal, with the request id `name` and `extra` headers."""
        response = refusal_response(refusal, name)
        headers = [*self.server_state.default_headers, *response.raw_headers, *SECURITY_HEADERS, *extra]
        lines = [STATUS_LINE[refusal.status], *(b"%s: %s\r\n" % header for header in headers)]
        return b"".join([*lines, b"x-request-id: ", name.encode(), b"\r\n\r\n", bytes(response.body)])

    def sweep(self, now: float) -> None:
        """End the connection if its phase takes too long. Called several times per second with the current time
        `now`."""
        phase_seconds, limits, unsent_bytes = (
            now - self.phase_start_time,
            self.limits,
            self.transport.get_write_buffer_size(),
        )
        if not unsent_bytes:
            self.unread_since = None
        elif self.unread_since is None:
            self.unread_since = now
        elif now - self.unread_since > SEND_SECONDS + unsent_bytes / SEND_RATE:
            self.transport.abort()
        if self.transport.is_closing():
            if phase_seconds > LINGER_SECONDS and not unsent_bytes:
                self.transport.abort()
        elif self.phase == IDLE or (self.phase == HEAD and not self.head_bytes):
            if phase_seconds > (limits.idle_seconds if self.phase == IDLE else limits.head_seconds):
                self.transport.close()
        elif self.phase == HEAD and phase_seconds > limits.head_seconds:
            hint = f"send them within {limits.head_seconds:g} s"
            self.reject(Refusal(408, "too_slow", "the request headers arrived too slowly", hint))
        elif self.phase == BODY and self.cycle.response_complete and phase_seconds > limits.body_seconds:
            self.transport.close()


class LingeringTransport:
    """A transport that sends head and body of a response in one system call. `close` lets a client that is still
    sending read the response before the connection is reset."""

    def __init__(self, transport: asyncio.Transport, protocol: LimitedProtocol) -> None:
        self.transport, self.protocol, self.lingering = transport, protocol, False
        self.pending_head = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)

    def write(self, data: bytes) -> None:
        """Send data. The head of a response is delayed, and sent with the next data."""
        if data.endswith(b"\r\n\r\n") and data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 100 "):
            self.pending_head = data
        elif self.pending_head or data:
            data, self.pending_head = self.pending_head + data, b""
            self.transport.write(data)

    def is_closing(self) -> bool:
        """Return whether no further data can be sent."""
        return self.lingering or self.transport.is_closing()

    def close(self) -> None:
        """Close the connection. If the client is still sending, send EOF first and discard its data for LINGER_SECONDS,
        so that it can read the response."""
        protocol = self.protocol
        if self.is_closing():
            return
        self.write(b"")
        if (protocol.deaf or protocol.phase == BODY) and self.transport.can_write_eof():
            self.lingering = protocol.deaf = True
            protocol.phase_start_time, protocol.discarded = protocol.loop.time(), 0
            protocol.flow.resume_reading()
            self.transport.write_eof()
        else:
            self.transport.close()
