"""Answers for a target whose folder was removed or replaced: none of its shards is here.

Its segments are still open and could be read, but what a peer is told to be here must still be here
after a restart. Writes are refused by `write_operation`.
"""

from __future__ import annotations

from .. import wire
from .answers import Request, answer
from .effects import Operation, Send
from .node import Node


def answer_as_empty(node: Node, request: Request) -> Operation:
    """Answer any request to a target but WRITE. Raises wire.FrameError for a malformed body."""
    count, op = request.header.count, wire.Op(request.header.op)
    if op is wire.Op.READ:
        wire.parse_read(request.body, count)
        body = wire.pack_part(0, bytes(count * wire.PART_RECORD.itemsize))
    elif op is wire.Op.REPORT:
        wire.parse_records(request.body, wire.REPORT_ITEM, count)
        body = bytes([wire.ReportOutcome.ABSENT]) * count
    else:
        wire.split_keys(request.body, count)
        answer_bytes = {
            wire.Op.MATCH: -(-count // 8),
            wire.Op.LOCATE: count * wire.LOCATION.itemsize,
            wire.Op.FORGET: count,
        }
        body = bytes(answer_bytes[op])
    yield Send([answer(node, request, body=body, count=count)])
