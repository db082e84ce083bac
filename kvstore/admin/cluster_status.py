"""What `cachalot status` shows, as data: each node's own figures, and what may still fail. Pure.

The names here are those of the JSON output; they stay as they are, more may be added.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..client import NodeReport
from ..cluster.entities import ClusterMap
from .quantities import count_of, format_size
from .worker_status import TargetUsage, WorkersStatus

NAME_CHARACTERS_MAX = 64
FIGURE_MAX = 2**63 - 1
"""Counts, bytes and seconds are whole or real numbers from 0 to this; others are not believed."""
LOST_FIGURES = ("blocks", "used_bytes", "capacity_bytes", "slots_used", "slots_total")
"""What a target no longer has whose folder is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassHeld:
    """What is stored of a TTL class."""

    shards: int
    bytes: int
    """Of whole slots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetStatus:
    """One target of a node that answered. Figures are None where the node does not give them.

    A target that is lost holds nothing that could be read, whatever the node remembers of it: its
    figures are 0 then, and its classes none.
    """

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
    classes: Mapping[str, ClassHeld] = field(default_factory=dict)
    """What it holds of each TTL class."""
    usage: TargetUsage | None = None
    """How full its worker says that it is: that knows limits which a node cannot see."""

    @property
    def fill_ratio(self) -> float | None:
        """Share in use: what its worker acts on where that is known, else of its bytes.

        Never of its slots: they have several sizes.
        """
        if self.is_lost:
            return None
        if self.usage is not None:
            return self.usage.fraction
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
    refused_shards: int | None = None
    """Shards that it did not store, for want of room."""
    policy_version: int | None = None
    is_draining: bool = False
    """It takes no writes, because an operator asked for that."""
    targets: tuple[TargetStatus, ...] = ()

    @property
    def fill_ratio(self) -> float | None:
        """Of its fullest target: that one evicts first."""
        ratios = [one.fill_ratio for one in self.targets if one.fill_ratio is not None]
        return max(ratios) if ratios else None

    @property
    def lost_targets(self) -> list[str]:
        """Targets of which it says that their folder is gone."""
        return [one.target for one in self.targets if one.is_lost]

    @property
    def state(self) -> str:
        """One or two words for a table."""
        lost = len(self.lost_targets)
        if not self.is_alive:
            return "down"
        if lost:
            return "lost" if lost == len(self.targets) else f"{lost} of {len(self.targets)} lost"
        return "draining" if self.is_draining else "alive"


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
    come back until all blocks are readable. For blocks whose k + m shards were all written. A
    target that is lost counts as one on a node that is down."""
    silent_targets: frozenset[str]
    """Targets that are lost, or on a node that is down."""

    @property
    def nodes_alive(self) -> int:
        return len(self.alive)

    @property
    def alive(self) -> frozenset[str]:
        """Names of the nodes that are."""
        return frozenset(node.node for node in self.nodes if node.is_alive)

    @property
    def lost_targets(self) -> list[str]:
        return [target for node in self.nodes for target in node.lost_targets]

    def with_usage(self, workers: WorkersStatus) -> ClusterStatus:
        """The same, with how full the workers say that their targets are."""
        nodes = []
        for node in self.nodes:
            said = workers.usage_of(node.node)
            targets = tuple(replace(one, usage=said.get(one.target)) for one in node.targets)
            nodes.append(replace(node, targets=targets))
        return replace(self, nodes=tuple(nodes))

    @property
    def classes(self) -> dict[str, ClassHeld]:
        """What all nodes that answer hold together, by TTL class in the order of the names."""
        return add_up_classes([target for node in self.nodes for target in node.targets])


def describe_cluster(cluster_map: ClusterMap, reports: Sequence[NodeReport]) -> ClusterStatus:
    """The status that follows from the map and what its nodes said."""
    nodes = tuple(describe_node(report) for report in reports)
    alive = {node.node for node in nodes if node.is_alive}
    lost = {target for node in nodes for target in node.lost_targets}
    return ClusterStatus(
        cluster=cluster_map.cluster,
        epoch=cluster_map.epoch,
        k=cluster_map.code.k,
        m=cluster_map.code.m,
        nodes=nodes,
        spare_nodes=count_spare_nodes(cluster_map, alive, lost),
        silent_targets=frozenset(
            target.name
            for target in cluster_map.targets
            if target.name in lost or cluster_map.node_of(target.name).name not in alive
        ),
    )


