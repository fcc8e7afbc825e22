"""Prometheus metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
IMAGES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)


class Metrics:
    """Requests, seconds and batches; `read_state` returns gauges, counters and labels of the model when asked."""

    def __init__(self, read_state: Callable[[], tuple[dict[str, float], dict[str, float], dict[str, str]]]) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("vitreous_requests", "Requests", ("route", "status"), registry=self.registry)
        self.seconds = Histogram("vitreous_request_seconds", "Seconds", buckets=SECONDS, registry=self.registry)
        self.batches = Histogram("vitreous_batch_images", "Images", buckets=IMAGES, registry=self.registry)
        self.registry.register(StateCollector(read_state))
        ProcessCollector(registry=self.registry)

    def record(self, route: str, status: int, seconds: float) -> None:
        """Count one request; routes are names of a fixed set."""
        self.requests.labels(route, str(status)).inc()
        self.seconds.observe(seconds)

    def render(self) -> bytes:
        """Everything as text."""
        return generate_latest(self.registry)


class StateCollector(Collector):
    """Collects numbers that are read when they are asked for."""

    def __init__(self, read_state: Callable[[], tuple[dict[str, float], dict[str, float], dict[str, str]]]) -> None:
        self.read_state = read_state

    def collect(self) -> Iterator[Metric]:
        """One family for each number."""
        gauges, counters, model = self.read_state()
        for name, value in gauges.items():
            yield GaugeMetricFamily(name, name, value)
        for name, value in counters.items():
            yield CounterMetricFamily(name, name, value)
        yield InfoMetricFamily("vitreous_model", "The served model", model)

    def describe(self) -> Iterator[Metric]:
        """Nothing beforehand: the model may not be loaded yet."""
        return iter(())
