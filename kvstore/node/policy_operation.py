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
            if not (yield NeedTurn(node.policy.turn, request.due_s)):
                yield from refuse(node, request, wire.Status.EXPIRED)
                return
            try:
                yield from _take(node, offered)
            finally:
                node.policy.turn.release()
    yield Send([answer(node, request, body=node.policy.current.to_json())])


def _take(node: Node, offered: RetentionPolicy) -> Operation:
    """Have a newer policy written down, and then follow it. Runs while the turn is held."""
    if not offered.is_newer_than(node.policy.current):
        return
    try:
        yield Work(partial(node.policy.save, offered))
    except OSError as error:
        # A full disk must not keep a policy from taking effect that would empty it. After a restart
        # the node learns it anew from the others.
        log.error("policy not written version=%d: %s", offered.version, error.strerror or error)
    node.policy.current = offered
    log.info("policy taken node=%s version=%d", node.name, offered.version)
