"""Answers for a target whose folder was removed or replaced: none of its shards is here.

Its segments are still open and could be read, but what a peer is told to be here must still be here
after a restart. Writes are refused by `write_operation`.
"""

from __future__ import annotations

from .. import wire
from .answers import Request, answer, refuse
from .effects import Operation, Send
from .node import Node
from .read_heads import find_read_mistake
from .scan_operation import pack_empty_scan

_RECORDS = {
    wire.Op.REPORT: wire.REPORT_ITEM,
    wire.Op.EVICT: wire.EVICT_ITEM,
    wire.Op.WITHDRAW: wire.WITHDRAW_ITEM,
    wire.Op.TOUCH: wire.TOUCH_ITEM,
}
"""Requests of records; the answer has a byte for each of them."""
_ANSWER_BYTES = {
    wire.Op.REPORT: int(wire.ReportOutcome.ABSENT),
    wire.Op.EVICT: int(wire.EvictOutcome.ABSENT),
    wire.Op.WITHDRAW: int(wire.EvictOutcome.ABSENT),
    wire.Op.TOUCH: 0,
}


def answer_as_empty(node: Node, request: Request) -> Operation:
    """Answer any request to a target but WRITE. Raises wire.FrameError for a malformed body."""
    count, op = request.header.count, wire.Op(request.header.op)
    if op is wire.Op.READ:
        shard_bytes, flags, _ = wire.parse_read(request.body, count)
        mistake = find_read_mistake(shard_bytes, flags)
        if mistake:
            yield from refuse(node, request, wire.Status.BAD_REQUEST, mistake)
            return
        body = wire.pack_part(0, bytes(count * wire.PART_RECORD.itemsize))
    elif op is wire.Op.SCAN:
        wire.parse_scan(request.body)
        body = pack_empty_scan()
    elif op in _RECORDS:
        wire.parse_records(request.body, _RECORDS[op], count)
        body = bytes([_ANSWER_BYTES[op]]) * count
    else:
        wire.split_keys(request.body, count)
        answer_bytes = {
            wire.Op.MATCH: -(-count // 8),
            wire.Op.LOCATE: count * wire.LOCATION.itemsize,
            wire.Op.FORGET: count,
        }
        body = bytes(answer_bytes[op])
    yield Send([answer(node, request, body=body, count=count)])
