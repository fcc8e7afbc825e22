"""The table of metrics that the command line, files and pages use."""

from __future__ import annotations

import pytest

from vitreous.cli.console import format_split_metrics
from vitreous.reports.pages.formats import PERCENT_METRICS, format_metric_value
from vitreous.reports.pages.metric_terms import explain_metric
from vitreous.tasks.metrics import METRICS
from vitreous.tasks.report import Report


@pytest.mark.parametrize("metric", METRICS.values(), ids=lambda metric: metric.key)
def test_every_metric_is_complete(metric):
    assert METRICS[metric.key] is metric and explain_metric(metric.key)
    assert all(key in METRICS for key in metric.secondary or ())
    assert (metric.key in PERCENT_METRICS) == metric.is_share
    assert format(0.5, metric.format_spec) and format_metric_value(metric.key, 0.5)


def test_labels_are_distinct():
    labels = [metric.label for metric in METRICS.values()]
    assert len(set(labels)) == len(labels)


@pytest.mark.parametrize("metric", [m for m in METRICS.values() if m.is_primary], ids=lambda metric: metric.key)
def test_the_primary_metric_is_printed_before_secondary_metrics(metric):
    values = dict.fromkeys((metric.key, *metric.secondary), 0.25)
    report = Report(3, 0, values, dict.fromkeys(values), [], None, metric.key)
    text = format_split_metrics("val", report.summary())
    positions = [text.index(f"{METRICS[key].label} {0.25:{METRICS[key].format_spec}}") for key in values]
    assert text.startswith(f"val: {metric.label} ") and positions == sorted(positions)
    assert report.headline_text.startswith(metric.label)
