"""Asks the node and its worker for what the metrics are made from."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ... import wire
from ...client.statistics import read_statistics
from ...errors import NodeError
from ...metrics.readings import read_mapping
from .handle import WorkerHandle
from .metric_readers import MetricSources

log = logging.getLogger(__name__)

STAT_DEADLINE_S = 2.0
"""Shorter than the ten seconds after which Prometheus gives up a scrape."""
REPORT_KINDS = ("redundancy", "scrub")


async def gather_sources(handle: WorkerHandle) -> MetricSources:
    """The figures as they are now. A node that does not answer costs STAT_DEADLINE_S."""
    described = handle.describe()
    code = handle.map.code
    reports = {kind: handle.report(kind) for kind in REPORT_KINDS}
    return MetricSources(
        node=handle.node,
        node_stat=await _ask_stat(handle),
        policy=handle.policy.to_values(),
        worker=described,
        counters=read_mapping(described.get("counters")),
        usage=read_mapping(described.get("usage")),
        backlog=read_mapping(described.get("backlog")),
        reports={kind: report for kind, report in reports.items() if report is not None},
        # A fetch asks one node more than it needs, where there is one.
        shards_per_fetch=code.k + min(code.m, 1),
        now_s=handle.now_s(),
    )


async def _ask_stat(handle: WorkerHandle) -> Mapping[str, Any] | None:
    try:
        body = await handle.ask(handle.node, wire.Op.STAT, deadline_s=STAT_DEADLINE_S)
        return read_statistics(handle.node, body)
    except NodeError as error:
        log.warning("metrics without figures of the node: %s", error)
        return None
