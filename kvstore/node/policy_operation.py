"""POLICY: says which retention policy this node has, and takes a newer one."""

from __future__ import annotations

import logging
from functools import partial

from .. import wire
from ..errors import InvalidArgument
from ..retention import RetentionPolicy
from .answers import Request, answer, refuse
from .effects import NeedTurn, Operation, Send, Work
from .node import Node

log = logging.getLogger(__name__)


def policy(node: Node, request: Request) -> Operation:
    """Answer a POLICY: the node's policy as it is afterwards."""
    if request.body:
        try:
            offered = RetentionPolicy.parse(request.body)
        except InvalidArgument as error:
            yield from refuse(node, request, wire.Status.BAD_REQUEST, str(error))
            return
        if offered.is_newer_than(node.policy.current):
            node.policy.take(offered)
            log.info("policy taken node=%s version=%d", node.name, offered.version)
            if not (yield NeedTurn(node.policy.turn, request.due_s)):
                yield from refuse(node, request, wire.Status.EXPIRED)
                return
            try:
                yield from _save(node)
            finally:
                node.policy.turn.release()
    yield Send([answer(node, request, body=node.policy.current.to_json())])


def _save(node: Node) -> Operation:
    """Have the newest policy written down, or noted as still to be. Runs while the turn is held."""
    store = node.policy
    if store.is_saved:
        return
    policy = store.current
    try:
        yield Work(partial(store.save, policy))
    except OSError as error:
        store.note_failed(policy, error, node.clock.monotonic_s())
    else:
        store.note_saved(policy)
