"""What a node does for each request: the refusals all share, then one generator an operation."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from .. import wire
from ..cluster.entities import ClusterMap
from .answers import Request, answer, refuse, refuse_unread
from .effects import NeedTurn, Operation, Send, Work
from .evict_operation import evict, withdraw
from .freeing import free_slots
from .ghosts import MissReason
from .lost_target import answer_as_empty
from .map_follower import MapFollower
from .node import Node, describe_node
from .policy_operation import policy
from .read_at_once import CopiedAnswer, FileAnswer, plan_read_at_once
from .read_operation import read
from .report_operation import report
from .scan_operation import scan
from .segment import ABSENT
from .target import Target
from .touch_operation import touch
from .write_operation import write


@dataclass(slots=True)
class Session:
    """What a node knows of one peer: the names of the targets it greeted.

    Not their numbers, which may be others in the next map.
    """

    greeted: set[str] = field(default_factory=set)


def plan_at_once(
    node: Node, session: Session, request: Request
) -> CopiedAnswer | FileAnswer | None:
    """The answer to a request that is served without waiting for anything, if it is such a one."""
    header = request.header
    if header.op != wire.Op.READ or find_refusal(node, session, request) is not None:
        return None
    target = node.targets[header.target]
    return None if target.is_lost else plan_read_at_once(node, target, request)


def begin_operation(node: Node, session: Session, request: Request) -> Operation:
    """The answer to a request. Raises wire.FrameError for a body that breaks the protocol."""
    header = request.header
    is_known = session.greeted or header.op == wire.Op.HELLO
    if header.epoch > node.epoch and node.follower is not None and is_known:
        return _look_for_map(node, node.follower, session, request)
    return _begin(node, session, request)


def _look_for_map(
    node: Node, follower: MapFollower, session: Session, request: Request
) -> Operation:
    """Follow the cluster map if there is a newer one, and answer the request then."""
    if (yield NeedTurn(follower.turn, request.due_s)):
        try:
            epoch = request.header.epoch
            if epoch > node.epoch and follower.may_look(epoch):
                cluster_map: ClusterMap | None = yield Work(follower.look)
                if cluster_map is not None:
                    node.targets = follower.follow(cluster_map, node.targets)
                    node.epoch = follower.current.epoch
        finally:
            follower.turn.release()
    yield from _begin(node, session, request)


def _begin(node: Node, session: Session, request: Request) -> Operation:
    header = request.header
    refusal = find_refusal(node, session, request)
    if refusal is not None:
        return refuse_unread(node, request, *refusal)
    if header.op == wire.Op.HELLO:
        return _hello(node, session, request)
    if header.op in _NODE_OPERATIONS:
        return _NODE_OPERATIONS[wire.Op(header.op)](node, request)
    target = node.targets[header.target]
    if target.is_lost and header.op != wire.Op.WRITE:
        return answer_as_empty(node, request)
    return _TARGET_OPERATIONS[wire.Op(header.op)](node, target, request)


def find_refusal(node: Node, session: Session, request: Request) -> tuple[wire.Status, str] | None:
    """Why the request is not served at all, if it is not. The order is part of the protocol."""
    header = request.header
    if header.payload_bytes and header.op != wire.Op.WRITE:
        return wire.Status.BAD_REQUEST, "only WRITE has a payload"
    if header.op != wire.Op.HELLO:
        if not session.greeted:
            return wire.Status.NOT_GREETED, "the first request must be HELLO"
        if header.epoch != node.epoch:
            return wire.Status.STALE_EPOCH, f"epoch {header.epoch}, expected {node.epoch}"
        if header.op in wire.AGENT_OPS:
            text = f"{wire.Op(header.op).name} is for an agent, and this is a storage node"
            return wire.Status.BAD_REQUEST, text
        is_for_target = header.op not in _NODE_OPERATIONS
        if is_for_target and not _has_greeted(node, session, header.target):
            return wire.Status.NOT_GREETED, f"target {header.target} was not greeted"
    if node.clock.monotonic_s() > request.due_s:
        return wire.Status.EXPIRED, ""
    return None


def _has_greeted(node: Node, session: Session, number: int) -> bool:
    target = node.targets.get(number)
    return target is not None and target.name in session.greeted


def _hello(node: Node, session: Session, request: Request) -> Operation:
    header = request.header
    cluster, name = wire.parse_hello(request.body)
    target = node.targets.get(header.target)
    if cluster != node.cluster:
        body = wire.pack_hello(node.cluster, target.name if target else "")
        yield Send([answer(node, request, body=body, status=wire.Status.WRONG_CLUSTER)])
        return
    if header.epoch != node.epoch:
        text = f"epoch {header.epoch}, expected {node.epoch}"
        yield from refuse(node, request, wire.Status.STALE_EPOCH, text)
        return
    if target is None or target.name != name:
        served = ", ".join(f"{n} {t.name}" for n, t in sorted(node.targets.items()))
        text = f"target {header.target} {name!r} is not here; {node.name} serves {served}"
        yield from refuse(node, request, wire.Status.WRONG_TARGET, text)
        return
    session.greeted.add(name)
    yield Send([answer(node, request, body=request.body)])


def _stat(node: Node, request: Request) -> Operation:
    body = json.dumps(describe_node(node), separators=(",", ":")).encode()
    if len(body) > wire.BODY_BYTES_MAX:
        # Hundreds of targets, or hundreds of TTL classes in each of dozens.
        text = f"STAT would be {len(body)} bytes long, at most {wire.BODY_BYTES_MAX}"
        yield from refuse(node, request, wire.Status.BUSY, text)
        return
    yield Send([answer(node, request, body=body)])


def _note(node: Node, request: Request) -> Operation:
    try:
        node.notes.add(request.body)
    except ValueError as error:
        yield from refuse(node, request, wire.Status.BAD_REQUEST, str(error))
        return
    yield Send([answer(node, request)])


def _match(node: Node, target: Target, request: Request) -> Operation:
    keys = wire.split_keys(request.body, request.header.count)
    is_here = target.index.contains_each(keys)
    if not request.header.is_probe:
        target.statistics.match_keys += len(keys)
        target.statistics.match_hits += int(np.count_nonzero(is_here))
        target.misses.note(request.body, ~is_here)
    body = np.packbits(is_here, bitorder="little").tobytes()
    yield Send([answer(node, request, body=body, count=len(keys))])


def _locate(node: Node, target: Target, request: Request) -> Operation:
    keys = wire.split_keys(request.body, request.header.count)
    records = np.zeros(len(keys), wire.LOCATION)
    for row, location in enumerate(target.index.find(keys)):
        if location == ABSENT:
            continue
        segment, slot = target.index.resolve(location)
        columns, record = segment.columns, records[row]
        record["status"] = 1
        record["shard"] = columns.shard[slot]
        record["payload_bytes"] = segment.shape.geometry.payload_bytes
        record["generation"] = columns.generation[slot]
        record["block_xxh3"] = columns.block_xxh3[slot]
        record["last_used_s"] = columns.last_used_s[slot]
        record["block_index"] = columns.block_index[slot]
    yield Send([answer(node, request, body=records.tobytes(), count=len(keys))])


def _forget(node: Node, target: Target, request: Request) -> Operation:
    keys = wire.split_keys(request.body, request.header.count)
    locations = target.unlink(keys)
    found = [location for location in locations if location != ABSENT]
    target.statistics.forgotten += len(found)
    gone = [key for key, location in zip(keys, locations, strict=True) if location != ABSENT]
    target.ghosts.remember(gone, MissReason.FORGOTTEN)
    yield from free_slots(node, target, found)
    body = bytes(location != ABSENT for location in locations)
    yield Send([answer(node, request, body=body, count=len(keys))])


_TARGET_OPERATIONS: dict[wire.Op, Callable[[Node, Target, Request], Operation]] = {
    wire.Op.MATCH: _match,
    wire.Op.LOCATE: _locate,
    wire.Op.READ: read,
    wire.Op.WRITE: write,
    wire.Op.FORGET: _forget,
    wire.Op.REPORT: report,
    wire.Op.SCAN: scan,
    wire.Op.EVICT: evict,
    wire.Op.WITHDRAW: withdraw,
    wire.Op.TOUCH: touch,
}
_NODE_OPERATIONS: dict[wire.Op, Callable[[Node, Request], Operation]] = {
    wire.Op.STAT: _stat,
    wire.Op.POLICY: policy,
    wire.Op.NOTE: _note,
}
"""These concern the node as a whole; a peer that greeted any of its targets may ask them."""
