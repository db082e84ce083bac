"""Metrics in the Prometheus text format. Which there are, and where their figures come from, is for
the tables of each kind of process to say."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest, metrics_core
from prometheus_client.registry import Collector

from .readings import Distribution, MetricHead, Reading

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def render_readings(
    who: tuple[str, str], found: Iterable[tuple[MetricHead, Iterable[Reading]]]
) -> bytes:
    """Metrics with their samples; the Content-Type is CONTENT_TYPE. `who`: name and value of the
    first label of all of them."""
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
