"""The retention policy as some storage node has it; for agents, which obey its hot settings."""

from __future__ import annotations

from .. import wire
from ..errors import InvalidArgument, ProtocolError
from ..retention import RetentionPolicy
from .context import ClientContext
from .inquiry import ask_node
from .router import Lane


async def ask_policy(context: ClientContext, turn: int, deadline_s: float) -> RetentionPolicy:
    """What one node has: number `turn` of those that serve a target, counted round and round.

    A node may be behind the others for some seconds. Raises NodeError: unreachable, refused, late,
    or what it sent is no policy.
    """
    cluster_map = context.router.map
    targets = [of_node[0] for of_node in cluster_map.targets_by_node.values() if of_node]
    channel = context.router.channel(targets[turn % len(targets)].name, Lane.READ)
    body = await ask_node(channel, wire.Op.POLICY, deadline_s=deadline_s, loop=context.loop)
    try:
        return RetentionPolicy.parse(body)
    except InvalidArgument as error:
        raise ProtocolError(channel.node, f"its policy: {error}") from error
