"""What `cachalot status` shows, as data: each node's own figures, and what may still fail. Pure.

The names here are those of the JSON output; they stay as they are, more may be added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..client import NodeReport
from ..cluster.entities import ClusterMap

FIGURE_MAX = 2**63 - 1
"""Counts, bytes and seconds are whole or real numbers from 0 to this; others are not believed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """One node. Figures are None where the node did not answer; they count since its start."""

    node: str
    address: str
    is_alive: bool
    """It answered in time, and as a node of this cluster."""
    problem: str = ""
    """Why it counts as down; empty for one that is alive."""
    pid: int | None = None
    uptime_s: float | None = None
    blocks: int | None = None
    """Blocks of which it holds a shard."""
    used_bytes: int | None = None
    """Of its disk, by those shards."""
    capacity_bytes: int | None = None
    reads: int | None = None
    """READ requests."""
    shards_read: int | None = None
    rejected_shards: int | None = None
    """Stored shards that it found damaged and took out of use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    """The whole cluster."""

    cluster: str
    epoch: int
    k: int
    m: int
    nodes: tuple[NodeStatus, ...]
    spare_nodes: int
    """How many more nodes may fail before the first block is unreadable; negative: how many must
    come back until all blocks are readable. For blocks whose k + m shards were all written."""

    @property
    def nodes_alive(self) -> int:
        return sum(node.is_alive for node in self.nodes)


def describe_cluster(cluster_map: ClusterMap, reports: Sequence[NodeReport]) -> ClusterStatus:
    """The status that follows from the map and what its nodes said."""
    nodes = tuple(describe_node(report) for report in reports)
    alive = {node.node for node in nodes if node.is_alive}
    return ClusterStatus(
        cluster=cluster_map.cluster,
        epoch=cluster_map.epoch,
        k=cluster_map.code.k,
        m=cluster_map.code.m,
        nodes=nodes,
        spare_nodes=count_spare_nodes(cluster_map, alive),
    )


def count_spare_nodes(cluster_map: ClusterMap, alive: set[str]) -> int:
    """The smallest surplus of any group: targets on nodes that are alive, beyond the k needed.

    The targets of a group lie on different nodes, so each failing node costs it one at most, and
    the worst choice of nodes hits the group that has the fewest to spare.
    """
    return (
        min(
            sum(cluster_map.node_of(target).name in alive for target in group.targets)
            for group in cluster_map.groups
        )
        - cluster_map.code.k
    )


def describe_node(report: NodeReport) -> NodeStatus:
    """One node's report, summed over its targets."""
    if not report.is_alive:
        return NodeStatus(
            node=report.node, address=report.address, is_alive=False, problem=report.problem
        )
    said = report.statistics
    targets = said.get("targets") if isinstance(said, dict) else None
    try:
        if not isinstance(targets, list) or not all(isinstance(one, dict) for one in targets):
            raise _StrangeFigure
        return NodeStatus(
            node=report.node,
            address=report.address,
            is_alive=True,
            pid=_integer(said, "pid"),
            uptime_s=_seconds(said, "uptime_s"),
            blocks=_sum(targets, "blocks"),
            used_bytes=_sum(targets, "used_bytes"),
            capacity_bytes=_sum(targets, "capacity_bytes"),
            reads=_sum(targets, "reads"),
            shards_read=_sum(targets, "shards_read"),
            rejected_shards=_sum(targets, "rejected_shards"),
        )
    except _StrangeFigure:
        # Also what a later version may do: it must not look like a dead node without a reason.
        problem = "answers, but its figures are not understood"
        return NodeStatus(node=report.node, address=report.address, is_alive=False, problem=problem)


class _StrangeFigure(Exception):
    """A figure is there, but it is not one that a node can have."""


def _integer(values: Mapping[str, Any], name: str) -> int | None:
    value = values.get(name)
    if value is None:
        return None
    if type(value) is not int or not 0 <= value <= FIGURE_MAX:
        raise _StrangeFigure
    return value


def _seconds(values: Mapping[str, Any], name: str) -> float | None:
    value = values.get(name)
    if value is None:
        return None
    # Not a number and infinity, which JSON as Python reads it may hold, fail the comparison.
    if type(value) not in (int, float) or not 0 <= value <= FIGURE_MAX:
        raise _StrangeFigure
    return float(value)


def _sum(targets: Sequence[Mapping[str, Any]], name: str) -> int | None:
    found = [_integer(target, name) for target in targets]
    numbers = [number for number in found if number is not None]
    return sum(numbers) if len(numbers) == len(found) else None


def summarise(status: ClusterStatus) -> str:
    """One line: who is alive, and what that means for the blocks."""
    total = len(status.nodes)
    who = f"{status.nodes_alive} of {total} nodes alive, code {status.k}+{status.m}: "
    spare = status.spare_nodes
    if spare > 0:
        return f"{who}{spare} more may fail before blocks are unreadable"
    if spare == 0:
        return f"{who}none may fail any more, or blocks are unreadable"
    verb = "is" if spare == -1 else "are"
    return f"{who}blocks are unreadable until {-spare} more {verb} back"


def render_json(status: ClusterStatus) -> dict[str, Any]:
    """The JSON object of `cachalot status --json`; bytes and seconds as the names say."""
    return {
        "cluster": status.cluster,
        "epoch": status.epoch,
        "code": {"k": status.k, "m": status.m},
        "nodes_total": len(status.nodes),
        "nodes_alive": status.nodes_alive,
        "spare_nodes": status.spare_nodes,
        "summary": summarise(status),
        "nodes": [asdict(node) for node in status.nodes],
    }
