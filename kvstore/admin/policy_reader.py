"""The retention policy as the nodes of a cluster have it, asked over the data plane.

It needs neither a `gc_worker` nor a token. Changes are made through the control API, which checks
who makes them, and never here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import wire
from ..client.inquiry import ask_node
from ..client.router import Lane, Router
from ..cluster.entities import ClusterMap
from ..cluster.map import load_cluster_map
from ..errors import InvalidArgument, NodeError
from ..retention import RetentionPolicy
from .nodes_down import NodesDown


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePolicy:
    """What one node has; `policy` is None if it gave none, and `problem` says why then."""

    node: str
    policy: RetentionPolicy | None
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPolicy:
    """The newest policy that any node has, and who has which."""

    newest: RetentionPolicy
    nodes: tuple[NodePolicy, ...]

    @property
    def behind(self) -> list[str]:
        """Nodes that answered with another document than the newest."""
        newest = self.newest.to_json()
        return [
            one.node
            for one in self.nodes
            if one.policy is not None and one.policy.to_json() != newest
        ]

    @property
    def silent(self) -> list[str]:
        """Nodes that gave none."""
        return [one.node for one in self.nodes if one.policy is None]

    @property
    def is_agreed(self) -> bool:
        """Every node has the newest."""
        return not self.behind and not self.silent

    def describe(self) -> str:
        """One line: the version, and who does not have it."""
        line = f"policy version {self.newest.version}"
        if self.is_agreed:
            return f"{line} on all nodes"
        parts = [f"older on {', '.join(self.behind)}"] if self.behind else []
        parts += [f"no answer from {', '.join(self.silent)}"] if self.silent else []
        return f"{line}; {'; '.join(parts)}"

    def render_json(self) -> dict[str, Any]:
        """What each `show --json` says beside its own values."""
        return {
            "version": self.newest.version,
            "is_agreed": self.is_agreed,
            "nodes": [
                {
                    "node": one.node,
                    "version": None if one.policy is None else one.policy.version,
                    "problem": one.problem,
                }
                for one in self.nodes
            ],
        }


def read_cluster_policy(path: Path, deadline_s: float) -> ClusterPolicy:
    """Asks every node of the map at `path`. Raises ClusterMapError, NodesDown."""
    return asyncio.run(ask_policies(load_cluster_map(path), deadline_s))


async def ask_policies(
    cluster_map: ClusterMap, deadline_s: float, clock: Callable[[], float] = time.monotonic
) -> ClusterPolicy:
    """What each node that serves a target has, all asked at once. Raises NodesDown if none says."""
    router = Router(cluster_map, asyncio.get_running_loop(), clock)
    names = [node.name for node in cluster_map.nodes if cluster_map.targets_by_node[node.name]]
    try:
        found = await asyncio.gather(*(_ask_one(router, name, deadline_s) for name in names))
    finally:
        router.close()
    newest: RetentionPolicy | None = None
    for one in found:
        if one.policy is not None and (newest is None or one.policy.is_newer_than(newest)):
            newest = one.policy
    if newest is None:
        raise NodesDown(names)
    return ClusterPolicy(newest=newest, nodes=tuple(found))


async def _ask_one(router: Router, node: str, deadline_s: float) -> NodePolicy:
    target = router.map.targets_by_node[node][0]
    channel = router.channel(target.name, Lane.READ)
    loop = asyncio.get_running_loop()
    try:
        body = await ask_node(channel, wire.Op.POLICY, deadline_s=deadline_s, loop=loop)
        return NodePolicy(node=node, policy=RetentionPolicy.parse(body))
    except NodeError as error:
        return NodePolicy(node=node, policy=None, problem=error.detail)
    except InvalidArgument as error:
        # A later version's document, or a node gone wrong: the others still answer.
        return NodePolicy(node=node, policy=None, problem=f"its policy is not understood: {error}")
