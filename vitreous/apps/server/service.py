"""State of the served model: admission of requests, counters and log."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass

from vitreous.apps.server.batcher import Batcher
from vitreous.apps.server.decoders import DecoderPool
from vitreous.apps.server.model import ServedModel
from vitreous.apps.server.monitoring import ServerLog, ServerMetrics
from vitreous.apps.server.responses import Refusal, shorten_text
from vitreous.apps.server.settings import MIN_QUEUE, AccessControl, ServerLimits
from vitreous.errors import UsageError


@dataclass
class RequestInfo:
    """Server state of a request, in `scope["info"]` for handlers. Times are those of the event loop's clock.

    `length`: bytes of the body, None if unknown; `status`: 0 until a response is sent.
    """

    id: str
    began: float
    deadline: float
    route: str = "none"
    _: KW_ONLY
    images: int = 0
    length: int | None = 0
    received: int = 0
    whole: bool = False
    status: int = 0


class Service:
    """The served model with its limits and counters. `taken` counts images from the complete request to its response,
    `held` the bytes of bodies in memory. `root_path`: path of this server at a reverse proxy.

    `decode_seconds`: seconds to decode an image; `connections`: the open connections.
    """

    def __init__(
        self,
        served: ServedModel,
        limits: ServerLimits,
        access: AccessControl,
        log: ServerLog,
        *,
        decoders: DecoderPool,
        decode_seconds: float,
        connections: set,
    ) -> None:
        self.served, self.limits, self.access, self.log, self.decoders = served, limits, access, log, decoders
        self.connections, self.loop, self.metrics = (
            connections,
            asyncio.get_running_loop(),
            ServerMetrics(self.read_state),
        )
        self.batcher = Batcher(
            lambda: decoders.waiting, lambda count, seconds: self.metrics.batches.observe(count), served.batch_size
        )
        self.batcher.usual = served.step_seconds
        # images/s if one core both decodes and computes
        self.rate = 1 / (1 / served.images_per_second + decode_seconds)
        self.queue = limits.queue or max(MIN_QUEUE, math.ceil(self.rate))
        self.taken = self.held = self.reloads = 0
        self.draining = False
        self.root_path = ""

    @property
    def state(self) -> str:
        """Return `ready`, or the reason why the service is not ready."""
        return "draining" if self.draining else "failed" if self.batcher.lost or not self.decoders.children else "ready"

    @property
    def is_full(self) -> bool:
        """Return whether the queue has no space for one more image."""
        return bool(self.taken and self.taken >= self.queue) or self.held > self.limits.in_flight_bytes

    def check_capacity(self, count: int) -> None:
        """Check that the queue has space for `count` more images. Raises Refusal, 429 or 503."""
        if self.draining:
            raise Refusal(503, "draining", "the server is shutting down", "retry later, or use another server", retry=5)
        hint = "retry after Retry-After seconds"
        # a form with many images is accepted when the queue is empty
        if self.taken and self.taken + count > self.queue:
            retry = max(1, math.ceil(self.taken * (self.batcher.per_image or 1 / self.rate)))
            raise Refusal(429, "queue_full", f"{self.taken} images are queued", hint, retry=retry)
        if self.held > self.limits.in_flight_bytes:
            raise Refusal(429, "queue_full", f"{self.held >> 20} MiB of images are queued", hint, retry=1)
        if not self.decoders.children:
            raise Refusal(503, "decoder_lost", "no decoding process is running", "retry later", retry=5)
        if lost := self.batcher.lost:
            raise Refusal(503, "failed", lost, "restart the server", retry=5)

    def check_body_size(self, size: int) -> None:
        """Check the size of a body. Raises Refusal: 413 if it is too large, 429 if all bodies together are."""
        if size > self.limits.bytes:
            raise self.make_size_refusal()
        if self.held > self.limits.in_flight_bytes:
            self.check_capacity(0)

    def make_size_refusal(self) -> Refusal:
        """Make the refusal of a body above the limit."""
        return Refusal(413, "too_large", "the body is too large", f"send at most {self.limits.bytes:,} bytes")

    @contextmanager
    def admit_images(self, info: RequestInfo, count: int) -> Iterator[None]:
        """Count a request's images as in progress. Raises Refusal if the queue has no space for them."""
        self.check_capacity(count)
        self.taken += count
        info.images = count
        try:
            yield
        finally:
            self.taken -= count

    def record(self, info: RequestInfo, method: str, path: str) -> None:
        """Count and log a finished request."""
        seconds = self.loop.time() - info.began
        self.metrics.record(info.route, info.status, seconds)
        if info.status == 429:
            self.log.refused += 1
            return
        fields = {"route": info.route, "status": info.status, "seconds": round(seconds, 4), "images": info.images}
        self.log.write_request(request_id=info.id, method=method, path=shorten_text(path), **fields)

    def to_refusal(self, error: Exception, info: RequestInfo) -> Refusal:
        """Convert an exception to a refusal; errors of the server are logged."""
        if isinstance(error, Refusal):
            return error
        if isinstance(error, TimeoutError):
            return Refusal(504, "deadline", "the deadline expired", "retry with a longer deadline", retry=1)
        if isinstance(error, UsageError):
            return Refusal(422, "bad_parameter", error.message, error.hint)
        self.log.write(event="failed", request_id=info.id, error=f"{type(error).__name__}: {str(error)[:500]}")
        if isinstance(error, MemoryError):
            return Refusal(503, "failed", "out of memory", "retry with a smaller image", retry=5)
        return Refusal(503, "failed", "the model failed on this request", "see the server's log", retry=5)

    def read_state(self) -> tuple[dict[str, float], dict[str, float], dict[str, str]]:
        """Return gauges, counters and the model's labels for the metrics."""
        gauges: dict[str, float] = {
            "vitreous_queue_images": self.taken,
            "vitreous_queue_limit": self.queue,
            "vitreous_held_bytes": self.held,
            "vitreous_connections": len(self.connections),
            "vitreous_ready": float(self.state == "ready"),
        }
        counters: dict[str, float] = {
            "vitreous_expired": self.batcher.expired,
            "vitreous_cancelled": self.batcher.cancelled,
            "vitreous_decoder_restarts": self.decoders.restarts,
            "vitreous_reloads": self.reloads,
        }
        card = self.served.predictor.card
        return gauges, counters, {"name": card.name, "version": card.version}
