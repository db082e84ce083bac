"""What `cachalot status` shows, as data: each node's own figures, and what may still fail. Pure.

The names here are those of the JSON output; they stay as they are, more may be added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..client import NodeReport
from ..cluster.entities import ClusterMap
from .quantities import count_of
from .worker_status import WorkersStatus

NAME_CHARACTERS_MAX = 64
FIGURE_MAX = 2**63 - 1
"""Counts, bytes and seconds are whole or real numbers from 0 to this; others are not believed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetStatus:
    """One target of a node that answered. Figures are None where the node does not give them."""

    target: str
    blocks: int | None
    used_bytes: int | None
    capacity_bytes: int | None
    slots_used: int | None
    slots_total: int | None
    """Slots that its capacity can have."""
    quarantined: int | None
    """Slots out of use because their bytes were bad."""
    is_lost: bool
    """Its folder was removed or replaced: it stores nothing until that is back."""

    @property
    def fill_ratio(self) -> float | None:
        """Share in use: of its slots where it says so, of its bytes otherwise."""
        if self.slots_total and self.slots_used is not None:
            return self.slots_used / self.slots_total
        if self.capacity_bytes and self.used_bytes is not None:
            return self.used_bytes / self.capacity_bytes
        return None


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
    policy_version: int | None = None
    is_draining: bool = False
    """It takes no writes, because an operator asked for that."""
    targets: tuple[TargetStatus, ...] = ()

    @property
    def fill_ratio(self) -> float | None:
        """Of its fullest target: that one evicts first."""
        ratios = [one.fill_ratio for one in self.targets if one.fill_ratio is not None]
        return max(ratios) if ratios else None


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
            policy_version=_integer(said, "policy_version"),
            is_draining=bool(said.get("draining")),
            targets=tuple(_describe_target(one) for one in targets),
        )
    except _StrangeFigure:
        # Also what a later version may do: it must not look like a dead node without a reason.
        problem = "answers, but its figures are not understood"
        return NodeStatus(node=report.node, address=report.address, is_alive=False, problem=problem)


def _describe_target(said: Mapping[str, Any]) -> TargetStatus:
    return TargetStatus(
        target=str(said.get("name", ""))[:NAME_CHARACTERS_MAX],
        blocks=_integer(said, "blocks"),
        used_bytes=_integer(said, "used_bytes"),
        capacity_bytes=_integer(said, "capacity_bytes"),
        slots_used=_integer(said, "slots_used"),
        slots_total=_integer(said, "slots_total"),
        quarantined=_integer(said, "quarantined"),
        is_lost=bool(said.get("is_lost")),
    )


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
    who = f"{status.nodes_alive} of {count_of(total, 'node')} alive, code {status.k}+{status.m}: "
    spare = status.spare_nodes
    if spare > 0:
        return f"{who}{spare} more may fail before blocks are unreadable"
    if spare == 0:
        return f"{who}none may fail any more, or blocks are unreadable"
    verb = "is" if spare == -1 else "are"
    return f"{who}blocks are unreadable until {-spare} more {verb} back"


def describe_policy(status: ClusterStatus) -> str:
    """One line: which version of the policy the nodes obey, and who is behind."""
    versions = {
        node.node: node.policy_version for node in status.nodes if node.policy_version is not None
    }
    if not versions:
        return "policy: no node says which it has"
    newest = max(versions.values())
    behind = [node for node, version in versions.items() if version < newest]
    line = f"policy: version {newest}"
    return f"{line}, older on {', '.join(behind)}" if behind else line


def render_json(status: ClusterStatus, workers: WorkersStatus) -> dict[str, Any]:
    """The JSON object of `cachalot status --json`; bytes and seconds as the names say."""
    nodes = [
        _render_node(node) | {"worker": workers.state_of(node.node).value} for node in status.nodes
    ]
    return {
        "cluster": status.cluster,
        "epoch": status.epoch,
        "code": {"k": status.k, "m": status.m},
        "nodes_total": len(status.nodes),
        "nodes_alive": status.nodes_alive,
        "spare_nodes": status.spare_nodes,
        "summary": summarise(status),
        "redundancy": workers.redundancy.render_json(),
        "workers": workers.describe(),
        "nodes": nodes,
    }


def _render_node(node: NodeStatus) -> dict[str, Any]:
    values = asdict(node) | {"fill_ratio": node.fill_ratio}
    values["targets"] = [
        asdict(target) | {"fill_ratio": target.fill_ratio} for target in node.targets
    ]
    return values
