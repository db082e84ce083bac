"""Whether a `gc_worker` runs beside each node, how full its targets are, and what all workers count
together (`redundancy_health`)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from ..cluster.entities import ClusterMap
from ..errors import InvalidArgument, StoreError
from .redundancy_health import (
    Redundancy,
    RedundancyHealth,
    add_up_redundancy,
    parse_redundancy,
    read_figure,
)

WORD_CHARACTERS_MAX = 64


class WorkerState(Enum):
    """What a command could find out about the worker of a node."""

    RUNNING = "running"
    NOT_RUNNING = "not running"
    NO_ADDRESS = "no address"
    """The cluster map does not say where it can be asked, so nobody knows whether it runs."""
    NO_ANSWER = "no answer"
    NO_ACCESS = "no access"
    """It answers, and does not take our token, or there is none."""
    NOT_ASKED = "not asked"
    """The one that was to tell of all (`--control`) does not."""


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
class WorkersStatus:
    """All workers of a cluster."""

    workers: tuple[WorkerStatus, ...] = ()
    redundancy: RedundancyHealth
    remark: str = field(default="")
    """Why less is known than could be, such as a token that is missing."""
    silent_control: str = ""
    """What is the matter at the address of `--control`, if no control API answers there."""

    def seen_beside(self, alive: AbstractSet[str], silent: AbstractSet[str]) -> WorkersStatus:
        """The same, after a look at the nodes: those `alive` answered now, and the targets `silent`
        did not."""
        known = self.redundancy
        counts = {node: one for node, one in _counts_of(self.workers).items() if node in alive}
        nodes = [one.node for one in self.workers]
        summed = add_up_redundancy(counts, k=known.k, m=known.m, nodes=nodes, silent=silent)
        return replace(self, redundancy=summed)

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
        if self.nodes_in(WorkerState.NOT_ASKED):
            return (
                f"gc_worker: not asked{', as ' if self.silent_control else ''}{self.silent_control}"
            )
        absent = self.nodes_in(WorkerState.NOT_RUNNING)
        silent = self.nodes_in(WorkerState.NO_ANSWER)
        unknown = self.nodes_in(WorkerState.NO_ADDRESS)
        closed = self.nodes_in(WorkerState.NO_ACCESS)
        parts = []
        if unknown:
            whose = "" if len(unknown) == len(self.workers) else f" for {', '.join(unknown)}"
            parts.append(f"no control address in the map{whose}, so they cannot be asked")
        if absent:
            where = "" if len(absent) == len(self.workers) else f" on {', '.join(absent)}"
            parts.append(f"not running{where} (no eviction, repair or scrub there)")
        if closed:
            where = "all nodes" if len(closed) == len(self.workers) else ", ".join(closed)
            parts.append(f"they answer on {where}, and give no access to more")
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
    Raises InvalidArgument for a `control` that is no address, a `token_file` that holds no token.
    """
    from ..token_file import read_token_file
    from .control_client import ControlPlane, find_endpoints, parse_control_url
    from .control_options import default_token_path

    endpoints = find_endpoints(cluster_map) if control is None else [parse_control_url(control)]
    token, remark = "", ""
    if token_file is not None:
        token = read_token_file(token_file)
    elif endpoints:
        try:
            token = read_token_file(default_token_path(cluster_path))
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
    if control is not None:
        (endpoint,) = endpoints
        answer = answers[endpoint.node]
        return describe_relayed(cluster_map, endpoint.address, answer, remark=remark)
    return describe_workers(cluster_map, answers, remark=remark)


def describe_relayed(
    cluster_map: ClusterMap, address: str, answer: dict[str, Any] | StoreError, *, remark: str = ""
) -> WorkersStatus:
    """What the worker at `address` says of all of them; if it does not, why. Pure."""
    from .control_client import ControlRefused, ControlUnreachable

    if isinstance(answer, dict) and not remark:
        return parse_workers(cluster_map, answer)
    api, silent = f"the control API at {address} (--control)", ""
    if isinstance(answer, ControlRefused) and answer.is_of_token:
        remark = f"{api} refuses the token; give --token-file of this cluster"
    elif isinstance(answer, ControlRefused):
        silent = f"{api} does not answer as one: HTTP status {answer.status}"
    elif isinstance(answer, StoreError):
        reason = answer.reason if isinstance(answer, ControlUnreachable) else str(answer)
        silent = f"{api} does not answer: {reason}"
    problem, state = silent or remark, WorkerState.NOT_ASKED
    workers = tuple(
        WorkerStatus(node=name, state=state, problem=problem)
        for name in _serving_nodes(cluster_map)
    )
    found = _sum_up(cluster_map, workers, "" if silent else remark)
    return replace(found, silent_control=silent)


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
    code = cluster_map.code
    nodes = [one.node for one in workers]
    return WorkersStatus(
        workers=workers,
        redundancy=add_up_redundancy(_counts_of(workers), k=code.k, m=code.m, nodes=nodes),
        remark=remark,
    )


def _counts_of(workers: Sequence[WorkerStatus]) -> dict[str, Redundancy]:
    return {one.node: one.redundancy for one in workers if one.redundancy is not None}


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
            "silent_targets": _silent_targets_of(one.redundancy),
            "usage": {name: asdict(usage) for name, usage in one.usage.items()},
        }
        for one in found.workers
    ]
    return {"workers": rows, "redundancy": found.redundancy.render_json()}


def _silent_targets_of(count: Redundancy | None) -> list[str] | None:
    return None if count is None or count.silent_targets is None else sorted(count.silent_targets)


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
    age_s = read_figure(row.get("count_age_s"))
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
        state = WorkerState.NO_ACCESS if answer.is_of_token else WorkerState.NO_ANSWER
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
        fraction = read_figure(usage.get("fraction")) if isinstance(usage, dict) else None
        if fraction is not None and fraction <= 1:
            decided_by = str(usage.get("decided_by", ""))[:WORD_CHARACTERS_MAX]
            found[str(name)] = TargetUsage(fraction=fraction, decided_by=decided_by)
    return found