def count_spare_nodes(
    cluster_map: ClusterMap, alive: set[str], lost_targets: Collection[str] = ()
) -> int:
    """The smallest surplus of any group: targets that are there, beyond the k needed.

    Those are there whose node is alive and that are not lost.

    The targets of a group lie on different nodes, so each failing node costs it one at most, and
    the worst choice of nodes hits the group that has the fewest to spare.
    """
    return (
        min(
            sum(
                cluster_map.node_of(target).name in alive and target not in lost_targets
                for target in group.targets
            )
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
        described = tuple(_describe_target(one) for one in targets)
        there = [one for one in targets if not one.get("is_lost")]
        return NodeStatus(
            node=report.node,
            address=report.address,
            is_alive=True,
            pid=_integer(said, "pid"),
            uptime_s=_seconds(said, "uptime_s"),
            blocks=_sum(there, "blocks"),
            used_bytes=_sum(there, "used_bytes"),
            capacity_bytes=_sum(there, "capacity_bytes"),
            reads=_sum(targets, "reads"),
            shards_read=_sum(targets, "shards_read"),
            rejected_shards=_sum(targets, "rejected_shards"),
            refused_shards=_sum(targets, "full_refusals"),
            policy_version=_integer(said, "policy_version"),
            is_draining=bool(said.get("draining")),
            targets=described,
        )
    except _StrangeFigure:
        # Also what a later version may do: it must not look like a dead node without a reason.
        problem = "answers, but its figures are not understood"
        return NodeStatus(node=report.node, address=report.address, is_alive=False, problem=problem)


def _describe_target(said: Mapping[str, Any]) -> TargetStatus:
    if said.get("is_lost"):
        said = {"name": said.get("name", ""), "is_lost": True} | dict.fromkeys(LOST_FIGURES, 0)
    return TargetStatus(
        target=str(said.get("name", ""))[:NAME_CHARACTERS_MAX],
        blocks=_integer(said, "blocks"),
        used_bytes=_integer(said, "used_bytes"),
        capacity_bytes=_integer(said, "capacity_bytes"),
        slots_used=_integer(said, "slots_used"),
        slots_total=_integer(said, "slots_total"),
        quarantined=_integer(said, "quarantined"),
        is_lost=bool(said.get("is_lost")),
        classes=_describe_classes(said.get("classes")),
    )


def _describe_classes(said: object) -> dict[str, ClassHeld]:
    classes = said if isinstance(said, dict) else {}
    return {
        name[:NAME_CHARACTERS_MAX]: ClassHeld(
            shards=_integer(held, "blocks") or 0, bytes=_integer(held, "bytes") or 0
        )
        for name, held in classes.items()
        if isinstance(held, dict)
    }


def add_up_classes(targets: Sequence[TargetStatus]) -> dict[str, ClassHeld]:
    """What several targets hold of each class, in the order of the names."""
    total: dict[str, ClassHeld] = {}
    for target in targets:
        for name, held in target.classes.items():
            before = total.get(name, ClassHeld(shards=0, bytes=0))
            total[name] = ClassHeld(
                shards=before.shards + held.shards, bytes=before.bytes + held.bytes
            )
    return dict(sorted(total.items()))


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
    lost = len(status.lost_targets)
    who = f"{status.nodes_alive} of {count_of(total, 'node')} alive"
    who += f", {count_of(lost, 'target')} lost" if lost else ""
    who += f", code {status.k}+{status.m}: "
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


def describe_classes(status: ClusterStatus) -> str:
    """One line: how much is stored of each class."""
    if not status.nodes_alive:
        return "stored: not known, no node answers"
    held = [
        f"{name} {format_size(one.bytes)} in {count_of(one.shards, 'shard')}"
        for name, one in status.classes.items()
    ]
    return f"stored: {', '.join(held) or 'nothing'}"


def render_json(status: ClusterStatus, workers: WorkersStatus) -> dict[str, Any]:
    """The JSON object of `cachalot status --json`; bytes and seconds as the names say."""
    nodes = [
        _render_node(node)
        | {
            "worker": workers.state_of(node.node).value,
            "count_age_s": workers.count_age_s(node.node),
        }
        for node in status.nodes
    ]
    return {
        "cluster": status.cluster,
        "epoch": status.epoch,
        "code": {"k": status.k, "m": status.m},
        "nodes_total": len(status.nodes),
        "nodes_alive": status.nodes_alive,
        "spare_nodes": status.spare_nodes,
        "targets_lost": status.lost_targets,
        "summary": summarise(status),
        "classes": {name: asdict(held) for name, held in status.classes.items()},
        "redundancy": workers.redundancy.render_json(),
        "workers": workers.describe(),
        "nodes": nodes,
    }


def _render_node(node: NodeStatus) -> dict[str, Any]:
    values = asdict(node) | {"fill_ratio": node.fill_ratio}
    values["targets"] = [_render_target(target) for target in node.targets]
    return values


def _render_target(target: TargetStatus) -> dict[str, Any]:
    values = asdict(target)
    usage = values.pop("usage")
    decided_by = None if usage is None else usage["decided_by"]
    return values | {"fill_ratio": target.fill_ratio, "decided_by": decided_by}
