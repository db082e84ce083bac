"""Whether a `gc_worker` runs beside each node, and what they count together. The sums are pure.

Every worker counts the blocks that it is responsible for, so that the sum over all workers counts
each block once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from ..cluster.entities import ClusterMap
from ..errors import InvalidArgument, StoreError
from .quantities import count_of, format_duration

FIGURE_MAX = 2**63 - 1
SHARDS_MAX = 255


class WorkerState(Enum):
    """What a command could find out about the worker of a node."""

    RUNNING = "running"
    NOT_RUNNING = "not running"
    NO_ANSWER = "no answer"
    NO_ACCESS = "no access"
    """It runs, and does not take our token, or there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Redundancy:
    """Blocks by the number of their shards that are there, as one or more workers counted them."""

    by_shards: Mapping[int, int]
    backlog: int = 0
    """Blocks in use that lack shards and wait for repair."""
    age_s: float | None = None
    """Since the count was finished; of several counts, the oldest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """The worker of one node; `problem` says why it is not running, as far as that is known."""

    node: str
    state: WorkerState
    problem: str = ""
    redundancy: Redundancy | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RedundancyHealth:
    """All blocks of the cluster by what is left of them."""

    k: int
    m: int
    by_shards: Mapping[int, int]
    """From k + m down to k; blocks with fewer are `unreadable`."""
    unreadable: int
    backlog: int
    nodes_counted: int
    nodes_total: int
    age_s: float | None

    def describe(self) -> str:
        """One line for a person."""
        whole = self.k + self.m
        if not self.nodes_counted:
            return "redundancy: not counted yet"
        parts = [f"{count_of(self.by_shards[whole], 'block')} with all {count_of(whole, 'shard')}"]
        fewer = range(whole - 1, self.k - 1, -1)
        parts += [f"{self.by_shards[shards]:,} with {shards}" for shards in fewer]
        parts.append(f"{self.unreadable:,} with fewer (unreadable)")
        line = f"redundancy: {', '.join(parts)}"
        if self.backlog:
            line += f"; {self.backlog:,} wait for repair"
        if self.nodes_counted < self.nodes_total:
            line += f"; counted by {self.nodes_counted} of {count_of(self.nodes_total, 'node')}"
        if self.age_s is not None:
            line += f"; oldest count {format_duration(self.age_s)} ago"
        return line

    def render_json(self) -> dict[str, Any]:
        """Shards are names here, because JSON has no other."""
        return {
            "by_shards": {str(shards): blocks for shards, blocks in self.by_shards.items()},
            "unreadable": self.unreadable,
            "repair_backlog": self.backlog,
            "nodes_counted": self.nodes_counted,
            "nodes_total": self.nodes_total,
            "age_s": self.age_s,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersStatus:
    """All workers of a cluster."""

    workers: tuple[WorkerStatus, ...] = ()
    redundancy: RedundancyHealth
    remark: str = field(default="")
    """Why less is known than could be, such as a token that is missing."""

    def nodes_in(self, state: WorkerState) -> list[str]:
        """Nodes whose worker is in a state."""
        return [one.node for one in self.workers if one.state is state]

    def state_of(self, node: str) -> WorkerState:
        """The state of one node's worker."""
        return next((w.state for w in self.workers if w.node == node), WorkerState.NOT_RUNNING)

    def describe(self) -> str:
        """One line for a person; what it costs if there is none."""
        absent = self.nodes_in(WorkerState.NOT_RUNNING)
        silent = self.nodes_in(WorkerState.NO_ANSWER)
        parts = []
        if absent:
            where = "" if len(absent) == len(self.workers) else f" on {', '.join(absent)}"
            parts.append(f"not running{where} (no eviction, repair or scrub there)")
        if silent:
            parts.append(f"no answer in time from {', '.join(silent)} (just started, or busy)")
        return f"gc_worker: {'; '.join(parts) or 'running on all nodes'}"


def ask_workers(
    cluster_map: ClusterMap, cluster_path: Path, token_file: Path | None, deadline_s: float
) -> WorkersStatus:
    """Asks the worker of every node. Never raises because one, or all of them, are not there."""
    from .control_client import ControlPlane, find_endpoints
    from .control_options import default_token_path
    from .control_token import read_token_file

    endpoints = find_endpoints(cluster_map)
    token, remark = "", ""
    if endpoints:
        try:
            token = read_token_file(token_file or default_token_path(cluster_path))
        except InvalidArgument as error:
            remark = str(error)
    path = "/api/status" if token else "/healthz"
    answers = ControlPlane(endpoints, token).ask_each("GET", path, deadline_s=deadline_s)
    return describe_workers(cluster_map, answers, remark=remark)


