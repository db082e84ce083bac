"""Metrics in the Prometheus text format: what docs/metrics.md lists, and no more.

`metric_table.METRICS` is the one source of names, labels and help texts: the exposition, the
document, the dashboard and the alert rules are all checked against it. Nothing is counted here; the
figures are those of the node and of its worker at the moment of asking.
"""

from __future__ import annotations

from ...metrics.exposition import render_readings
from .metric_readers import MetricSources
from .metric_table import METRICS


def render_metrics(sources: MetricSources) -> bytes:
    """All metrics of one node as Prometheus reads them.

    A metric for which the sources have no figure is named with its help, and has no sample.
    """
    found = ((metric, metric.read(sources)) for metric in METRICS)
    return render_readings(("node", sources.node), found)
