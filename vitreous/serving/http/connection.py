"""One connection: HTTP/1.1 by the parser of Node.js (llhttp), with a limit on everything that a client can make last or
grow.

A request is judged as soon as its head is there. A refusal is sent at once and costs no task: a short body is read and
thrown away, so that the connection can be used again; before a long one the connection closes, after a moment in which
the client can read why. A request that arrives before the one ahead of it is answered closes the connection after that
answer.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Awaitable
from typing import TYPE_CHECKING
from urllib.parse import unquote_to_bytes

import httptools

from vitreous.serving.http.messages import Refusal, Request, Response

if TYPE_CHECKING:
    from vitreous.serving.http.site import Site

DISCARD = 2**20  # bytes of a refused request's body that are read and thrown away
LINGER = 2.0  # seconds that a client has to read the last answer of a connection
SEND_SECONDS, SEND_RATE = 10.0, 10_000.0  # a reader of an answer has so long, and for a long answer bytes a second
GONE = 499  # what the log has for the status of a request whose client left
CHUNKS = 4096  # pieces of a chunked body that may be tiny; beyond them there are at least 16 bytes each
_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_TARGET = re.compile(rb"[!-~]+")
_SINGLE = (
    b"host",
    b"content-type",
    b"content-length",
    b"authorization",
    b"origin",
    b"x-deadline-ms",
    b"content-encoding",
)

IDLE, HEAD, BODY, BUSY, LAST = "idle", "head", "body", "busy", "last"


class Connection(asyncio.Protocol):
    """What the client does, and since when. `state`: waits for a request, for its head or body, for the answer, or for
    the end."""

    def __init__(self, site: Site) -> None:
        self.site, self.limits, self.loop = site, site.limits, site.loop
        self.state, self.since = IDLE, self.loop.time()
        self.parser = httptools.HttpRequestParser(self)
        self.request: Request | None = None
        self.task: asyncio.Task[None] | None = None
        self.served = self.size = self.discarded = 0
        self.refused = self.surplus = False
        # when an answer was sent that is not read yet, and how long that may take
        self.sent: tuple[float, float] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client came."""
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]
        self.transport.set_write_buffer_limits(high=0)
        self.transport.max_size = 2**16  # type: ignore[attr-defined]  # of one read: a short turn for everybody
        self.site.came(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """It left: whatever is done for it is not wanted any more."""
        self.site.left(self)
        if self.request is not None:
            self.site.held -= len(self.request.body)
            self.request.gone = True
            if not self.refused:
                self.site.answered(self.request, GONE)
            self.request = None
        if self.task is not None:
            self.task.cancel()

    def data_received(self, data: bytes) -> None:
        """Some bytes."""
        if self.state is LAST or self.surplus:
            self.discarded += len(data)
            if self.discarded > DISCARD:
                self.transport.pause_reading()
            return
        if self.state is IDLE:
            self.state, self.size = HEAD, 0
            if self.served:  # a new connection has had its time since it came
                self.since = self.loop.time()
        if self.state is HEAD:
            self.size += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self.hang_up()
        except httptools.HttpParserError as error:
            if self.state is BUSY:  # what follows a whole request is not its fault
                self.surplus = True
            elif self.state is not LAST:
                self.fail(error.__context__ if isinstance(error.__context__, Refusal) else _UNREADABLE)
        if self.state is HEAD and self.size > self.limits.head:
            self.fail(
                Refusal(431, "too_large", "the head of the request is too long", f"at most {self.limits.head} bytes")
            )

    # what the parser finds

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        if self.request is not None:
            self.surplus = True
            return
        self.target, self.headers, self.count, self.chunks, self.refused = bytearray(), {}, 0, 0, False
        if self.state is IDLE:
            self.state, self.since, self.size = HEAD, self.loop.time(), 0

    def on_url(self, url: bytes) -> None:
        """A piece of the target."""
        if self.surplus:
            return
        self.target += url
        if len(self.target) > self.limits.head // 4:
            raise Refusal(414, "too_large", "the address is too long", f"at most {self.limits.head // 4} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        if self.surplus:
            return
        self.count += 1
        if self.count > self.limits.headers:
            raise Refusal(431, "too_large", "too many headers", f"at most {self.limits.headers}")
        name = name.lower()
        if name in self.headers and name in _SINGLE:
            raise Refusal(400, "bad_request", f"two headers {name.decode('latin-1')}", "send one")
        self.headers[name] = value

    def on_headers_complete(self) -> None:
        """The head is whole: judge it."""
        if self.surplus:
            return
        request = self.request = self.head()
        self.state, self.since = BODY, self.loop.time()
        try:
            if self.parser.should_upgrade():
                raise Refusal(
                    400, "bad_request", "no upgrade of the connection, and no proxy", "send an ordinary request"
                )
            self.site.judge(request)
        except Refusal as refusal:
            request.keep = request.keep and refusal.status != 400  # who knows what would follow
            self.refuse(refusal)
            return
        if request.headers.get(b"expect", b"").lower() == b"100-continue":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def head(self) -> Request:
        """The request without its body. Raises Refusal for a target or a version that cannot be."""
        headers, now = self.headers, self.loop.time()
        given = headers.get(b"x-request-id", b"")
        name = given.decode() if _ID.fullmatch(given) else secrets.token_hex(8)
        path, _, query = bytes(self.target).partition(b"?")
        method, version = self.parser.get_method().decode("latin-1"), self.parser.get_http_version()
        length = int(headers[b"content-length"]) if b"content-length" in headers else None
        if b"transfer-encoding" not in headers and length is None:
            length = 0
        request = Request(
            method, bytes(self.target), "", headers, name, now, now + self.limits.deadline, query, length=length
        )
        request.keep = version == "1.1" and self.parser.should_keep_alive()
        self.request = request
        if version not in ("1.0", "1.1"):
            raise Refusal(400, "bad_request", f"HTTP/{version}", "speak HTTP/1.1")
        if not _TARGET.fullmatch(self.target) or not path.startswith(b"/"):
            raise Refusal(400, "bad_request", "an address that cannot be", "ask for a path, as in /v1/predict")
        try:
            request.path = unquote_to_bytes(path).decode("utf-8")
        except UnicodeDecodeError:
            raise Refusal(
                400, "bad_request", "an address that is no UTF-8", "ask for a path, as in /v1/predict"
            ) from None
        return request

    def on_chunk_header(self) -> None:
        """One more chunk: a million of a byte each would keep everybody else waiting."""
        self.chunks += 1
        if self.chunks > CHUNKS and self.request is not None and self.chunks > CHUNKS + len(self.request.body) // 16:
            raise Refusal(413, "too_large", "too many small chunks", "send larger ones")

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        request = self.request
        if self.surplus or request is None:
            return
        if self.refused:
            self.discarded += len(body)
            if self.discarded > DISCARD:
                self.hang_up()
            return
        request.body += body
        self.site.held += len(body)
        try:
            self.site.grown(request)
        except Refusal as refusal:
            self.refuse(refusal)

    def on_message_complete(self) -> None:
        """The request is whole."""
        request = self.request
        if self.surplus or request is None:
            return
        if self.refused:
            self.forget()
            return
        request.whole, self.state, self.since = True, BUSY, self.loop.time()
        try:
            response = self.site.answer(request)
        except Refusal as refusal:
            self.refuse(refusal)
            return
        if isinstance(response, Response):
            self.send(response)
        else:
            self.task = self.loop.create_task(self.later(request, response))

    async def later(self, request: Request, work: Awaitable[Response]) -> None:
        """Send what becomes of a request."""
        response = await self.site.finish(request, work)
        self.task = None
        if self.request is not None:
            self.send(response)

    # what is sent

    def send(self, response: Response) -> None:
        """The answer to the request; the next one may come, or the connection ends."""
        request = self.request
        assert request is not None
        keep = request.keep and not self.surplus and not self.site.draining
        self.write(response, keep, request.id)
        self.site.answered(request, response.status)
        request.keep = keep
        if request.whole:
            self.forget()

    def write(self, response: Response, keep: bool, name: str) -> None:
        """Put an answer on its way."""
        request = self.request
        text = response.encoded(name, keep, self.site.date, request is not None and request.method == "HEAD")
        self.transport.write(text)
        if self.transport.get_write_buffer_size():
            self.sent = (self.loop.time(), SEND_SECONDS + len(text) / SEND_RATE)

    def refuse(self, refusal: Refusal) -> None:
        """Answer before the request is whole, or without a task."""
        request = self.request
        assert request is not None
        self.refused, self.discarded = True, 0
        if not request.whole:
            rest = DISCARD + 1 if request.length is None else request.length - len(request.body)
            request.keep = request.keep and rest <= DISCARD and b"expect" not in request.headers
        self.site.held -= len(request.body)
        request.body = bytearray()
        self.send(refusal.response(request.id))
        if not request.whole and not request.keep:
            self.hang_up()

    def fail(self, refusal: Refusal) -> None:
        """What came is no request, or takes too long: say so and end the connection."""
        if self.request is None:
            self.site.nonsense(refusal)
        if self.request is not None and not self.refused:
            self.request.keep = False
            self.refuse(refusal)
            return
        if self.request is None:
            name = secrets.token_hex(8)
            self.write(refusal.response(name), False, name)
        self.hang_up()

    def forget(self) -> None:
        """A request is over: wait for the next, or end."""
        request, self.request = self.request, None
        assert request is not None
        self.site.held -= len(request.body)
        self.served += 1
        if not request.keep:
            self.hang_up()
        if self.state is LAST:
            self.transport.close()
        else:
            self.state, self.since, self.discarded = IDLE, self.loop.time(), 0

    def hang_up(self) -> None:
        """No more requests: end once the last answer is sent, leaving the client a moment to read it before a reset
        could."""
        if self.state is LAST:
            return
        unread = self.surplus or (self.request is not None and not self.request.whole)
        self.state, self.since = LAST, self.loop.time()
        if unread and not self.transport.is_closing() and self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()

    def pause_writing(self) -> None:
        """The client does not read as fast as it is written to: no more requests from it until it has."""

    def resume_writing(self) -> None:
        """The client has read its answer."""
        self.sent = None

    def sweep(self, now: float) -> None:
        """Called several times a second: end what takes too long."""
        waited, limits = now - self.since, self.limits
        if self.sent is not None and now - self.sent[0] > self.sent[1]:
            self.transport.abort()
        elif self.state is LAST:
            if waited > LINGER and self.sent is None:
                self.transport.abort()
        elif self.state is IDLE:
            if waited > (limits.idle_seconds if self.served else limits.head_seconds):
                self.hang_up()
        elif self.state is HEAD:
            if waited > limits.head_seconds:
                self.fail(
                    Refusal(
                        408, "too_slow", "the head of the request took too long", f"at most {limits.head_seconds:g} s"
                    )
                )
        elif self.state is BODY and self.request is not None:
            got = self.discarded if self.refused else len(self.request.body)
            if now > self.request.deadline or (waited > limits.body_seconds and got < limits.body_rate * waited):
                self.fail(
                    Refusal(
                        408, "too_slow", "the body came too slowly", f"at least {limits.body_rate:,.0f} bytes a second"
                    )
                )


_UNREADABLE = Refusal(400, "bad_request", "this is no HTTP/1.1 request", "let an HTTP library make it")
