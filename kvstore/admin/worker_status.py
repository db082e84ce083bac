"""Whether a `gc_worker` runs beside each node, and what they count together. The sums are pure.

Every worker counts the blocks that it is responsible for, so that the sum over all workers counts
each block once, as far as their counts are of one time: who is responsible changes when nodes come
and go, so a sum of counts of different ages may have a block twice, or not at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from ..cluster.entities import ClusterMap
from ..errors import InvalidArgument, StoreError
from .quantities import count_of, format_duration

FIGURE_MAX = 2**63 - 1
SHARDS_MAX = 255
WORD_CHARACTERS_MAX = 64


class WorkerState(Enum):
    """What a command could find out about the worker of a node."""

    RUNNING = "running"
    NOT_RUNNING = "not running"
    NO_ADDRESS = "no address"
    """The cluster map does not say where it can be asked, so nobody knows whether it runs."""
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
    """Since the count was finished."""

    @property
    def blocks(self) -> int:
        return sum(self.by_shards.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetUsage:
    """How full a target is, as its worker says, which acts on it."""

    fraction: float
    decided_by: str
    """The limit that is the tightest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """The worker of one node; `problem` says why it is not running, as far as that is known."""

    node: str
    state: WorkerState
    problem: str = ""
    redundancy: Redundancy | None = None
    usage: Mapping[str, TargetUsage] = field(default_factory=dict)
    """By target."""


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
        if not self.blocks:
            # As right after a start: the first count is over before there is anything to count.
            age = "" if self.age_s is None else f", up to {format_duration(self.age_s)} ago"
            return f"redundancy: not counted yet (the last counts{age}, found no blocks)"
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
            line += f"; as of up to {format_duration(self.age_s)} ago"
        return line

    @property
    def blocks(self) -> int:
        """All that were counted."""
        return sum(self.by_shards.values()) + self.unreadable

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
        found = self._worker(node)
        return WorkerState.NO_ADDRESS if found is None else found.state

    def count_age_s(self, node: str) -> float | None:
        """Since one node's worker finished its last count; None if it has not, or is not known."""
        found = self._worker(node)
        return found.redundancy.age_s if found and found.redundancy else None

    def usage_of(self, node: str) -> Mapping[str, TargetUsage]:
        """How full the targets of a node are, by name; none if its worker does not say."""
        found = self._worker(node)
        return found.usage if found else {}

    def _worker(self, node: str) -> WorkerStatus | None:
        return next((worker for worker in self.workers if worker.node == node), None)

    def describe(self) -> str:
        """One line for a person; what it costs if there is none."""
        absent = self.nodes_in(WorkerState.NOT_RUNNING)
        silent = self.nodes_in(WorkerState.NO_ANSWER)
        unknown = self.nodes_in(WorkerState.NO_ADDRESS)
        parts = []
        if unknown:
            whose = "" if len(unknown) == len(self.workers) else f" for {', '.join(unknown)}"
            parts.append(f"no control address in the map{whose}, so they cannot be asked")
        if absent:
            where = "" if len(absent) == len(self.workers) else f" on {', '.join(absent)}"
            parts.append(f"not running{where} (no eviction, repair or scrub there)")
        if silent:
            parts.append(f"no answer in time from {', '.join(silent)} (just started, or busy)")
        return f"gc_worker: {'; '.join(parts) or 'running on all nodes'}"


async def ask_workers(
    cluster_map: ClusterMap,
    cluster_path: Path,
    token_file: Path | None,
    deadline_s: float,
    control: str | None = None,
) -> WorkersStatus:
    """Asks the worker of every node. Never raises because one, or all of them, are not there.

    `control`: the only worker that can be reached, as through a tunnel; it is asked for what all of
    them say. When this is cancelled, the answers that are awaited are given up at once.
    Raises InvalidArgument for a `control` that is no address.
    """
    from ..token_file import read_token_file
    from .control_client import ControlPlane, find_endpoints, parse_control_url
    from .control_options import default_token_path

    endpoints = find_endpoints(cluster_map) if control is None else [parse_control_url(control)]
    token, remark = "", ""
    if endpoints:
        try:
            token = read_token_file(token_file or default_token_path(cluster_path))
        except InvalidArgument as error:
            remark = str(error)
    # Not the status: each worker would ask every node for that.
    path = "/api/worker" if control is None else "/api/workers"
    path = path if token else "/healthz"
    plane = ControlPlane(endpoints, token)
    try:
        answers = await asyncio.to_thread(plane.ask_each, "GET", path, deadline_s=deadline_s)
    except asyncio.CancelledError:
        # The end of the event loop waits for its threads.
        plane.abort()
        raise
    if control is not None and token:
        return _describe_relayed(cluster_map, answers[endpoints[0].node])
    return describe_workers(cluster_map, answers, remark=remark)


