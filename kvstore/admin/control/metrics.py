"""Metrics in the Prometheus text format: what docs/metrics.md lists, and no more.

`metric_table.METRICS` is the one source of names, labels and help texts: the exposition, the
document, the dashboard and the alert rules are all checked against it. Nothing is counted here; the
figures are those of the node and of its worker at the moment of asking.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest, metrics_core
from prometheus_client.registry import Collector

from .metric_readers import Distribution, MetricSources, Reading
from .metric_table import METRICS, MetricHead

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def render_metrics(sources: MetricSources) -> bytes:
    """All metrics of one node as Prometheus reads them; its Content-Type is CONTENT_TYPE.

    A metric for which the sources have no figure is named with its help, and has no sample.
    """
    found = ((metric, metric.read(sources)) for metric in METRICS)
    return render_readings(("node", sources.node), found)


def render_readings(
    who: tuple[str, str], found: Iterable[tuple[MetricHead, Iterable[Reading]]]
) -> bytes:
    """Metrics with their samples in the same format; `who`: name and value of the first label."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_ReadingsCollector(who, found))
    return generate_latest(registry)


class _ReadingsCollector(Collector):
    """Makes a family of each metric. For one rendering."""

    def __init__(
        self, who: tuple[str, str], found: Iterable[tuple[MetricHead, Iterable[Reading]]]
    ) -> None:
        self._label, self._name = who
        self._found = found

    def collect(self) -> Iterator[metrics_core.Metric]:
        for metric, readings in self._found:
            family = _make_family(metric, self._label)
            for reading in readings:
                _add(family, (self._name, *reading.labels), reading)
            yield family


def _make_family(metric: MetricHead, label: str) -> metrics_core.Metric:
    labels = (label, *metric.labels)
    if metric.kind == "counter":
        return metrics_core.CounterMetricFamily(metric.name, metric.help, labels=labels)
    if metric.kind == "gauge":
        return metrics_core.GaugeMetricFamily(metric.name, metric.help, labels=labels)
    return metrics_core.HistogramMetricFamily(metric.name, metric.help, labels=labels)


def _add(family: metrics_core.Metric, labels: tuple[str, ...], reading: Reading) -> None:
    if isinstance(reading, Distribution):
        assert isinstance(family, metrics_core.HistogramMetricFamily)
        buckets = [
            (_bound(bound), count)
            for bound, count in zip(reading.bounds, reading.cumulative, strict=True)
        ]
        family.add_metric(labels, buckets=buckets, sum_value=reading.total)
        return
    assert isinstance(family, metrics_core.CounterMetricFamily | metrics_core.GaugeMetricFamily)
    family.add_metric(labels, reading.value)


def _bound(bound: float) -> str:
    return "+Inf" if bound == float("inf") else repr(bound)
