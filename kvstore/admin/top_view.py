"""What one look of `cachalot top` shows: rows, lines and JSON, from values. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..client import NodeReport
from .cluster_status import ClusterStatus, NodeStatus, summarise
from .node_rates import NodeRates, NodeTotals, add_up_rates, rate_between, total_of
from .quantities import format_ratio, format_size
from .worker_status import WorkersStatus

COLUMNS = (
    "node",
    "state",
    "fill",
    "blocks",
    "match/s",
    "hits",
    "read/s",
    "written/s",
    "evicted/s",
    "refused/s",
    "worker",
)
LEFT_COLUMNS = frozenset({"node", "state", "worker"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """All nodes at one moment. `at_s` is of a monotonic clock."""

    at_s: float
    reports: Sequence[NodeReport]
    status: ClusterStatus
    workers: WorkersStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class TopFrame:
    """What happened between two looks, and how things stood at the second."""

    status: ClusterStatus
    workers: WorkersStatus
    elapsed_s: float
    rates: dict[str, NodeRates | None]
    """By node."""
    total: NodeRates | None


def compare_looks(before: Look, after: Look) -> TopFrame:
    """The frame between two looks at the same cluster."""
    elapsed_s = after.at_s - before.at_s
    old = {report.node: total_of(report) for report in before.reports}
    pairs: dict[str, tuple[NodeTotals | None, NodeTotals | None]] = {
        report.node: (old.get(report.node), total_of(report)) for report in after.reports
    }
    return TopFrame(
        status=after.status,
        workers=after.workers,
        elapsed_s=elapsed_s,
        rates={node: rate_between(*pair, elapsed_s) for node, pair in pairs.items()},
        total=add_up_rates(list(pairs.values()), elapsed_s),
    )


def render_rows(frame: TopFrame) -> list[list[str]]:
    """A row for each node and one for all, in the order of COLUMNS."""
    rows = [
        _render_node(node, frame.rates.get(node.node), frame.workers.state_of(node.node).value)
        for node in frame.status.nodes
    ]
    # A sum over nodes would count each block as often as it has shards.
    rows.append(["all", "", "", "", *_render_rates(frame.total), ""])
    return rows


def _render_node(node: NodeStatus, rates: NodeRates | None, worker: str) -> list[str]:
    return [
        node.node,
        node.state,
        "-" if node.fill_ratio is None else format_ratio(node.fill_ratio),
        "-" if node.blocks is None else str(node.blocks),
        *_render_rates(rates),
        worker,
    ]


def _render_rates(rates: NodeRates | None) -> list[str]:
    if rates is None:
        return ["-"] * 6
    hits = rates.match_hit_ratio
    return [
        f"{rates.match_keys_per_s:.0f}",
        "-" if hits is None else format_ratio(hits),
        format_size(round(rates.read_bytes_per_s)),
        format_size(round(rates.written_bytes_per_s)),
        f"{rates.evicted_per_s:.0f}",
        f"{rates.full_refusals_per_s:.0f}",
    ]


def render_lines(frame: TopFrame) -> list[str]:
    """What stands below the table."""
    return [frame.workers.redundancy.describe(), frame.workers.describe(), summarise(frame.status)]


def render_json(frame: TopFrame) -> dict[str, Any]:
    """One line of `cachalot top --json`."""
    return {
        "cluster": frame.status.cluster,
        "elapsed_s": round(frame.elapsed_s, 3),
        "nodes_alive": frame.status.nodes_alive,
        "nodes_total": len(frame.status.nodes),
        "redundancy": frame.workers.redundancy.render_json(),
        "workers": frame.workers.describe(),
        "summary": summarise(frame.status),
        "total": None if frame.total is None else frame.total.render_json(),
        "nodes": [_node_json(frame, node) for node in frame.status.nodes],
    }


def _node_json(frame: TopFrame, node: NodeStatus) -> dict[str, Any]:
    rates = frame.rates.get(node.node)
    return {
        "node": node.node,
        "is_alive": node.is_alive,
        "targets_lost": node.lost_targets,
        "fill_ratio": node.fill_ratio,
        "blocks": node.blocks,
        "worker": frame.workers.state_of(node.node).value,
        "rates": None if rates is None else rates.render_json(),
    }
