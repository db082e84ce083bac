"""Requests as operations see them, and the frames they answer with."""

from __future__ import annotations

from dataclasses import dataclass

from .. import wire
from .effects import Drain, Operation, Send
from .node import Node


@dataclass(slots=True)
class Request:
    """One request whose body has arrived and fits its checksum; its payload is still to come.

    `due_s`: the instant, on the node's monotonic clock, after which nobody waits for the answer.
    """

    header: wire.Header
    body: bytes
    due_s: float


def answer(
    node: Node,
    request: Request,
    *,
    body: bytes = b"",
    count: int = 0,
    status: wire.Status = wire.Status.OK,
    payload_bytes: int = 0,
    is_last: bool = True,
) -> memoryview:
    """Header and body of a response frame to `request`."""
    frame = wire.pack_frame(
        wire.Op(request.header.op),
        wire.KIND_RESPONSE,
        request_id=request.header.request_id,
        body=body,
        count=count,
        payload_bytes=payload_bytes,
        epoch=node.epoch,
        status=status,
        target=request.header.target,
        is_last=is_last,
    )
    return memoryview(frame)


def refuse(node: Node, request: Request, status: wire.Status, text: str = "") -> Operation:
    """Answer with a status other than OK; `text` tells a person why."""
    if status is wire.Status.BUSY:
        node.counters.busy_refusals += 1
    elif status is wire.Status.EXPIRED:
        node.counters.expired_requests += 1
    # It may quote what a peer sent, and JSON can say half of a surrogate pair, which UTF-8 cannot.
    body = text.encode(errors="backslashreplace")
    yield Send([answer(node, request, status=status, body=body)])


def refuse_unread(node: Node, request: Request, status: wire.Status, text: str = "") -> Operation:
    """The same for a request whose payload was not taken: it is thrown away first."""
    if request.header.payload_bytes:
        yield Drain(request.header.payload_bytes)
    yield from refuse(node, request, status, text)
