"""uvicorn's HTTP/1.1 protocol with limits on everything that a client can make last or grow.

The application judges a request as soon as its head is there and may answer before the body has come. What is left of
a short body is then discarded, so that the connection can be used again; before a long one the connection closes, after
a moment in which the client can read why. A request that arrives before the one ahead of it is answered is not taken:
the connection closes after that answer.
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

MAX_DISCARDED_BYTES = 2**20  # bytes of a refused request's body that are read and thrown away
LINGER_SECONDS = 2.0  # seconds that a client has to read the last answer of a connection
SEND_SECONDS, SEND_RATE = 10.0, 10_000.0  # a client has so long to read an answer, and a second for so many bytes
MAX_TINY_CHUNKS = 4096  # chunks of a body that may be tiny; beyond them there are at least 16 bytes each
_TARGET = re.compile(rb"/[!-~]*")
_UNREADABLE = Refusal(400, "bad_request", "this is no HTTP/1.1 request", "let an HTTP library make it")

IDLE, HEAD, BODY, ANSWERING = "idle", "head", "body", "answering"


class LimitedProtocol(HttpToolsProtocol):
    """One connection. `phase`: it waits for a request, for its head, for its body, or for the answer; `since` then.

    `count_malformed` is called with the status of what was no request; `refuse_full` gives the refusal and the id of a
    request for which there is no room.
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
        self.phase, self.since = HEAD, self.loop.time()
        self.head_bytes = self.header_count = self.chunks = self.body_bytes = self.discarded = 0
        self.deaf = False  # nothing that comes is taken for a request any more
        self.unread_since: float | None = None  # when a client began not to read what it is sent

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Register a connection; above the limit, close the one that has been without a request for longest."""
        if len(self.connections) >= self.limits.connections:
            waiting = [c for c in self.connections if isinstance(c, LimitedProtocol) and c.phase != ANSWERING]
            (min(waiting, key=lambda c: c.since).transport if waiting else transport).abort()
        super().connection_made(LingeringTransport(transport, self))  # type: ignore[arg-type]
        transport.max_size = 2**16  # type: ignore[attr-defined]  # of one read: a short turn for everybody

    def data_received(self, data: bytes) -> None:
        """Parse; discard what follows the end of the conversation."""
        if self.deaf:
            self.discard(len(data))
            return
        if self.phase == IDLE:
            self.phase, self.since, self.head_bytes = HEAD, self.loop.time(), 0
        if self.phase == HEAD:
            self.head_bytes += len(data)
        super().data_received(data)
        if self.phase == HEAD and self.head_bytes > self.limits.head and not self.deaf:
            hint = f"at most {self.limits.head} bytes"
            self.reject(Refusal(431, "too_large", "the head of the request is too long", hint))

    def discard(self, size: int) -> None:
        """Count bytes that are thrown away; beyond the limit, stop reading and close."""
        self.discarded += size
        if self.discarded > MAX_DISCARDED_BYTES:
            self.flow.pause_reading() if self.transport.is_closing() else self.transport.close()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Start the application; but a request for which there is no room is refused here, without a task."""
        refused = self.refuse_full(cycle.scope) if cycle.keep_alive else None
        if refused is None:
            super()._start_asgi_task(cycle, app)
            return
        self.transport.write(self.render(*refused))
        cycle.response_started = cycle.response_complete = True
        self.on_response_complete()

    # callbacks of the parser; an exception in one of them ends up in send_400_response

    def on_message_begin(self) -> None:
        """The first byte of a request. Raises Refusal for one that does not wait for the answer before it."""
        if self.phase in (BODY, ANSWERING):
            raise _UNREADABLE
        super().on_message_begin()
        self.header_count = self.chunks = self.body_bytes = self.discarded = 0
        if self.phase == IDLE:
            self.phase, self.since, self.head_bytes = HEAD, self.loop.time(), 0

    def on_url(self, url: bytes) -> None:
        """A piece of the target. Raises Refusal, 414."""
        super().on_url(url)
        if len(self.url) > self.limits.head // 4:
            raise Refusal(414, "too_large", "the address is too long", f"at most {self.limits.head // 4} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header. Raises Refusal, 431."""
        self.header_count += 1
        if self.header_count > self.limits.headers:
            raise Refusal(431, "too_large", "too many headers", f"at most {self.limits.headers}")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the application. Raises Refusal, 400, for an upgrade and a target that is no path."""
        if self.parser.should_upgrade():  # type: ignore[union-attr]
            hint = "send an ordinary request"
            raise Refusal(400, "bad_request", "no upgrade of the connection, and no proxy", hint)
        if not _TARGET.fullmatch(self.url):
            raise Refusal(400, "bad_request", "an address that cannot be", "ask for a path, as in /v1/predict")
        super().on_headers_complete()
        self.phase, self.since = BODY, self.loop.time()

    def on_chunk_header(self) -> None:
        """One more chunk. Raises Refusal, 413: a million of a byte each would keep everybody else waiting."""
        self.chunks += 1
        if self.chunks > MAX_TINY_CHUNKS + self.body_bytes // 16:
            raise Refusal(413, "too_large", "too many small chunks", "send larger ones")

    def on_body(self, body: bytes) -> None:
        """A piece of the body, discarded where the answer is already sent."""
        self.body_bytes += len(body)
        if self.cycle.response_complete:
            self.discard(len(body))
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is whole."""
        super().on_message_complete()
        self.phase, self.since = (IDLE if self.cycle.response_complete else ANSWERING), self.loop.time()

    def on_response_complete(self) -> None:
        """The answer is on its way; that to HEAD is a head alone."""
        self.transport.write(b"")
        if self.phase == ANSWERING:
            self.phase = IDLE
        self.since = self.loop.time()
        super().on_response_complete()

    # the ends of a connection

    def send_400_response(self, msg: str) -> None:
        """Refuse what the parser could not read; called while its error is handled."""
        error = sys.exception()
        cause = error.__context__ if error is not None else None
        self.reject(cause if isinstance(cause, Refusal) else _UNREADABLE)

    def reject(self, refusal: Refusal) -> None:
        """Read no further; refuse the request that has begun, unless it is whole or answered."""
        self.deaf, cycle = True, self.cycle
        if self.phase == ANSWERING:
            cycle.keep_alive = False
        elif self.phase == BODY and cycle.response_complete:
            self.transport.close()
        elif self.phase == BODY:  # the application has the request's id, and answers
            cycle.scope["refusal"] = refusal  # type: ignore[typeddict-unknown-key]
            cycle.keep_alive = cycle.more_body = False
            cycle.message_event.set()
        else:
            closing = (b"connection", b"close")
            self.transport.write(self.render(refusal, secrets.token_hex(8), closing))
            self.transport.close()
            self.count_malformed(refusal.status)

    def render(self, refusal: Refusal, name: str, *extra: tuple[bytes, bytes]) -> bytes:
        """The whole response of a refusal, under the request's id."""
        response = refusal_response(refusal, name)
        headers = [*self.server_state.default_headers, *response.raw_headers, *SECURITY_HEADERS, *extra]
        lines = [STATUS_LINE[refusal.status], *(b"%s: %s\r\n" % header for header in headers)]
        return b"".join([*lines, b"x-request-id: ", name.encode(), b"\r\n\r\n", bytes(response.body)])

    def sweep(self, now: float) -> None:
        """End whatever takes too long; called several times a second."""
        waited, limits, unsent = now - self.since, self.limits, self.transport.get_write_buffer_size()
        if not unsent:
            self.unread_since = None
        elif self.unread_since is None:
            self.unread_since = now
        elif now - self.unread_since > SEND_SECONDS + unsent / SEND_RATE:
            self.transport.abort()
        if self.transport.is_closing():
            if waited > LINGER_SECONDS and not unsent:
                self.transport.abort()
        elif self.phase == IDLE or (self.phase == HEAD and not self.head_bytes):
            if waited > (limits.idle_seconds if self.phase == IDLE else limits.head_seconds):
                self.transport.close()
        elif self.phase == HEAD and waited > limits.head_seconds:
            hint = f"at most {limits.head_seconds:g} s"
            self.reject(Refusal(408, "too_slow", "the head of the request took too long", hint))
        elif self.phase == BODY and self.cycle.response_complete and waited > limits.body_seconds:
            self.transport.close()


class LingeringTransport:
    """A transport that sends the head of a response together with its body, in one system call, and whose `close` lets
    a client that is still sending read the response before a reset could."""

    def __init__(self, transport: asyncio.Transport, protocol: LimitedProtocol) -> None:
        self.transport, self.protocol, self.lingering = transport, protocol, False
        self.head = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)

    def write(self, data: bytes) -> None:
        """Send; hold back a head until the piece that follows it."""
        if data.endswith(b"\r\n\r\n") and data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 100 "):
            self.head = data
        elif self.head or data:
            data, self.head = self.head + data, b""
            self.transport.write(data)

    def is_closing(self) -> bool:
        """Whether no more is sent."""
        return self.lingering or self.transport.is_closing()

    def close(self) -> None:
        """Close now, or once the client has had time to read."""
        protocol = self.protocol
        if self.is_closing():
            return
        self.write(b"")
        if (protocol.deaf or protocol.phase == BODY) and self.transport.can_write_eof():
            self.lingering = protocol.deaf = True
            protocol.since, protocol.discarded = protocol.loop.time(), 0
            protocol.flow.resume_reading()
            self.transport.write_eof()
        else:
            self.transport.close()