def _describe_relayed(
    cluster_map: ClusterMap, answer: dict[str, Any] | StoreError
) -> WorkersStatus:
    """What one worker says of all of them; if it does not, that is remarked."""
    if isinstance(answer, StoreError):
        return replace(describe_workers(cluster_map, {}), remark=str(answer))
    return parse_workers(cluster_map, answer)


def describe_workers(
    cluster_map: ClusterMap,
    answers: Mapping[str, dict[str, Any] | StoreError],
    *,
    remark: str = "",
) -> WorkersStatus:
    """The state of all workers, from what those of the map that have an address answered."""
    workers = tuple(
        _describe_worker(name, answers.get(name), remark) for name in _serving_nodes(cluster_map)
    )
    return _sum_up(cluster_map, workers, remark)


def _serving_nodes(cluster_map: ClusterMap) -> list[str]:
    return [node.name for node in cluster_map.nodes if cluster_map.targets_by_node[node.name]]


def _sum_up(
    cluster_map: ClusterMap, workers: tuple[WorkerStatus, ...], remark: str
) -> WorkersStatus:
    counts = [one.redundancy for one in workers if one.redundancy is not None]
    code = cluster_map.code
    return WorkersStatus(
        workers=workers,
        redundancy=add_up_redundancy(counts, k=code.k, m=code.m, nodes_total=len(workers)),
        remark=remark,
    )


def render_workers(found: WorkersStatus) -> dict[str, Any]:
    """All workers as the route /api/workers shows them, and as `parse_workers` takes them."""
    rows = [
        {
            "node": one.node,
            "state": one.state.value,
            "problem": one.problem,
            "blocks_by_shards": None if one.redundancy is None else _as_list(one.redundancy),
            "backlog": None if one.redundancy is None else one.redundancy.backlog,
            "count_age_s": None if one.redundancy is None else one.redundancy.age_s,
            "usage": {name: asdict(usage) for name, usage in one.usage.items()},
        }
        for one in found.workers
    ]
    return {"workers": rows, "redundancy": found.redundancy.render_json()}


def _as_list(count: Redundancy) -> list[int]:
    return [count.by_shards.get(shards, 0) for shards in range(max(count.by_shards, default=0) + 1)]


def parse_workers(cluster_map: ClusterMap, said: Mapping[str, Any]) -> WorkersStatus:
    """The workers of the map from an answer of /api/workers; what is strange is not known."""
    rows = said.get("workers")
    found = {
        row["node"]: row
        for row in (rows if isinstance(rows, list) else [])
        if isinstance(row, dict) and isinstance(row.get("node"), str)
    }
    workers = tuple(_parse_worker(name, found.get(name)) for name in _serving_nodes(cluster_map))
    return _sum_up(cluster_map, workers, "")


def _parse_worker(node: str, row: Mapping[str, Any] | None) -> WorkerStatus:
    states = {state.value: state for state in WorkerState}
    state = states.get(str(row.get("state"))) if row is not None else None
    if row is None or state is None:
        return WorkerStatus(node=node, state=WorkerState.NO_ANSWER, problem="nothing is said of it")
    redundancy = parse_redundancy(row)
    age_s = _number(row.get("count_age_s"))
    return WorkerStatus(
        node=node,
        state=state,
        problem=str(row.get("problem", "")),
        redundancy=redundancy and replace(redundancy, age_s=age_s),
        usage=parse_usage(row.get("usage")),
    )


def _describe_worker(
    node: str, answer: dict[str, Any] | StoreError | None, remark: str
) -> WorkerStatus:
    from .control_client import ControlRefused, ControlUnreachable

    if answer is None:
        problem = "the cluster map names no `control` address"
        return WorkerStatus(node=node, state=WorkerState.NO_ADDRESS, problem=problem)
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
    worker = answer.get("worker")
    return WorkerStatus(
        node=node,
        state=WorkerState.RUNNING,
        redundancy=redundancy,
        usage=parse_usage(worker.get("usage") if isinstance(worker, dict) else None),
    )


def parse_usage(said: object) -> dict[str, TargetUsage]:
    """How full each target is, of those of which it is understood."""
    found = {}
    for name, usage in said.items() if isinstance(said, dict) else ():
        fraction = _number(usage.get("fraction")) if isinstance(usage, dict) else None
        if fraction is not None and fraction <= 1:
            decided_by = str(usage.get("decided_by", ""))[:WORD_CHARACTERS_MAX]
            found[str(name)] = TargetUsage(fraction=fraction, decided_by=decided_by)
    return found


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
    times = [one for one in map(_number, (now_s, started_s, took_s)) if one is not None]
    return max(times[0] - times[1] - times[2], 0.0) if len(times) == 3 else None


def _number(value: object) -> float | None:
    # Not a number and infinity fail the comparison.
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not 0 <= value <= FIGURE_MAX
    ):
        return None
    return float(value)


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
