"""The server's log (JSON lines on stderr) and its Prometheus metrics.

A thread writes the log, so that a slow reader of stderr does not delay requests.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

MAX_PENDING_LINES = 10_000  # maximum lines to write; further lines are only counted
WRITE_PERIOD = 0.1  # seconds between writes
SECONDS_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
IMAGES_BUCKETS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)


class ServerLog:
    """The log. `write_request` logs a request unless `quiet`, `write` logs an event of the server.

    Refusals because of a full queue are counted in `num_refused`, and logged once a second.
    """

    def __init__(self, quiet: bool = False, out: TextIO | None = None) -> None:
        self.quiet, self.stream = quiet, out or sys.stderr
        self.lines: deque[dict[str, Any]] = deque()
        self.num_lost_lines = self.num_refused = 0
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self.run, name="log", daemon=True)
        self.thread.start()

    def write_request(self, **fields: Any) -> None:
        """Log a request, unless `quiet`."""
        if not self.quiet:
            self.write(**fields)

    def write(self, **fields: Any) -> None:
        """Log an event of the server."""
        if len(self.lines) >= MAX_PENDING_LINES:
            self.num_lost_lines += 1
        else:
            self.lines.append({"time": round(time.time(), 3), **fields})

    def run(self) -> None:
        """Write pending lines periodically until closed. This is the thread."""
        last_written = time.monotonic()
        while not self.closed.wait(WRITE_PERIOD):
            if (self.num_refused or self.num_lost_lines) and time.monotonic() - last_written >= 1:
                last_written = time.monotonic()
                refused, lost, self.num_refused, self.num_lost_lines = self.num_refused, self.num_lost_lines, 0, 0
                self.write_request(event="refused", requests=refused, **({"lines_lost": lost} if lost else {}))
            self.flush()
        self.flush()

    def flush(self) -> None:
        """Write pending lines now."""
        lines = []
        while self.lines:
            lines.append(json.dumps(self.lines.popleft()) + "\n")  # ASCII: no name can end a line or control a terminal
        try:
            self.stream.write("".join(lines))
            self.stream.flush()
        except (OSError, ValueError):
            pass  # stderr is closed

    def close(self) -> None:
        """Write pending lines for at most a second, and end the thread."""
        self.closed.set()
        if self.thread.is_alive():
            self.thread.join(1.0)


class ServerMetrics:
    """Prometheus metrics: requests, seconds and batches. `read_state` returns the current gauges, counters, and labels
    of the model."""

    def __init__(self, read_state: Callable[[], tuple[dict[str, float], dict[str, float], dict[str, str]]]) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("vitreous_requests", "Requests", ("route", "status"), registry=self.registry)
        self.seconds = Histogram("vitreous_request_seconds", "Seconds", buckets=SECONDS_BUCKETS, registry=self.registry)
        self.batches = Histogram("vitreous_batch_images", "Images", buckets=IMAGES_BUCKETS, registry=self.registry)
        self.registry.register(StateCollector(read_state))
        ProcessCollector(registry=self.registry)

    def record(self, route: str, status: int, seconds: float) -> None:
        """Count one request. `route` is a name of a fixed set, so that the number of metrics is bounded."""
        self.requests.labels(route, str(status)).inc()
        self.seconds.observe(seconds)

    def render(self) -> bytes:
        """Render all metrics in the Prometheus text format."""
        return generate_latest(self.registry)


class StateCollector(Collector):
    """A Prometheus collector that reads the state of the server when metrics are rendered."""

    def __init__(self, read_state: Callable[[], tuple[dict[str, float], dict[str, float], dict[str, str]]]) -> None:
        self.read_state = read_state

    def collect(self) -> Iterator[Metric]:
        """Yield one metric family per gauge and per counter, and one for the model."""
        gauges, counters, model = self.read_state()
        for name, value in gauges.items():
            yield GaugeMetricFamily(name, name, value)
        for name, value in counters.items():
            yield CounterMetricFamily(name, name, value)
        yield InfoMetricFamily("vitreous_model", "The served model", model)

    def describe(self) -> Iterator[Metric]:
        """Yield no metric families in advance, since the model may not be loaded yet."""
        return iter(())