def describe_workers(
    cluster_map: ClusterMap,
    answers: Mapping[str, dict[str, Any] | StoreError],
    *,
    remark: str = "",
) -> WorkersStatus:
    """The state of all workers, from what those of the map that have an address answered."""
    names = [node.name for node in cluster_map.nodes if cluster_map.targets_by_node[node.name]]
    workers = tuple(_describe_worker(name, answers.get(name), remark) for name in names)
    counts = [one.redundancy for one in workers if one.redundancy is not None]
    code = cluster_map.code
    return WorkersStatus(
        workers=workers,
        redundancy=add_up_redundancy(counts, k=code.k, m=code.m, nodes_total=len(names)),
        remark=remark,
    )


def _describe_worker(
    node: str, answer: dict[str, Any] | StoreError | None, remark: str
) -> WorkerStatus:
    from .control_client import ControlRefused, ControlUnreachable

    if answer is None:
        problem = "the cluster map names no `control` address"
        return WorkerStatus(node=node, state=WorkerState.NOT_RUNNING, problem=problem)
    if isinstance(answer, ControlUnreachable):
        state = WorkerState.NO_ANSWER if answer.is_sent else WorkerState.NOT_RUNNING
        return WorkerStatus(node=node, state=state, problem=answer.detail)
    if isinstance(answer, ControlRefused):
        is_token = answer.status in (401, 403)
        state = WorkerState.NO_ACCESS if is_token else WorkerState.NO_ANSWER
        return WorkerStatus(node=node, state=state, problem=str(answer))
    if isinstance(answer, StoreError):
        return WorkerStatus(node=node, state=WorkerState.NO_ANSWER, problem=str(answer))
    if remark:
        return WorkerStatus(node=node, state=WorkerState.NO_ACCESS, problem=remark)
    redundancy = parse_redundancy(answer.get("redundancy"), now_s=answer.get("at_s"))
    return WorkerStatus(node=node, state=WorkerState.RUNNING, redundancy=redundancy)


def parse_redundancy(said: object, *, now_s: object = None) -> Redundancy | None:
    """What a worker counted last; None if it has not, or if it is not understood.

    `said`: its redundancy report, of which `blocks_by_shards[i]` is the blocks with i shards;
    `now_s`: the worker's own clock.
    """
    counts = said.get("blocks_by_shards") if isinstance(said, dict) else None
    if not isinstance(said, dict) or not isinstance(counts, list) or len(counts) > SHARDS_MAX:
        return None
    if not all(type(blocks) is int and 0 <= blocks <= FIGURE_MAX for blocks in counts):
        return None
    return Redundancy(
        by_shards={shards: blocks for shards, blocks in enumerate(counts) if shards},
        backlog=_figure(said.get("backlog")),
        age_s=_age_s(said, now_s),
    )


def _age_s(report: Mapping[str, Any], now_s: object) -> float | None:
    """Since the count was finished."""
    started_s, took_s = report.get("started_at_s"), report.get("duration_s", 0.0)
    times = [
        float(one)
        for one in (now_s, started_s, took_s)
        # Not a number and infinity fail the comparison.
        if isinstance(one, int | float) and one is not True and 0 <= one <= FIGURE_MAX
    ]
    return max(times[0] - times[1] - times[2], 0.0) if len(times) == 3 else None


def _figure(value: object) -> int:
    return value if type(value) is int and 0 <= value <= FIGURE_MAX else 0


def add_up_redundancy(
    counts: Sequence[Redundancy], *, k: int, m: int, nodes_total: int
) -> RedundancyHealth:
    """The sum of what workers counted, each its own blocks."""
    by_shards = dict.fromkeys(range(k + m, k - 1, -1), 0)
    unreadable = 0
    for count in counts:
        for shards, blocks in count.by_shards.items():
            if shards < k:
                unreadable += blocks
            else:
                by_shards[min(shards, k + m)] += blocks
    ages = [count.age_s for count in counts if count.age_s is not None]
    return RedundancyHealth(
        k=k,
        m=m,
        by_shards=by_shards,
        unreadable=unreadable,
        backlog=sum(count.backlog for count in counts),
        nodes_counted=len(counts),
        nodes_total=nodes_total,
        age_s=max(ages) if ages else None,
    )
