"""What the connections have in common: the model, the limits, how much is being done, and whether more may come."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import formatdate
from typing import TYPE_CHECKING

from vitreous.errors import UsageError
from vitreous.serving.http.access import Access
from vitreous.serving.http.batcher import Batcher
from vitreous.serving.http.decoders import Decoders
from vitreous.serving.http.limits import QUEUE, Limits
from vitreous.serving.http.log import Log
from vitreous.serving.http.messages import Refusal, Request, Response, short
from vitreous.serving.http.metrics import Metrics, process
from vitreous.serving.http.model import Served

if TYPE_CHECKING:
    from vitreous.serving.http.connection import Connection

MOST_DEADLINE = 600_000  # milliseconds
Handler = Callable[["Site", Request], "Response | Awaitable[Response]"]


@dataclass(frozen=True)
class Route:
    """A path and what answers it. `asks`: takes pictures, so it is refused when the queue is full. `free`: needs no
    token."""

    name: str
    method: str
    handler: Handler
    asks: bool = False
    free: bool = False


class Site:
    """One served model. `taken` counts pictures from the whole request to its answer, `held` the bytes of bodies in
    memory.

    `pace`: seconds that decoding a picture takes.
    """

    def __init__(
        self,
        served: Served,
        limits: Limits,
        access: Access,
        log: Log,
        routes: dict[str, Route],
        decoders: Decoders,
        pace: float,
    ) -> None:
        self.served, self.limits, self.access, self.log, self.routes = served, limits, access, log, routes
        self.loop, self.metrics, self.decoders = asyncio.get_running_loop(), Metrics(), decoders
        self.connections: set[Connection] = set()
        self.batcher = Batcher(
            lambda: decoders.waiting, lambda count, seconds: self.metrics.batches.add(count), served.size
        )
        self.rate = 1 / (1 / served.rate + pace)  # pictures a second, where one core both decodes and computes
        self.queue = limits.queue or max(QUEUE, math.ceil(self.rate))
        self.taken = self.held = self.reloads = 0
        self.draining = False
        self.date = formatdate(usegmt=True).encode()

    @property
    def state(self) -> str:
        """`ready`, or why not."""
        return "draining" if self.draining else "failed" if self.batcher.lost or not self.decoders.children else "ready"

    # the connections

    def came(self, connection: Connection) -> None:
        """A new connection. Where there are too many, the one that has waited longest without asking for anything
        goes."""
        if len(self.connections) >= self.limits.connections:
            waiting = [c for c in self.connections if c.state != "busy"]
            if waiting:
                min(waiting, key=lambda c: c.since).transport.abort()
            else:
                connection.transport.abort()
        self.connections.add(connection)

    def left(self, connection: Connection) -> None:
        """It is gone."""
        self.connections.discard(connection)

    async def sweep(self) -> None:
        """End what takes too long, and tell the time, four times a second."""
        while True:
            self.date = formatdate(usegmt=True).encode()
            await asyncio.sleep(0.25)
            now = self.loop.time()
            for connection in list(self.connections):
                connection.sweep(now)

    # one request

    def judge(self, request: Request) -> None:
        """Raise Refusal for a request that will not be answered, as soon as its head is there."""
        route = self.routes.get(request.path)
        if route is not None:
            request.route = route.name
        self.access.judge(request, route is None or route.free)
        if route is None:
            raise Refusal(
                404, "not_found", f"there is nothing at {short(request.path)}", "GET /openapi.json tells what there is"
            )
        if request.method != route.method and (request.method, route.method) != ("HEAD", "GET"):
            allow = b"Allow: GET, HEAD\r\n" if route.method == "GET" else b"Allow: POST\r\n"
            raise Refusal(
                405, "method_not_allowed", f"{request.method} {request.path}", f"use {route.method}", extra=allow
            )
        self.timed(request)
        if request.length is not None and request.length > self.limits.bytes:
            raise self.too_large()
        if route.method == "GET" and request.length != 0:
            raise Refusal(400, "bad_request", "a GET with a body", "leave the body out")
        if b"content-encoding" in request.headers:
            raise Refusal(
                415, "unsupported_media", "a body with a content encoding", "send the bytes of the picture as they are"
            )
        if route.asks:
            self.open_for(1)

    def timed(self, request: Request) -> None:
        """Read the deadline. Raises Refusal for one that cannot be."""
        given = request.headers.get(b"x-deadline-ms")
        if given is None:
            return
        if not (given.isdigit() and len(given) < 9 and 1 <= int(given) <= MOST_DEADLINE):
            what = f"X-Deadline-Ms: {short(given.decode('latin-1'))}"
            raise Refusal(422, "bad_parameter", what, f"it is a whole number from 1 to {MOST_DEADLINE}")
        request.deadline = request.began + int(given) / 1000

    def open_for(self, count: int) -> None:
        """Raise Refusal, 429 or 503, where there is no room for so many more pictures."""
        if self.draining:
            raise Refusal(503, "draining", "the server is shutting down", "ask another, or later", 5)
        # a form of many pictures gets its turn when nobody else waits
        if self.taken and self.taken + count > self.queue:
            retry = max(1, math.ceil(self.taken * (self.batcher.each or 1 / self.rate)))
            raise Refusal(
                429, "queue_full", f"{self.taken} pictures are waiting", "ask again after Retry-After seconds", retry
            )
        if self.held > self.limits.flight:
            raise Refusal(
                429,
                "queue_full",
                f"{self.held >> 20} MiB of pictures are waiting",
                "ask again after Retry-After seconds",
                1,
            )
        if not self.decoders.children:
            raise Refusal(503, "decoder_lost", "no process decodes pictures", "ask again later", 5)
        if lost := self.batcher.lost:
            raise Refusal(503, "failed", lost, "restart the server", 5)

    def too_large(self) -> Refusal:
        """The refusal of a body above the limit."""
        return Refusal(413, "too_large", "the body is too large", f"at most {self.limits.bytes:,} bytes")

    def grown(self, request: Request) -> None:
        """More of a body has come. Raises Refusal where it is too much, for one request or for all of them together."""
        if len(request.body) > self.limits.bytes:
            raise self.too_large()
        if self.held > self.limits.flight:
            self.open_for(0)

    @contextmanager
    def room(self, request: Request, count: int):
        """Count a request's pictures as being worked on. Raises Refusal where there is no room for them."""
        self.open_for(count)
        self.taken += count
        request.images = count
        try:
            yield
        finally:
            self.taken -= count

    def answer(self, request: Request) -> Response | Awaitable[Response]:
        """What a whole request gets: an answer, or work that becomes one. Raises Refusal, and nothing else."""
        try:
            return self.routes[request.path].handler(self, request)
        except Exception as error:
            raise self.refusal_of(error, request) from None

    async def finish(self, request: Request, work: Awaitable[Response]) -> Response:
        """Wait for the work, no longer than until its deadline; whatever goes wrong becomes an answer."""
        try:
            async with asyncio.timeout_at(request.deadline):
                return await work
        except Exception as error:
            return self.refusal_of(error, request).response(request.id)

    def refusal_of(self, error: Exception, request: Request) -> Refusal:
        """What a client is told of what went wrong; what is not its fault goes into the log."""
        if isinstance(error, Refusal):
            return error
        if isinstance(error, TimeoutError):
            return Refusal(504, "deadline", "not answered before the deadline", "ask again, with a longer one", 1)
        if isinstance(error, UsageError):
            return Refusal(422, "bad_parameter", error.message, error.hint)
        self.log.tell(event="failed", request_id=request.id, error=f"{type(error).__name__}: {str(error)[:500]}")
        if isinstance(error, MemoryError):
            return Refusal(503, "failed", "out of memory", "ask again, with a smaller picture", 5)
        return Refusal(503, "failed", "the model failed on this request", "see the server's log", 5)

    def answered(self, request: Request, status: int) -> None:
        """Count and log a request."""
        seconds = self.loop.time() - request.began
        self.metrics.answered(request.route, status, seconds)
        if status == 429:
            self.log.refused += 1
            return
        told = {"route": request.route, "status": status, "seconds": round(seconds, 4), "images": request.images}
        self.log.asked(request_id=request.id, method=request.method, path=short(request.path), **told)

    def nonsense(self, refusal: Refusal) -> None:
        """Count what was no request."""
        self.metrics.answered("none", refusal.status, 0.0)

    def told(self) -> str:
        """The metrics."""
        batcher, card = self.batcher, self.served.predictor.card
        gauges = {
            "vitreous_queue_images": self.taken,
            "vitreous_queue_limit": self.queue,
            "vitreous_held_bytes": self.held,
            "vitreous_connections": len(self.connections),
            "vitreous_ready": float(self.state == "ready"),
            **process(),
        }
        counters = {
            "vitreous_expired_total": batcher.expired,
            "vitreous_cancelled_total": batcher.cancelled,
            "vitreous_decoder_restarts_total": self.decoders.restarts,
            "vitreous_reloads_total": self.reloads,
        }
        return self.metrics.text(gauges, counters, card.name, card.version)
