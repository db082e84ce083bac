"""What one start of a local cluster starts, and the sockets that are held for it until then.

All sockets are bound before anything is written or started, so that a port which is taken changes
nothing.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from socket import socket as Listener
from types import TracebackType
from typing import Self

from ..cluster.entities import ClusterMap, Entrypoint, Node
from .local_plan import HOST, LocalShape, add_entrypoints, grow_map, plan_local_map
from .local_workers import bind_control_ports
from .node_process import AGENT
from .node_start import bind_known_ports, bind_new_ports


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalStart:
    """Nodes, workers and agents to start. Close it, or use it in `with`.

    Each mapping has the names in the order of `cluster_map`.
    """

    cluster_map: ClusterMap
    """The map that they are to run with."""
    nodes: Mapping[str, Listener]
    workers: Sequence[Node]
    """Nodes beside which a worker is to be started."""
    control: Mapping[str, Listener]
    """Where those serve the control API; a worker without a listener does not."""
    agents: Mapping[str, Listener]

    def close(self) -> None:
        """Hold the sockets no longer. Processes that were given theirs keep it."""
        close_all([*self.nodes.values(), *self.control.values(), *self.agents.values()])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def hold_new(shape: LocalShape, agents: int, *, has_workers: bool) -> LocalStart:
    """For a new cluster: its first map, on ports that the kernel chooses."""
    listeners = bind_new_ports(shape.nodes * (2 if has_workers else 1) + agents, HOST)
    with ExitStack() as held:
        held.callback(close_all, listeners)
        nodes, rest = listeners[: shape.nodes], listeners[shape.nodes :]
        control, of_agents = _split(rest, agents)
        cluster_map = plan_local_map(
            shape,
            cluster=secrets.token_hex(16),
            ports=_ports(nodes),
            control_ports=_ports(control),
        )
        cluster_map = add_entrypoints(cluster_map, _ports(of_agents))
        held.pop_all()
    workers = cluster_map.nodes if has_workers else ()
    return LocalStart(
        cluster_map=cluster_map,
        nodes=_by_name(cluster_map.nodes, nodes),
        workers=workers,
        control=_by_name(workers, control),
        agents=_by_name(cluster_map.entrypoints, of_agents),
    )


def hold_missing(
    cluster_map: ClusterMap,
    *,
    nodes: Sequence[Node],
    workers: Sequence[Node],
    agents: Sequence[Entrypoint],
    agents_added: int,
) -> LocalStart:
    """For a cluster that is there: what of it is down, and so many agents more.

    What the map lacks of that is in `cluster_map` of the answer, in one new epoch at most. Raises
    NodeStartFailed if the port of a node or of an agent is taken.
    """
    with ExitStack() as held:
        of_nodes = _hold(held, bind_known_ports(nodes))
        of_agents = _hold(held, bind_known_ports(agents, AGENT.noun))
        lacks_control = bool(workers) and any(node.control is None for node in cluster_map.nodes)
        new_count = (len(cluster_map.nodes) if lacks_control else 0) + agents_added
        new = _hold(held, bind_new_ports(new_count, HOST))
        new_control, of_added = _split(new, agents_added)
        grown = grow_map(
            cluster_map, control_ports=_ports(new_control), agent_ports=_ports(of_added)
        )
        workers = [grown.node_by_name[node.name] for node in workers]
        if lacks_control:
            control = _by_name(grown.nodes, new_control)
        else:
            control = bind_control_ports(workers)
        held.pop_all()
    added = grown.entrypoints[len(cluster_map.entrypoints) :]
    return LocalStart(
        cluster_map=grown,
        nodes=_by_name(nodes, of_nodes),
        workers=workers,
        control=control,
        agents=_by_name((*agents, *added), [*of_agents, *of_added]),
    )


def close_all(listeners: Iterable[Listener]) -> None:
    """Close listening sockets, which may be closed already."""
    for listener in listeners:
        listener.close()


def _hold(held: ExitStack, listeners: list[Listener]) -> list[Listener]:
    held.callback(close_all, listeners)
    return listeners


def _split(listeners: Sequence[Listener], agents: int) -> tuple[list[Listener], list[Listener]]:
    """All but the last ones, and those, which are of agents."""
    first = len(listeners) - agents
    return list(listeners[:first]), list(listeners[first:])


def _ports(listeners: Iterable[Listener]) -> list[int]:
    return [listener.getsockname()[1] for listener in listeners]


def _by_name(
    places: Sequence[Node | Entrypoint], listeners: Sequence[Listener]
) -> dict[str, Listener]:
    return {place.name: one for place, one in zip(places, listeners, strict=True)}
