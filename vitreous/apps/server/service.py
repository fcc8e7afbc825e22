"""The service: the served model, admission of requests, counters, and the log."""

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
    """The server's state of a request, which handlers find in `scope["info"]`. Times are those of the event loop's
    clock.

    `body_bytes` is the size of the body, None if unknown. `status` is 0 until the response starts.
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
    """The served model with its limits and counters.

    `images_in_flight` counts images from the complete arrival of their request until its response is sent.
    `body_bytes_in_memory` counts bytes of request bodies. `root_path` is the path of this server at a reverse proxy.
    `decode_seconds` are the seconds to decode an image, `connections` the open connections.
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
        """Return `ready`, or why the service is not ready: `draining` or `failed`."""
        return (
            "draining"
            if self.draining
            else "failed"
            if self.batcher.get_failure_reason or not self.decoders.children
            else "ready"
        )

    @property
    def is_full(self) -> bool:
        """Return whether the queue has no space for another image."""
        return (
            bool(self.images_in_flight and self.images_in_flight >= self.queue_limit)
            or self.body_bytes_in_memory > self.limits.in_flight_bytes
        )

    def check_capacity(self, count: int) -> None:
        """Raise Refusal if the queue has no space for `count` more images (429), or if the service is not ready
        (503)."""
        if self.draining:
            raise Refusal(503, "draining", "the server is shutting down", "retry later, or use another server", retry=5)
        hint = "retry after the seconds in the header Retry-After"
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
        """Check the size of a body so far, in bytes. Raises Refusal: 413 if it is too large, 429 if all bodies in
        memory are too large together."""
        if size > self.limits.bytes:
            raise self.make_size_refusal()
        if self.body_bytes_in_memory > self.limits.in_flight_bytes:
            self.check_capacity(0)

    def make_size_refusal(self) -> Refusal:
        """Make the refusal (413) of a body above the size limit."""
        return Refusal(413, "too_large", "the body is too large", f"send at most {self.limits.bytes:,} bytes")

    @contextmanager
    def admit_images(self, info: RequestInfo, count: int) -> Iterator[None]:
        """Count a request's images as in flight within the context. Raises Refusal if the queue has no space for
        them."""
        self.check_capacity(count)
        self.images_in_flight += count
        info.images = count
        try:
            yield
        finally:
            self.images_in_flight -= count

    def record(self, info: RequestInfo, method: str, path: str) -> None:
        """Count a finished request in the metrics, and log it."""
        seconds = self.loop.time() - info.start_time
        self.metrics.record(info.route, info.status, seconds)
        if info.status == 429:
            self.log.num_refused += 1
            return
        fields = {"route": info.route, "status": info.status, "seconds": round(seconds, 4), "images": info.images}
        self.log.write_request(request_id=info.id, method=method, path=shorten_text(path), **fields)

    def to_refusal(self, error: Exception, info: RequestInfo) -> Refusal:
        """Convert an exception to a refusal. Exceptions that are not the client's fault are logged."""
        if isinstance(error, Refusal):
            return error
        if isinstance(error, TimeoutError):
            return Refusal(504, "deadline", "the deadline expired", "retry with a longer deadline", retry=1)
        if isinstance(error, UsageError):
            return Refusal(422, "bad_parameter", error.message, error.hint)
        self.log.write(event="failed", request_id=info.id, error=f"{type(error).__name__}: {str(error)[:500]}")
        if isinstance(error, MemoryError):
            return Refusal(503, "failed", "out of memory", "retry with a smaller image", retry=5)
        return Refusal(503, "failed", "the model failed on this request", "see the server's log for the cause", retry=5)

    def read_state(self) -> tuple[dict[str, float], dict[str, float], dict[str, str]]:
        """Return gauges, counters, and the labels of the model for the Prometheus metrics."""
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
