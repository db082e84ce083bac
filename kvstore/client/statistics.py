"""What the nodes of a cluster say of themselves."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

from .. import wire
from ..errors import NodeError, ProtocolError
from .context import ClientContext
from .inquiry import ask_node
from .router import Lane


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """One node: `statistics` is its STAT answer, empty if it gave none; then `problem` says why."""

    node: str
    address: str
    is_alive: bool
    problem: str = ""
    statistics: dict[str, Any] = field(default_factory=dict)


async def ask_statistics(context: ClientContext, deadline_s: float) -> list[NodeReport]:
    """A report for each node of the map that serves a target, all asked at once."""
    cluster_map = context.router.map
    nodes = [node for node in cluster_map.nodes if cluster_map.targets_by_node[node.name]]

    async def ask(name: str, address: str) -> NodeReport:
        target = cluster_map.targets_by_node[name][0]
        channel = context.router.channel(target.name, Lane.READ)
        try:
            body = await ask_node(channel, wire.Op.STAT, deadline_s=deadline_s, loop=context.loop)
            return NodeReport(
                node=name, address=address, is_alive=True, statistics=read_statistics(name, body)
            )
        except NodeError as error:
            return NodeReport(node=name, address=address, is_alive=False, problem=error.detail)

    return list(await asyncio.gather(*(ask(node.name, node.address) for node in nodes)))


def read_statistics(node: str, body: bytes | bytearray) -> dict[str, Any]:
    """The object in a STAT answer; ProtocolError if there is none. Its figures are not checked."""
    try:
        statistics = json.loads(body)
    except RecursionError as error:
        # Text and not a depth: the limit is the interpreter's, and depends on who calls.
        raise ProtocolError(node, "its statistics are nested too deeply") from error
    except ValueError as error:
        raise ProtocolError(node, f"its statistics are not JSON: {error}") from error
    if not isinstance(statistics, dict):
        raise ProtocolError(node, f"its statistics are {type(statistics).__name__}, not an object")
    return statistics
