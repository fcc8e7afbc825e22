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

    `body_bytes`: bytes of the body, None if unknown; `status`: 0 until a response is sent.
    """

    id: str
    start_time: float
    deadline: float
    route: str = "none"
    _: KW_ONLY
    images: int = 0
    body_bytes: int | None = 0
    received_bytes: int = 0
    is_body_complete: bool = False
    status: int = 0


class Service:
    """The served model with its limits and counters. `images_in_flight` counts images from the complete request to its
    response, `body_bytes_in_memory` the bytes of bodies in memory. `root_path`: path of this server at a reverse proxy.

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
        self.batcher.batch_seconds = served.step_seconds
        # images/s if one core both decodes and computes
        self.images_per_second = 1 / (1 / served.images_per_second + decode_seconds)
        self.queue_limit = limits.queue or max(MIN_QUEUE, math.ceil(self.images_per_second))
        self.images_in_flight = self.body_bytes_in_memory = self.reloads = 0
        self.draining = False
        self.root_path = ""

    @property
    def state(self) -> str:
        """Return `ready`, or the reason why the service is not ready."""
        return (
            "draining"
            if self.draining
            else "failed"
            if self.batcher.get_failure_reason or not self.decoders.children
            else "ready"
        )

    @property
    def is_full(self) -> bool:
        """Return whether the queue has no space for one more image."""
        return (
            bool(self.images_in_flight and self.images_in_flight >= self.queue_limit)
            or self.body_bytes_in_memory > self.limits.in_flight_bytes
        )

    def check_capacity(self, count: int) -> None:
        """Check that the queue has space for `count` more images. Raises Refusal, 429 or 503."""
        if self.draining:
            raise Refusal(503, "draining", "the server is shutting down", "retry later, or use another server", retry=5)
        hint = "retry after Retry-After seconds"
        # a form with many images is accepted when the queue is empty
        if self.images_in_flight and self.images_in_flight + count > self.queue_limit:
            retry = max(1, math.ceil(self.images_in_flight * (self.batcher.per_image or 1 / self.images_per_second)))
            raise Refusal(429, "queue_full", f"{self.images_in_flight} images are queued", hint, retry=retry)
        if self.body_bytes_in_memory > self.limits.in_flight_bytes:
            raise Refusal(
                429, "queue_full", f"{self.body_bytes_in_memory >> 20} MiB of images are queued", hint, retry=1
            )
        if not self.decoders.children:
            raise Refusal(503, "decoder_lost", "no decoding process is running", "retry later", retry=5)
        if lost := self.batcher.get_failure_reason:
            raise Refusal(503, "failed", lost, "restart the server", retry=5)

    def check_body_size(self, size: int) -> None:
        """Check the size of a body. Raises Refusal: 413 if it is too large, 429 if all bodies together are."""
        if size > self.limits.bytes:
            raise self.make_size_refusal()
        if self.body_bytes_in_memory > self.limits.in_flight_bytes:
            self.check_capacity(0)

    def make_size_refusal(self) -> Refusal:
        """Make the refusal of a body above the limit."""
        return Refusal(413, "too_large", "the body is too large", f"send at most {self.limits.bytes:,} bytes")

    @contextmanager
    def admit_images(self, info: RequestInfo, count: int) -> Iterator[None]:
        """Count a request's images as in progress. Raises Refusal if the queue has no space for them."""
        self.check_capacity(count)
        self.images_in_flight += count
        info.images = count
        try:
            yield
        finally:
            self.images_in_flight -= count

    def record(self, info: RequestInfo, method: str, path: str) -> None:
        """Count and log a finished request."""
        seconds = self.loop.time() - info.start_time
        self.metrics.record(info.route, info.status, seconds)
        if info.status == 429:
            self.log.num_refused += 1
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
            "vitreous_queue_images": self.images_in_flight,
            "vitreous_queue_limit": self.queue_limit,
            "vitreous_held_bytes": self.body_bytes_in_memory,
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
