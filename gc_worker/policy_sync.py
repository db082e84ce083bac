"""Keeps the policy of this worker, its node and its peers the same: the newest document wins.

Gossip without any state of its own: every two seconds the own node and two random peers are asked
for their document (POLICY); a newer one is taken and given to the own node, an older one is
answered with ours. So a change that reached one node reaches all within seconds, and a node that
was down catches up when it is back.
"""

from __future__ import annotations

import asyncio
import logging

from kvstore import wire
from kvstore.errors import InvalidArgument, NodeError, ProtocolError
from kvstore.retention import RetentionPolicy

from .context import WorkerContext

log = logging.getLogger(__name__)

INTERVAL_S = 2.0
PEERS_ASKED = 2


async def run(context: WorkerContext) -> None:
    """Exchanges policies until it is cancelled."""
    while True:
        await sync_once(context)
        await context.sleep(INTERVAL_S)


async def sync_once(context: WorkerContext) -> None:
    """One exchange with the own node and a few peers. Faults are counted and come to nothing."""
    names = [
        node.name
        for node in context.link.map.nodes
        if node.name != context.node and context.link.map.targets_by_node[node.name]
    ]
    peers = context.rng.sample(names, min(PEERS_ASKED, len(names)))
    nodes = [context.node, *peers]
    found = await asyncio.gather(*(_exchange(context, node) for node in nodes))
    for policy in found:
        if policy is not None:
            take_policy(context, policy)
    if found[0] is not None:
        context.policy_known.set()
    behind = [
        node
        for node, policy in zip(nodes, found, strict=True)
        if policy is not None and context.policy.is_newer_than(policy)
    ]
    document = context.policy.to_json()
    await asyncio.gather(*(_exchange(context, node, document) for node in behind))


def take_policy(context: WorkerContext, policy: RetentionPolicy) -> bool:
    """Obey `policy` from now on if it is newer than the one obeyed now; True if so."""
    if not policy.is_newer_than(context.policy):
        return False
    before, context.policy = context.policy, policy
    context.counters.policy_changes += 1
    context.policy_changed.set()
    context.events.add(
        context.now_s(), "policy_changed", version=policy.version, before=before.version
    )
    log.info("policy: version %d follows %d", policy.version, before.version)
    return True


async def _exchange(
    context: WorkerContext, node: str, document: bytes = b""
) -> RetentionPolicy | None:
    """Give a node a document, or only ask; its document then, None if it gave none."""
    try:
        answer = await context.link.ask(
            context.link.any_target(node), wire.Op.POLICY, body=document, count=len(document)
        )
        return RetentionPolicy.parse(answer)
    except InvalidArgument as error:
        problem: Exception = ProtocolError(node, f"its policy: {error}")
    except NodeError as error:
        problem = error
    context.counters.node_errors += 1
    log.debug("no policy exchanged: %s", problem)
    return None
